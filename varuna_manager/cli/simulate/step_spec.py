"""What ``spottrain simulate step`` reads: one replica's mini-batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, PositiveInt, model_validator

from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.simulate import replica
from spottrain.varuna_manager.cli.simulate.files import NotNegative, Part, Positive


class StageSpec(Part):
    """Times of one micro-batch on a stage."""

    name: str | None = None
    """For people; changes nothing."""
    forward_s: Positive
    backward_s: Positive
    recompute_s: NotNegative | None = None
    """Left out, or 0: the stage does not recompute."""


class LinkSpec(Part):
    """Time of a message: constant, or by latency and bandwidth."""

    send_s: NotNegative | None = None
    """Messages do not slow each other down."""
    latency_s: NotNegative | None = None
    bandwidth_bytes_per_s: Positive | None = None
    """A direction carries one message at a time."""
    activation_bytes: Annotated[int, Field(ge=0)] | None = None
    """Of one micro-batch; a gradient has as many."""

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        values = self.latency_s, self.bandwidth_bytes_per_s, self.activation_bytes
        given = [value is not None for value in values]
        constant = self.send_s is not None
        if constant == all(given) or constant == any(given):
            raise ValueError(
                "needs either send_s or all of latency_s, bandwidth_bytes_per_s and "
                "activation_bytes"
            )
        return self

    def link(self) -> replica.Link:
        """Return the link as the simulator knows it."""
        if self.send_s is not None:
            return replica.Link(latency_s=self.send_s)
        assert self.latency_s is not None
        assert self.bandwidth_bytes_per_s is not None
        assert self.activation_bytes is not None
        return replica.Link(
            latency_s=self.latency_s,
            transfer_s=self.activation_bytes / self.bandwidth_bytes_per_s,
        )


class JitterSpec(Part):
    """Chance in what tasks and transfers take."""

    relative: NotNegative
    """Standard deviation as a share of the time."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The same seed gives the same answer."""


class StepSpec(Part):
    """One replica's mini-batch."""

    schedule: Literal["varuna", "1f1b", "gpipe", "interleaved"] = Field(
        validation_alias=AliasChoices("schedule", "schedule_kind", "kind")
    )
    num_microbatches: PositiveInt
    stages: Annotated[list[StageSpec], Field(min_length=1)]
    links: list[LinkSpec] = Field(default_factory=list)
    """Between neighbouring stages; an interleaved schedule's may end with that from the
    last stage to the first."""
    allreduce_s: NotNegative = 0.0
    """Added at the end."""
    chunks: PositiveInt | None = None
    """Parts of the model on each stage; 2 if interleaved and left out."""
    bound: Annotated[int, Field(gt=0, le=2**31)] | None = None
    """Most micro-batches in flight on a stage; as its schedule says if left out."""
    conditions: Literal["runtime", "in-order"] = "runtime"
    jitter: JitterSpec | None = None

    @model_validator(mode="after")
    def _recomputes_everywhere_or_nowhere(self) -> Self:
        if self.recompute:
            for p, stage in enumerate(self.stages[:-1]):
                if not stage.recompute_s:
                    raise ValueError(
                        f"stages[{p}].recompute_s: is missing or 0, but other stages "
                        "recompute; add it, or remove it from all stages"
                    )
        return self

    @model_validator(mode="after")
    def _interleaved_has_its_lists_bound(self) -> Self:
        if self.schedule == "interleaved" and self.bound is not None:
            raise ValueError(
                "bound: an interleaved schedule is followed strictly and has no bound of "
                f"its own: got {self.bound}; leave it out"
            )
        return self

    @property
    def recompute(self) -> bool:
        """Return whether the stages recompute; the last one never does."""
        return any(stage.recompute_s for stage in self.stages[:-1])

    def times(self) -> list[replica.StageTimes]:
        """Return the stages' times as the simulator knows them."""
        return [
            replica.StageTimes(
                forward_s=stage.forward_s,
                recompute_s=stage.recompute_s or 0.0,
                backward_s=stage.backward_s,
            )
            for stage in self.stages
        ]

    def chance(self) -> replica.Jitter | None:
        """Return the jitter as the simulator knows it."""
        jitter = self.jitter
        return None if jitter is None else replica.Jitter(**jitter.model_dump())

    def make_schedule(self) -> Schedule:
        """Return the schedule to simulate."""
        default = 2 if self.schedule == "interleaved" else 1
        return compact_schedule(
            self.schedule,
            len(self.stages),
            self.num_microbatches,
            recompute=self.recompute,
            chunks=self.chunks or default,
        )


def trace_spec(spec: StepSpec) -> replica.PipelineTrace:
    """Return when everything happens in the mini-batch.

    Raises:
        PlanError: As ``simulate_spec``, or there are too many tasks for a timeline.
    """
    return replica.trace_pipeline(
        spec.make_schedule(),
        spec.times(),
        [link.link() for link in spec.links],
        bound=spec.bound,
        conditions=replica.Conditions(spec.conditions),
        jitter=spec.chance(),
    )


def simulate_spec(spec: StepSpec) -> dict[str, Any]:
    """Return the answer of ``simulate step`` as plain data.

    Raises:
        PlanError: The numbers of stages, links and micro-batches do not fit together.
    """
    run = replica.simulate_pipeline(
        spec.make_schedule(),
        spec.times(),
        [link.link() for link in spec.links],
        bound=spec.bound,
        conditions=replica.Conditions(spec.conditions),
        jitter=spec.chance(),
    )
    pipeline_s = max(run.finish_s)
    return {
        "minibatch_s": pipeline_s + spec.allreduce_s,
        "pipeline_s": pipeline_s,
        "allreduce_s": spec.allreduce_s,
        "conditions": spec.conditions,
        "busy_s": list(run.busy_s),
        "idle_s": [pipeline_s - busy_s for busy_s in run.busy_s],
        "peak_in_flight": list(run.peak_in_flight),
    }
