"""How long training stands still: after a worker is killed, while it trains and while the
groups of the next generation form; after all processes of a VM are killed, or stopped; and
for the planned morph by which a VM joins.

A job of real processes on the local provider: a byte-level GPT of 5 million parameters on four
workers. From the fault to the next commit, less an undisturbed mini-batch. Depends on how
busy the machine is: compare runs of one hour.

KINDS names what to measure, KILLS how often.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from tests.integration.jobs import HERE, Job
from tests.view import View

from spottrain.cloud.local.folder import marker
from spottrain.cloud.process import tree
from spottrain.varuna_manager.core.model.events import ReportReceived
from spottrain.varuna_manager.core.model.records import GenerationPhase
from spottrain.varuna_manager.jobs.follow import Follower
from spottrain.varuna_manager.jobs.measurements import Cursor, Minibatch
from spottrain.wire import messages

KILLS = int(os.environ.get("KILLS", "4"))
KINDS = os.environ.get("KINDS", "worker forming vm morph silent").split()
VMS = 4
JOB = "recovery"
HEARTBEAT_S, SUSPECT_S = 0.2, 1.0
UNDISTURBED = 5
"""Mini-batches before each fault, whose mean is that of an undisturbed one."""
DEADLINE_S = 120.0


PHASES = ("died", "out", "store", "formed", "first")
"""Of a recovery: the death is known, survivors are out, the store is open, all ranks have
started, the first mini-batch is committed."""


class Watched:
    """A job as its journal and its measurements tell it."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._measurements = follower.measurements()
        self._cursor = Cursor()
        self.pids: dict[str, int] = {}
        """The newest worker of each VM."""
        self.commits: list[float] = []
        """When, in seconds since the epoch."""
        self._killed = ""
        self.heard: list[tuple[float, str]] = []
        """What ends the phases, and when."""

    def until(self, met: Callable[[], bool]) -> None:
        """Take in what is new until ``met``."""
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not met():
            assert time.monotonic() < give_up_at_s, self._follower.state.activity
            for entry in self._follower.advance():
                if isinstance(entry.event, ReportReceived):
                    self._hear(entry.event)
            page = self._measurements.changes(self._cursor)
            self._cursor = page.cursor
            rows = (row for row in page.rows if isinstance(row, Minibatch))
            self.commits += [row.at_s for row in rows]
            time.sleep(0.01)

    def _hear(self, event: ReportReceived) -> None:
        match event.report:
            case messages.GenerationStarted(pid=pid):
                self.pids[event.vm_id] = pid
                self.heard.append((event.at_s, "formed"))
            case messages.WorkerDied():
                self.heard.append((event.at_s, "died"))
            case messages.GenerationBroken() | messages.GenerationStopped():
                self.heard.append((event.at_s, "out"))
            case messages.StoreOpened():
                self.heard.append((event.at_s, "store"))

    @property
    def _view(self) -> View:
        return View(self._follower.state)

    @property
    def shape(self) -> str:
        """``PxD`` of the plan that runs."""
        return self._view.generation.plan.shape

    def trains(self, commits: int) -> bool:
        """Return whether so many mini-batches were committed."""
        return len(self.commits) >= commits

    def is_forming(self, after: int) -> bool:
        """Return whether a generation later than ``after`` forms its groups."""
        generation = self._view.current_generation
        return (
            generation is not None
            and generation.number > after
            and generation.phase is GenerationPhase.STARTING
        )

    def kill(self, index: int) -> tuple[int, float]:
        """Kill a worker, not the one before; return the generation's number, and when."""
        generation = self._view.generation
        vms = [s.vm_id for s in generation.plan.slots if s.vm_id != self._killed]
        self._killed = vms[index % len(vms)]
        now_s = time.time()
        os.kill(self.pids[self._killed], signal.SIGKILL)
        return generation.number, now_s

    def signal_vm(self, job: str, index: int, number: signal.Signals) -> float:
        """Send a signal to all processes of a VM, as nearly at once as can be."""
        generation = self._view.generation
        vm_id = generation.plan.slots[index % len(generation.plan.slots)].vm_id
        groups = tree.groups([marker(job, vm_id)])
        now_s = time.time()
        tree.signal_groups(groups, number)
        return now_s

    def undisturbed(self) -> float:
        """Wait until all VMs train; return the seconds of a mini-batch."""
        self.until(self._is_whole)
        at = len(self.commits)
        self.until(lambda: self.trains(at + UNDISTURBED + 1))
        newest = self.commits[-UNDISTURBED - 1 :]
        return (newest[-1] - newest[0]) / UNDISTURBED

    def _is_whole(self) -> bool:
        generation = self._view.current_generation
        return (
            generation is not None
            and generation.phase is GenerationPhase.RUNNING
            and len(generation.plan.slots) == VMS
            and generation.committed
        )

    def morph(self) -> list[float]:
        """Return the pause of the planned morph by which the next VM joins."""
        recovered = len(self.commits) - 1
        morphs = self._view.tally.morphs
        self.until(lambda: self._view.tally.morphs > morphs)
        self.until(self._is_whole)
        at = len(self.commits)
        self.until(lambda: self.trains(at + UNDISTURBED))
        near = self.commits[recovered:]
        pauses = [b - a for a, b in itertools.pairwise(near)]
        longest = max(range(len(pauses)), key=pauses.__getitem__)
        began_s, first_s = near[longest : longest + 2]
        return self._phases(began_s, first_s, statistics.median(pauses))

    def _phases(self, began_s: float, first_s: float, step_s: float) -> list[float]:
        """Return the seconds to the end of each phase, the last one less a mini-batch."""
        ends = {what: at_s - began_s for at_s, what in self.heard if began_s < at_s <= first_s}
        ends["first"] = first_s - began_s - step_s
        return [ends.get(phase, math.nan) for phase in PHASES]

    def recovery(self, kind: str, job: str, index: int) -> list[float]:
        """Cause a fault and wait until it is over.

        Returns:
            The seconds from the (last) fault to the end of each phase, the last one less
            an undisturbed mini-batch.
        """
        step_s = self.undisturbed()
        match kind:
            case "vm":
                killed_at_s = self.signal_vm(job, index, signal.SIGKILL)
            case "silent":
                killed_at_s = self.signal_vm(job, index, signal.SIGSTOP)
            case _:
                number, killed_at_s = self.kill(index)
        if kind == "forming":
            self.until(lambda: self.is_forming(number))
            _, killed_at_s = self.kill(index + 1)
        after_s = killed_at_s + step_s / 2
        self.until(lambda: self.commits[-1] > after_s)
        first_s = min(at_s for at_s in self.commits if at_s > after_s)
        return self._phases(killed_at_s, first_s, step_s)


@contextmanager
def _running(folder: Path) -> Iterator[Watched]:
    """Give a job that trains on ``VMS`` VMs, and never ends by itself."""
    profile = folder / "profile.json"
    with Job(
        folder,
        JOB,
        steps=10**6,
        entrypoint="gpt_job:small_job",
        reduction="fast",
        profile=str(profile),
        checkpoint={"every_steps": 10**6},
        manager={"heartbeat_s": HEARTBEAT_S, "suspect_s": SUSPECT_S},
        resources={"min_vms": 1, "max_vms": VMS},
    ) as job:
        shutil.copy(Path(__file__).parent / "gpt_job.py", job.folder / "workdir")
        _write_profile(job, profile)
        answer = job.launch("--detach")
        assert answer.code == 0, answer.err
        with closing(Follower(job.dir)) as follower:
            yield Watched(follower)


def _write_profile(job: Job, path: Path) -> None:
    """Write a profile by which four replicas are the fastest, on however few cores."""
    written = json.loads((HERE / "tiny_profile.json").read_text())
    written["optimizer_s_per_byte"] = 1e-10
    written["between_vms"]["bandwidth_bytes_per_s"] = 1e12
    facts = job.run("inspect", str(job.file), "-o", "json").report
    (of_size,) = written["microbatches"]
    written["fingerprint"] = facts["fingerprint"]
    of_size["sections"] = [
        {**of_size["sections"][0], "index": index} for index in range(len(facts["sections"]))
    ]
    path.write_text(json.dumps(written))


TITLES = {
    "worker": "worker killed",
    "forming": "worker killed, groups form",
    "vm": "VM killed",
    "morph": "planned morph",
    "silent": f"VM silent, {SUSPECT_S:g} s time-out",
}


def _print(name: str, rows: Sequence[Sequence[float]]) -> None:
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    slowest = max(rows, key=lambda row: row[-1])
    for which, row in (("median", medians), ("slowest", slowest)):
        numbers = "".join(f"{one:>8.2f}" for one in row)
        print(f"{f'{name}, {which}':<36}{len(rows):>4}{numbers}", flush=True)


def main() -> None:
    """Print medians and the slowest of each kind."""
    with tempfile.TemporaryDirectory() as folder, _running(Path(folder)) as watched:
        step_s = watched.undisturbed()
        shape = watched.shape
        print(f"{VMS} workers, {shape}, a mini-batch takes {step_s:.3f} s")
        print(f"{'':<40}" + "".join(f"{phase:>8}" for phase in PHASES))
        morphs = []
        for kind in KINDS:
            if kind == "morph" and "vm" in KINDS:
                continue
            rows = []
            for index in range(KILLS):
                cause = "vm" if kind == "morph" else kind
                rows.append(watched.recovery(cause, JOB, index))
                if cause == "vm" and "morph" in KINDS:
                    morphs.append(watched.morph())
            if kind != "morph":
                _print(TITLES[kind], rows)
        if morphs:
            _print(TITLES["morph"], morphs)


if __name__ == "__main__":
    main()
