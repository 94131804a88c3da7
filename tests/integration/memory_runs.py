"""Runs plans on real workers and sets what they track against the planner's model."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.builders import a_spec
from tests.integration.fleet import HERE, Fleet, Host, Zygote, make_plan

from spottrain.morphing.memory.memory import StageMemory
from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.morphing.memory.stage import CONVERSION, INT64_BYTES, QUANTISED_ELEMENTS
from spottrain.morphing.simulate.compute import Compute
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.tracer import trace
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import LoaderSpec, ModelFacts, Profile, Reduction
from spottrain.wire.plan import Plan, ScheduleKind, Semantics, Slot

EXAMPLES = HERE.parents[1] / "examples"
WORKDIRS = {"byte_gpt:training_job": EXAMPLES}
NAMES = "abcdefghijkl"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One plan of one model."""

    entrypoint: str
    depth: int
    width: int
    schedule: ScheduleKind = "varuna"
    recompute: bool = True
    reduction: Reduction = "fast"
    microbatch_size: int = 2
    nodes: int = 12
    """Virtual nodes of a mini-batch."""
    chunks: int = 1
    in_flight_bound: int | None = None
    segments: int = 1
    checkpoint_every_steps: int = 1000
    steps: int = 2
    semantics: Semantics = "synchronous"
    shares_state: bool = False
    """Whether all ranks are in one VM, and share their stage's state."""
    tensor_parallel: int = 1
    """Ranks that divide the matrices of a stage; of several, all are in one VM, and share state."""

    def __str__(self) -> str:
        module, _, function = self.entrypoint.partition(":")
        name = function.removesuffix("_job") if module.endswith("_jobs") else module
        kind = self.schedule + (f"/{self.chunks}" if self.chunks > 1 else "")
        bound = f" <={self.in_flight_bound}" if self.in_flight_bound else ""
        again = "recompute" if self.recompute else "keep"
        again += f"/{self.segments}" if self.segments > 1 else ""
        saves = self.checkpoint_every_steps < self.steps
        return (
            f"{name} {self.depth}x{self.width} {kind}{bound} {again} {self.reduction} "
            f"m={self.microbatch_size}{' checkpoint' if saves else ''}"
            f"{'' if self.semantics == 'synchronous' else ' stale'}"
            f"{f' t={self.tensor_parallel}' if self.tensor_parallel > 1 else ''}"
            f"{' shared' if self.shares_state else ''}"
        )

    @property
    def workdir(self) -> Path:
        """Where the model's module is."""
        return WORKDIRS.get(self.entrypoint, HERE)

    def spec(self, folder: Path) -> JobSpec:
        """Return the job's settings."""
        return a_spec(
            name="memory",
            entrypoint=self.entrypoint,
            steps=self.steps,
            minibatch_size=self.nodes * self.microbatch_size,
            microbatch_size=self.microbatch_size,
            reduction=self.reduction,
            semantics=self.semantics,
            checkpoint_path=str(folder / "checkpoints"),
            checkpoint_every_steps=self.checkpoint_every_steps,
            lease_s=100.0,
            # What loader processes take is not the worker's, and whether a job has any by
            # itself depends on how long fetching took.
            loader=LoaderSpec(workers=0),
        )

    def plan(self, spec: JobSpec, num_sections: int) -> Plan:
        """Return the plan, its stages cut evenly."""
        runs = self.depth * self.chunks
        plan = make_plan(
            spec,
            self.depth,
            self.width,
            NAMES,
            num_sections,
            schedule=self.schedule,
            recompute=self.recompute,
            chunks=self.chunks,
            in_flight_bound=self.in_flight_bound,
            segments=self.segments,
            stage_bounds=tuple(num_sections * k // runs for k in range(runs + 1)),
        )
        if not self.shares_state and self.tensor_parallel == 1:
            return plan
        sections = facts_of(self.entrypoint).sections
        sizes = tuple(one.param_bytes + one.optimizer_bytes for one in sections)
        ranks = range(self.tensor_parallel * len(plan.slots))
        return replace(
            plan,
            slots=tuple(Slot(vm_id=NAMES[0], index=rank) for rank in ranks),
            devices_per_stage_replica=self.tensor_parallel,
            shared_state=sizes,
        )


@dataclass(frozen=True)
class Rank:
    """What one worker tracked at most, and what the planner allows it."""

    stage: int
    replica: int
    tracked_bytes: int
    allowed: StageMemory
    converted_bytes: int
    """Of what is allowed, what quantising a gradient takes: perhaps not at the peak."""

    @property
    def share(self) -> float:
        """Tracked over allowed."""
        return self.tracked_bytes / self.allowed.total_bytes

    @property
    def share_of_certain(self) -> float:
        """Tracked over what is surely needed at once."""
        return self.tracked_bytes / (self.allowed.total_bytes - self.converted_bytes)


@functools.cache
def facts_of(entrypoint: str) -> ModelFacts:
    """Return what planning needs to know of a model."""
    job = load_job(entrypoint, WORKDIRS.get(entrypoint, HERE))
    return model_facts(job, trace(job))


def measure_profile(
    zygote: Zygote, folder: Path, entrypoint: str, sizes: tuple[int, ...]
) -> Profile:
    """Have one worker measure a model at some micro-batch sizes."""
    run = Run(entrypoint=entrypoint, depth=1, width=1)
    spec = replace(run.spec(folder), minibatch_size=16)
    with Fleet(spec, "a", folder / "log", zygote, workdir=run.workdir) as fleet:
        fleet.ready()
        fleet.machines["a"].send(messages.Calibrate(microbatch_sizes=sizes))
        return fleet.wait_for(
            "profile",
            lambda _, r: r.profile if isinstance(r, messages.Calibrated) else None,
        )


def track(
    zygote: Zygote,
    folder: Path,
    run: Run,
    profile: Profile,
    watch: Callable[[Fleet], None] | None = None,
) -> list[Rank]:
    """Train by the plan; return what every worker tracked.

    Args:
        zygote: Starts machines.
        folder: For checkpoints and logs.
        run: The plan.
        profile: What the planner knows.
        watch: Told of the fleet before workers are forked.
    """
    facts = facts_of(run.entrypoint)
    spec = run.spec(folder)
    plan = run.plan(spec, len(facts.sections))
    hosts = {
        name: Host(num_slots=count)
        for name, count in Counter(slot.vm_id for slot in plan.slots).items()
    }
    names = tuple(hosts)
    with Fleet(spec, names, folder / "log", zygote, workdir=run.workdir, hosts=hosts) as fleet:
        fleet.ready()
        if watch is not None:
            watch(fleet)
        fleet.run(plan, fleet.initialise(), evaluate=True)
        assert fleet.wait_for_end(set(names))
        history = fleet.history
    tracked = {
        Slot(vm_id=name, index=r.slot): r.peak_bytes
        for name, r in history
        if isinstance(r, messages.MinibatchCommitted)
    }
    if run.semantics == "stale_by_one":
        facts = facts.with_delayed()
    compute = Compute(semantics=run.semantics)
    allowed = rank_bytes(facts, profile, plan, run.reduction, compute)
    if run.checkpoint_every_steps >= run.steps:
        allowed = tuple(replace(one, snapshot_bytes=0) for one in allowed)
    converted = 0
    if run.reduction == "exact":
        largest = max(section.summed_bytes for section in facts.sections)
        converted = CONVERSION * min(largest, INT64_BYTES * QUANTISED_ELEMENTS[False])
    return [
        Rank(rank % run.depth, rank // run.depth, tracked[slot], allowed[rank], converted)
        for rank, slot in enumerate(plan.slots)
    ]
