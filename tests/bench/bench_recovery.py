"""How long training stands still after a worker is killed: while it trains, and while the
groups of the next generation form.

A job of real processes on the local provider. From the kill to the next commit, less an
undisturbed mini-batch. Depends on how busy the machine is: compare runs of one hour.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.integration.jobs import Job

from spottrain.varuna_manager.core.model.events import ReportReceived
from spottrain.varuna_manager.core.model.records import GenerationPhase
from spottrain.varuna_manager.jobs.follow import Follower
from spottrain.varuna_manager.jobs.measurements import Cursor, Minibatch
from spottrain.wire import messages

KILLS = int(os.environ.get("KILLS", "4"))
PACE_S = 0.02
"""Of a loss, so that a mini-batch takes its time."""
VMS = 4
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
            case messages.GenerationBroken():
                self.heard.append((event.at_s, "out"))
            case messages.StoreOpened():
                self.heard.append((event.at_s, "store"))

    def trains(self, commits: int) -> bool:
        """Return whether so many mini-batches were committed."""
        return len(self.commits) >= commits

    def is_forming(self, after: int) -> bool:
        """Return whether a generation later than ``after`` forms its groups."""
        generation = self._follower.state.generation
        return (
            generation is not None
            and generation.number > after
            and generation.phase is GenerationPhase.STARTING
        )

    def kill(self, index: int) -> tuple[int, float]:
        """Kill a worker, not the one before; return the generation's number, and when."""
        generation = self._follower.state.generation
        assert generation is not None
        vms = [s.vm_id for s in generation.plan.slots if s.vm_id != self._killed]
        self._killed = vms[index % len(vms)]
        now_s = time.time()
        os.kill(self.pids[self._killed], signal.SIGKILL)
        return generation.number, now_s

    def recovery(self, *, forming: bool, index: int) -> list[float]:
        """Kill once or, to hit what forms then, twice.

        Returns:
            The seconds from the (last) kill to the end of each phase, the last one less
            an undisturbed mini-batch.
        """
        at = len(self.commits)
        self.until(lambda: self.trains(at + 10))
        newest = self.commits[-10:]
        step_s = (newest[-1] - newest[0]) / (len(newest) - 1)
        number, killed_at_s = self.kill(index)
        if forming:
            self.until(lambda: self.is_forming(number))
            _, killed_at_s = self.kill(index + 1)
        after_s = killed_at_s + step_s / 2
        self.until(lambda: self.commits[-1] > after_s)
        first_s = min(at_s for at_s in self.commits if at_s > after_s)
        ends = {
            what: at_s - killed_at_s
            for at_s, what in self.heard
            if killed_at_s < at_s <= first_s
        }
        ends["first"] = first_s - killed_at_s - step_s
        return [ends.get(phase, math.nan) for phase in PHASES]


@contextmanager
def _running(folder: Path) -> Iterator[Watched]:
    """Give a job that trains on ``VMS`` VMs, and never ends by itself."""
    resources = {"min_vms": VMS, "max_vms": VMS}
    with Job(folder, "recovery", steps=10**6, resources=resources) as job:
        job.pace(PACE_S)
        answer = job.launch("--detach")
        assert answer.code == 0, answer.err
        with closing(Follower(job.dir)) as follower:
            watched = Watched(follower)
            watched.until(lambda: watched.trains(VMS))
            yield watched


def main() -> None:
    """Print medians and the slowest for each kind of kill."""
    titles = "".join(f"{phase:>8}" for phase in PHASES)
    print(f"{'worker killed while':<30}{'kills':>6}{titles}")
    with tempfile.TemporaryDirectory() as folder, _running(Path(folder)) as watched:
        for name, forming in (("it trains", False), ("groups form", True)):
            rows = [
                watched.recovery(forming=forming, index=index) for index in range(KILLS)
            ]
            medians = [statistics.median(column) for column in zip(*rows, strict=True)]
            for which, row in (
                ("median", medians),
                ("slowest", max(rows, key=lambda row: row[-1])),
            ):
                numbers = "".join(f"{one:>8.2f}" for one in row)
                print(f"{f'{name}, {which}':<30}{KILLS:>6}{numbers}", flush=True)


if __name__ == "__main__":
    main()
