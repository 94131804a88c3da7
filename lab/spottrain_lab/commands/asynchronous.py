"""``spottrain simulate async-schedule`` and ``async-step``: PipeDream and PipeDream-2BW."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import typer
from pydantic import AliasChoices, Field, model_validator

from spottrain.errors import ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.varuna_manager.cli.console import Output, OutputOption, show, show_json
from spottrain.varuna_manager.cli.simulate.files import read_spec
from spottrain.varuna_manager.cli.simulate.schedule import show_lists, stages_table
from spottrain.varuna_manager.cli.simulate.step_spec import StepSpec, simulate_spec, trace_spec
from spottrain.varuna_manager.cli.simulate.timeline import simulated, write_timeline
from spottrain.varuna_manager.format import number
from spottrain_lab.planners.versions import STALE_KINDS, stale_schedule

MAX_TASKS = 100_000
"""The schedules are made at length."""
WARM_MINIBATCHES = 8
"""After which the pipeline is taken to be full."""


def schedule(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(STALE_KINDS)}.")],
    depth: Annotated[int, typer.Option("--depth", "-P", help="Number of pipeline stages.")],
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-M", help="Micro-batches per replica.")
    ],
    recompute: Annotated[
        bool, typer.Option(help="Recompute activations before the backward pass.")
    ] = True,
    minibatches: Annotated[
        int | None, typer.Option(help="2bw only: number of mini-batches; 3 by default.")
    ] = None,
    vertical_sync: Annotated[
        bool,
        typer.Option("--vertical-sync", help="pipedream only: one version on all stages."),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the tasks of each stage of a pipeline that is not drained, in order.

    As `spottrain schedule`; F3@1 uses the weights after 1 update: pipedream's after each
    micro-batch, 2bw's after each mini-batch.
    """
    known = next((one for one in STALE_KINDS if one == kind), None)
    if known is None:
        raise ConfigError(f"schedule must be one of {', '.join(STALE_KINDS)}: got {kind}")
    if minibatches is None:
        minibatches = 3 if kind == "2bw" else 1
    if depth * microbatches * minibatches > MAX_TASKS:
        raise ConfigError(
            f"{kind} is shown for at most {MAX_TASKS:,} micro-batches times stages: "
            f"got {microbatches} on {depth}; take fewer"
        )
    try:
        lists = stale_schedule(
            known,
            depth,
            microbatches,
            minibatches=minibatches,
            recompute=recompute,
            vertical_sync=vertical_sync,
        ).format()
    except PlanError as error:
        raise ConfigError(str(error)) from error
    show_lists(lists, output)


class AsyncStepSpec(StepSpec):
    """One mini-batch of a pipeline that is always full."""

    schedule: Literal["pipedream", "2bw"] = Field(  # type: ignore[assignment]
        validation_alias=AliasChoices("schedule", "schedule_kind", "kind")
    )

    @model_validator(mode="after")
    def _double_buffers_are_enough(self) -> Self:
        if self.schedule == "2bw" and self.num_microbatches < len(self.stages):
            raise ValueError(
                "num_microbatches: 2bw needs as many as there are stages: got "
                f"{self.num_microbatches} for {len(self.stages)}; raise it"
            )
        return self

    def of(self, minibatches: int) -> StepSpec:
        """Return so many mini-batches without a drain between them, as one of 1F1B."""
        microbatches = minibatches * self.num_microbatches
        return self.model_copy(update={"schedule": "1f1b", "num_microbatches": microbatches})

    def simulate(self) -> dict[str, Any]:
        """Return the answer as plain data, see ``simulate_spec``.

        A mini-batch takes what one more takes once the pipeline is full; sums are beside
        the next one's tasks.
        """
        before = simulate_spec(self.of(WARM_MINIBATCHES))
        after = simulate_spec(self.of(2 * WARM_MINIBATCHES))
        pipeline_s = (after["pipeline_s"] - before["pipeline_s"]) / WARM_MINIBATCHES
        busy_s = [
            (later - early) / WARM_MINIBATCHES
            for early, later in zip(before["busy_s"], after["busy_s"], strict=True)
        ]
        depth = len(self.stages)
        versions = [depth - p for p in range(depth)]
        return after | {
            "minibatch_s": max(pipeline_s, self.allreduce_s),
            "pipeline_s": pipeline_s,
            "busy_s": busy_s,
            "idle_s": [pipeline_s - one_s for one_s in busy_s],
            "weight_versions": versions if self.schedule == "pipedream" else [2] * depth,
        }


def step(
    spec: Annotated[Path, typer.Argument(help="JSON: schedule, stages, links.")],
    timeline: Annotated[
        Path | None,
        typer.Option(help=f"Also write a timeline of {WARM_MINIBATCHES} mini-batches."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Simulate one mini-batch of one replica whose pipeline is not drained."""
    asked = read_spec(spec, AsyncStepSpec)
    try:
        document = asked.simulate()
        if timeline is not None:
            names = [stage.name or str(p) for p, stage in enumerate(asked.stages)]
            trace = trace_spec(asked.of(WARM_MINIBATCHES))
            write_timeline(timeline, simulated(trace, names, asked.allreduce_s))
    except PlanError as error:
        raise ConfigError(f"{spec.name}: {error}") from error
    if output is Output.JSON:
        show_json(document)
        return
    show(
        f"mini-batch {number(document['minibatch_s'])} s, beside an all-reduce of "
        f"{number(document['allreduce_s'])} s; conditions: {document['conditions']}",
        stages_table(asked, document),
    )
