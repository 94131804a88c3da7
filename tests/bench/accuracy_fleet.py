"""Real supervisors and workers that calibrate, and train under a given plan for a while."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.bench.processes import cpu_s
from tests.builders import a_plan, a_spec, slots_of
from tests.integration.fleet import Fleet, Heard, Host, Zygote

from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan, ScheduleKind, Slot

HERE = Path(__file__).parent
ENDLESS = 1_000_000
WARM_UPS = 1
"""Mini-batches that do not count."""


def job_spec(folder: Path, entrypoint: str, minibatch_size: int, microbatch_size: int) -> JobSpec:
    """Return a job that trains until it is stopped, and saves nothing meanwhile."""
    return a_spec(
        name="accuracy",
        entrypoint=entrypoint,
        steps=ENDLESS,
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        checkpoint_path=str(folder / "checkpoints"),
        checkpoint_every_steps=ENDLESS,
        checkpoint_keep=1,
        heartbeat_s=5.0,
    )


@dataclass
class Measured:
    """What a plan's mini-batches took."""

    minibatch_s: list[float]
    """Of each that counts, a median over ranks."""
    machine_busy: float
    """Share of all cores' time in which some process ran."""
    workers_busy: float
    """The same of the workers alone."""

    @property
    def median_s(self) -> float:
        """What predictions are compared with."""
        return statistics.median(self.minibatch_s)


@dataclass
class _Meter:
    """Processor time of each process since the first mini-batch that counts."""

    pids: list[int] = field(default_factory=list)
    marks: list[tuple[float, float, float]] = field(default_factory=list)

    def mark(self) -> None:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        ticks = [int(text) for text in fields]
        busy_s = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        self.marks.append((time.monotonic(), busy_s, cpu_s(self.pids)))

    def shares(self) -> tuple[float, float]:
        (began, busy0, used0), (ended, busy1, used1) = self.marks
        cores_s = (ended - began) * (os.cpu_count() or 1)
        return (busy1 - busy0) / cores_s, (used1 - used0) / cores_s


class Trainer:
    """A job on machines that are started anew for every plan.

    Args:
        spec: The job.
        zygote: Has loaded it, or will.
        hosts: Machines by name.
        folder: For logs.
    """

    def __init__(
        self, spec: JobSpec, zygote: Zygote, hosts: Mapping[str, Host], folder: Path
    ) -> None:
        self._spec, self._zygote, self._hosts = spec, zygote, hosts
        self._log = folder / "log"
        self._checkpoint = ""

    def slots(self, count: int) -> tuple[Slot, ...]:
        """Return the first slots, those of a machine one after the other."""
        names = (name for name, host in self._hosts.items() for _ in range(host.num_slots))
        return slots_of(islice(names, count))

    def calibrate(self, count: int, tensor_sizes: tuple[int, ...] = ()) -> Profile:
        """Have ``count`` slots measure the profile together, as a job's start does."""
        with self._fleet(count) as fleet:
            fleet.generation = -1
            slots = self.slots(count)
            store = fleet.open_store(slots[0].vm_id) if count > 1 else ("", 0)
            command = messages.Calibrate(
                generation=-1,
                participants=slots,
                store_host=store[0],
                store_port=store[1],
                microbatch_sizes=(self._spec.microbatch_size,),
                tensor_sizes=tensor_sizes,
                checkpoint=self._checkpoint,
            )
            for machine in fleet.machines.values():
                machine.send(command)
            return fleet.wait_for("the profile", _profile)

    def train(self, plan: Plan, minibatches: int) -> Measured:
        """Run ``minibatches`` that count, after the warm-up."""
        ranks = len(plan.slots)
        times: dict[int, list[float]] = {}
        meter = _Meter()
        with self._fleet(ranks) as fleet:
            fleet.run(plan, self._checkpoint)

            def take(_: str, report: Heard) -> bool | None:
                _refuse_failure(report)
                if isinstance(report, messages.GenerationStarted):
                    meter.pids.append(report.pid)
                if not isinstance(report, messages.MinibatchCommitted):
                    return None
                own = times.setdefault(report.step, [])
                own.append(report.step_s)
                if len(own) < ranks or report.step not in (WARM_UPS, last):
                    return None
                meter.mark()
                return report.step == last or None

            last = WARM_UPS + minibatches
            fleet.wait_for("the last mini-batch", take)
        machine_busy, workers_busy = meter.shares()
        return Measured(
            [statistics.median(times[s]) for s in range(WARM_UPS + 1, last + 1)],
            machine_busy,
            workers_busy,
        )

    @contextlib.contextmanager
    def _fleet(self, count: int) -> Iterator[Fleet]:
        names = tuple(dict.fromkeys(slot.vm_id for slot in self.slots(count)))
        with Fleet(
            *(self._spec, names, self._log, self._zygote),
            workdir=HERE,
            hosts=self._hosts,
        ) as fleet:
            fleet.ready()
            self._checkpoint = self._checkpoint or fleet.initialise()
            yield fleet


def _profile(_: str, report: Heard) -> Profile | None:
    _refuse_failure(report)
    return report.profile if isinstance(report, messages.Calibrated) else None


def _refuse_failure(report: Heard) -> None:
    failures = messages.WorkerDied | messages.GenerationBroken | messages.UserCodeFailed
    if isinstance(report, failures):
        raise SystemExit(f"a run failed: {report}")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextlib.contextmanager
def undisturbed() -> Iterator[bool]:
    """Run what is started inside ahead of all else on this machine, where permitted.

    What only sleeps is so hardly disturbed by other programs. Yields whether it is so.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def make_plan(
    spec: JobSpec,
    slots: Sequence[Slot],
    shape: tuple[int, int],
    num_sections: int,
    *,
    schedule: ScheduleKind = "varuna",
    recompute: bool = True,
    chunks: int = 1,
) -> Plan:
    """Return the plan of a shape, sections and virtual nodes cut evenly."""
    depth, width = shape
    return a_plan(
        depth,
        width,
        microbatch_size=spec.microbatch_size,
        schedule=schedule,
        recompute=recompute,
        num_sections=num_sections,
        virtual_nodes=spec.minibatch_size // spec.microbatch_size,
        slots=tuple(slots[: depth * width]),
        chunks=chunks,
    )
