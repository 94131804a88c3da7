"""Predicted and measured mini-batch times, in the manner of Varuna's table 7.

``emulated``: every section's task is a sleep, all else is the real runtime: a supervisor
and a worker for each stage and replica, each VM in a network namespace of its own, joined
by a switch that makes links fast, slow or jittery. Needs root. ``real``: models that
compute, as far as stages and replicas fit the cores. Nothing is fitted: the profile comes
from the product's own calibration, on the same machines and links, before the runs.
``divided``: as ``emulated``, but two slots of each VM divide the matrices of its stage.

    python -m tests.bench.bench_accuracy [--only real|emulated|divided] [--quick] [--shapes 2x1,4x2]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["BENCH_WIDTH"] = "512"  # of the plain layers: 17 million parameters

from tests.bench.accuracy_fleet import (
    HERE,
    Measured,
    Trainer,
    job_spec,
    make_plan,
    scratch,
    undisturbed,
)
from tests.bench.accuracy_rows import MOST_VARIATION, Row, markdown
from tests.bench.network import Network
from tests.bench.switch import Links
from tests.integration.fleet import Host, Zygote

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.simulator import expect_step
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.loaded import load
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import ModelFacts, Profile
from spottrain.wire.plan import Plan, ScheduleKind, Slot

T = TypeVar("T")
P = ParamSpec("P")

DEPTHS, WIDTHS = (2, 3, 4, 6, 8), (1, 2, 3)
KINDS_OF_LINKS = {
    "fast": Links(bytes_per_s=0.0, delay_s=0.0, jitter_s=0.0),
    "slow": Links(bytes_per_s=12.5e6, delay_s=2e-3, jitter_s=0.0),
    "jittery": Links(bytes_per_s=50e6, delay_s=2e-3, jitter_s=1.5e-3, seed=1),
}
EMULATED_NODES = 12
CALIBRATORS = 4
GROUP = 2
"""Slots of a VM, which divide the matrices of a stage."""
CONTROL_LOOPS, CONTROL_ADDITIONS, TRIES = 4, 15_000_000, 4


def facts_of(spec: JobSpec) -> ModelFacts:
    """Return what the tracer finds out about a job."""
    loaded = load(spec, HERE)
    return model_facts(loaded.job, loaded.layout)


def predict(plan: Plan, profile: Profile, facts: ModelFacts) -> float:
    """Return the predicted mini-batch time."""
    return expect_step(plan, profile, facts, reduction="fast").step_s


def row_of(
    table: str,
    names: tuple[str, str, str],
    plan: Plan,
    predicted_s: float,
    got: Measured,
    control: float = 0.0,
) -> Row:
    """Return what came out; ``names`` are those of model, links and manner."""
    mean_s = statistics.fmean(got.minibatch_s)
    model, links, mode = names
    return Row(
        table=table,
        model=model,
        links=links,
        shape=plan.shape,
        mode=mode,
        microbatch_size=plan.microbatch_size,
        predicted_s=predicted_s,
        measured_s=got.median_s,
        spread=statistics.pstdev(got.minibatch_s) / mean_s,
        machine_busy=got.machine_busy,
        workers_busy=got.workers_busy,
        control=control,
    )


# --- Emulated ---------------------------------------------------------------------------


def emulated(
    shapes: Sequence[tuple[int, int]], kinds: Sequence[str], minibatches: int
) -> Iterator[Row]:
    """Yield a row for every shape over every kind of links."""
    most = max(CALIBRATORS, *(depth * width for depth, width in shapes))
    with undisturbed() as ahead, Network(most) as network, scratch() as folder:
        if not ahead:
            tell("not permitted to run ahead of other programs: they will disturb")
        zygote = Zygote()
        hosts = {
            f"vm{n}": Host(network.address(n), "eth0", network.namespace(n)) for n in range(most)
        }
        spec = job_spec(folder, "emulated_job:job", EMULATED_NODES, 1)
        facts = facts_of(spec)
        trainer = Trainer(spec, zygote, hosts, folder)
        try:
            for kind in kinds:
                network.set_version(KINDS_OF_LINKS[kind])
                profile = trainer.calibrate(CALIBRATORS)
                tell(f"{kind}: {describe(profile)}")
                for shape in shapes:
                    plan = make_plan(spec, trainer.slots(most), shape, len(facts.sections))
                    got = trainer.train(plan, minibatches)
                    predicted_s = predict(plan, profile, facts)
                    names = ("sleeping", kind, "varuna, recompute")
                    yield row_of("emulated", names, plan, predicted_s, got)
        finally:
            zygote.close()


def divided(
    shapes: Sequence[tuple[int, int]], kinds: Sequence[str], minibatches: int
) -> Iterator[Row]:
    """Yield a row for every shape, of groups of slots, over every kind of links."""
    most = max(depth * width for depth, width in shapes)
    with undisturbed() as ahead, Network(most) as network, scratch() as folder:
        if not ahead:
            tell("not permitted to run ahead of other programs: they will disturb")
        hosts = {
            f"vm{n}": Host(network.address(n), "eth0", network.namespace(n), num_slots=GROUP)
            for n in range(most)
        }
        spec = job_spec(folder, "emulated_job:divided", EMULATED_NODES, 1)
        facts = facts_of(spec)
        with closing(Zygote()) as zygote:
            trainer = Trainer(spec, zygote, hosts, folder)
            for kind in kinds:
                network.set_version(KINDS_OF_LINKS[kind])
                profile = trainer.calibrate(GROUP * most, (GROUP,))
                tell(f"{kind}: {describe(profile)}")
                for depth, width in shapes:
                    slots = trainer.slots(GROUP * depth * width)
                    plan = divided_plan(spec, slots, depth, facts, profile)
                    got = trainer.train(plan, minibatches)
                    names = ("sleeping", kind, f"varuna, recompute, {GROUP} slots a stage")
                    yield row_of("divided", names, plan, plan.predicted_step_s, got)


def divided_plan(
    spec: JobSpec, slots: Sequence[Slot], depth: int, facts: ModelFacts, profile: Profile
) -> Plan:
    """Return the planner's plan of a depth, with the time that it predicts."""
    inputs = PlanInputs(
        slots=tuple(Device(slot=slot, memory_bytes=1 << 40, speed=1.0) for slot in slots),
        minibatch_size=spec.minibatch_size,
        microbatch_size=spec.microbatch_size,
        reduction="fast",
        schedule="varuna",
        recompute=True,
        pipeline_depth=depth,
        tensor_parallel=GROUP,
        facts=facts,
        profile=profile,
    )
    plan = choose_plan(inputs).plan
    assert plan is not None
    return plan


def describe(profile: Profile) -> str:
    """Say what links and tasks were found to be like."""
    link = profile.between_vms
    return (
        f"latency {1e3 * link.latency_s:.2f} ms, {link.bandwidth_bytes_per_s / 1e6:.0f} "
        f"MB/s, jitter {link.jitter:.1%}, {1e3 * profile.task_overhead_s:.2f} ms a task "
        f"beyond its sections, rings of {[ring.ranks for ring in profile.rings]}"
    )


# --- Real -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A job that computes."""

    name: str
    entrypoint: str
    minibatch_size: int
    microbatch_size: int


@dataclass(frozen=True)
class ExecutionMode:
    """How a pipeline is run."""

    shape: tuple[int, int]
    schedule: ScheduleKind = "varuna"
    recompute: bool = True
    chunks: int = 1

    @property
    def name(self) -> str:
        """For people."""
        chunks = f" {self.chunks}" if self.chunks > 1 else ""
        again = ", recompute" if self.recompute else ""
        return f"{self.schedule}{chunks}{again}"


MODELS = (
    Model("GPT", "gpt_job:job", 16, 2),
    Model("GPT", "gpt_job:job", 8, 1),
    Model("MLP", "linear_job:job", 256, 32),
    Model("MLP", "linear_job:job", 512, 128),
)
MANNERS = (
    ExecutionMode((1, 1), "gpipe", recompute=False),
    ExecutionMode((2, 1), "varuna"),
    ExecutionMode((2, 1), "1f1b", recompute=False),
    ExecutionMode((2, 1), "gpipe"),
    ExecutionMode((2, 1), "interleaved", recompute=False, chunks=2),
    ExecutionMode((1, 2), "varuna"),
)


def real(
    shapes: Sequence[tuple[int, int]],
    models: Sequence[Model],
    modes: Sequence[ExecutionMode],
    minibatches: int,
) -> Iterator[Row]:
    """Yield a row for every model and manner, over the loopback device."""
    hosts = {f"vm{n}": Host() for n in range(2)}
    zygote = Zygote()
    try:
        for model in models:
            with scratch() as folder:
                spec = job_spec(
                    folder,
                    model.entrypoint,
                    model.minibatch_size,
                    model.microbatch_size,
                )
                trainer = Trainer(spec, zygote, hosts, folder)
                wanted = [m for m in modes if m.shape in shapes]
                yield from _real_rows(trainer, spec, model, wanted, minibatches)
    finally:
        zygote.close()


def _real_rows(
    trainer: Trainer,
    spec: JobSpec,
    model: Model,
    modes: Sequence[ExecutionMode],
    minibatches: int,
) -> Iterator[Row]:
    facts = facts_of(spec)
    profiles: dict[int, Controlled[Profile]] = {}
    for mode in modes:
        plan = make_plan(
            spec,
            trainer.slots(2),
            mode.shape,
            len(facts.sections),
            schedule=mode.schedule,
            recompute=mode.recompute,
            chunks=mode.chunks,
        )
        busy = len(plan.slots)
        for _ in range(TRIES):
            if busy not in profiles:  # two cores at work are slower than one
                profiles[busy] = controlled(trainer.calibrate, busy)
                tell(f"{model.name} on {busy}: {describe(profiles[busy].result)}")
            profile = profiles[busy]
            got = controlled(trainer.train, plan, minibatches)
            # Over both: a machine that has become slower in between is not quiet either.
            control = variation([*profile.control_s, *got.control_s])
            if control < MOST_VARIATION:
                break
            del profiles[busy]
        predicted_s = predict(plan, profile.result, facts)
        names = (model.name, "loopback", mode.name)
        yield row_of("real", names, plan, predicted_s, got.result, control)


@dataclass(frozen=True)
class Controlled(Generic[T]):
    """What came out of a run, and what a control loop took before and after it."""

    result: T
    control_s: list[float]


def controlled(run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Controlled[T]:
    """Run between two turns of the control loop."""
    before_s = control_loop()
    result = run(*args, **kwargs)
    return Controlled(result, before_s + control_loop())


def variation(times_s: Sequence[float]) -> float:
    """Return the coefficient of variation."""
    return statistics.pstdev(times_s) / statistics.fmean(times_s)


def control_loop() -> list[float]:
    """Return what equal pieces of plain work take, as long as a mini-batch each.

    The first is left out: what ran before is still being cleared away.
    """
    times_s = []
    for _ in range(1 + CONTROL_LOOPS):
        began = time.perf_counter()
        total = 0
        for number in range(CONTROL_ADDITIONS):
            total += number
        times_s.append(time.perf_counter() - began)
    return times_s[1:]


# --- Output -----------------------------------------------------------------------------


def tell(line: str) -> None:
    """Say how far it is."""
    sys.stderr.write(f"{line}\n")


def machine() -> str:
    """Return the date and the class of this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    today = datetime.datetime.now(datetime.UTC).date()
    kind = names[0] if names else platform.machine()
    return f"{today}, {os.cpu_count()} cores of {kind}"


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Return shapes such as ``2x1,4x2``."""
    pairs = (shape.split("x") for shape in text.split(","))
    return [(int(depth), int(width)) for depth, width in pairs]


def parser() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    made = argparse.ArgumentParser(prog="python -m tests.bench.bench_accuracy")
    made.add_argument("--only", choices=("real", "emulated", "divided"))
    made.add_argument("--models", help="of those that compute, such as MLP")
    made.add_argument("--shapes", type=parse_shapes, help="such as 2x1,4x2")
    made.add_argument("--links", default=",".join(KINDS_OF_LINKS))
    made.add_argument("--minibatches", type=int, default=0, help="that count, of each")
    made.add_argument("--quick", action="store_true", help="fewer of everything")
    made.add_argument("--json", type=Path, help="file for the rows")
    return made


def rows_of(chosen: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows that were asked for."""
    every = [(depth, width) for depth in DEPTHS for width in WIDTHS]
    few = [(2, 1), (4, 2), (8, 3)]
    if chosen.only in (None, "real"):
        shapes = chosen.shapes or [(1, 1), (2, 1), (1, 2)]
        names = (chosen.models or "GPT,MLP").split(",")
        models = [model for model in MODELS if model.name in names]
        models = models[:1] if chosen.quick else models
        yield from real(shapes, models, MANNERS, chosen.minibatches or 4)
    kinds, minibatches = chosen.links.split(","), chosen.minibatches or 3
    if chosen.only in (None, "emulated"):
        shapes = chosen.shapes or (few if chosen.quick else every)
        yield from emulated(shapes, kinds, minibatches)
    if chosen.only in (None, "divided"):
        yield from divided(chosen.shapes or few[:1], kinds, minibatches)


def main() -> None:
    """Print all tables as Markdown, and all rows as JSON."""
    chosen = parser().parse_args()
    began, rows = time.monotonic(), []
    try:
        for row in rows_of(chosen):
            rows.append(row)
            tell(
                f"{row.table} {row.model} m={row.microbatch_size} {row.links} {row.shape} "
                f"{row.mode}: predicted {row.predicted_s:.4f}, measured "
                f"{row.measured_s:.4f} s, error {row.error:+.1%}, cores busy "
                f"{row.machine_busy:.0%} (workers {row.workers_busy:.0%})"
            )
    except KeyboardInterrupt:
        tell("interrupted: what follows is what there is")
    sys.stdout.write(f"{machine()}; took {time.monotonic() - began:.0f} s\n")
    for table in ("real", "emulated", "divided"):
        if any(row.table == table for row in rows):
            sys.stdout.write(f"\n### {table}\n\n{markdown(rows, table)}\n")
    text = json.dumps([{**asdict(row), "error": row.error} for row in rows])
    if chosen.json:
        chosen.json.write_text(text)
    else:
        sys.stdout.write(f"\n{text}\n")


if __name__ == "__main__":
    main()
