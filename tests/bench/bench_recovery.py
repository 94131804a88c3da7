"""How long training stands still after a worker is killed: while it trains, and while the
groups of the next generation form.

A job of real processes on the local provider. From the kill to the next commit, less an
undisturbed mini-batch. Depends on how busy the machine is: compare runs of one hour.
"""

from __future__ import annotations

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
from spottrain.wire import messages

KILLS = int(os.environ.get("KILLS", "4"))
PACE_S = 0.02
"""Of a loss, so that a mini-batch takes its time."""
VMS = 4
DEADLINE_S = 120.0


class Watched:
    """A job as its journal tells it."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.pids: dict[str, int] = {}
        """The newest worker of each VM."""
        self.commits: list[float] = []
        """When, in seconds since the epoch."""

    def until(self, met: Callable[[], bool]) -> None:
        """Take events in until ``met``."""
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not met():
            assert time.monotonic() < give_up_at_s, self._follower.state.activity
            for entry in self._follower.advance():
                if isinstance(entry.event, ReportReceived):
                    self._hear(entry.event)
            time.sleep(0.002)

    def _hear(self, event: ReportReceived) -> None:
        match event.report:
            case messages.GenerationStarted(pid=pid):
                self.pids[event.vm_id] = pid
            case messages.MinibatchCommitted(slot=slot) if slot == 0:
                self.commits.append(event.at_s)

    def trains(self, commits: int) -> bool:
        """Return whether so many ranks' mini-batches were committed."""
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
        """Kill a worker; return the generation's number, and when that was."""
        generation = self._follower.state.generation
        assert generation is not None
        slots = generation.plan.slots
        now_s = time.time()
        os.kill(self.pids[slots[index % len(slots)].vm_id], signal.SIGKILL)
        return generation.number, now_s

    def recovery_s(self, *, forming: bool, index: int) -> float:
        """Kill once or, to hit what forms then, twice; return how long it stood still."""
        at = len(self.commits)
        self.until(lambda: self.trains(at + 10 * VMS))
        newest = sorted(self.commits)[-10 * VMS :: VMS]
        step_s = (newest[-1] - newest[0]) / (len(newest) - 1)
        number, killed_at_s = self.kill(index)
        if forming:
            self.until(lambda: self.is_forming(number))
            _, killed_at_s = self.kill(index + 1)
        self.until(lambda: self.commits[-1] > killed_at_s + step_s / 2)
        first_s = min(at_s for at_s in self.commits if at_s > killed_at_s + step_s / 2)
        return first_s - killed_at_s - step_s


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
    """Print a row for each kind of kill."""
    print(f"{'worker killed while':<22}{'kills':>6}{'median s':>10}{'max s':>8}")
    with tempfile.TemporaryDirectory() as folder, _running(Path(folder)) as watched:
        for name, forming in (("it trains", False), ("groups form", True)):
            times = [
                watched.recovery_s(forming=forming, index=index)
                for index in range(KILLS)
            ]
            median_s = statistics.median(times)
            print(
                f"{name:<22}{KILLS:>6}{median_s:>10.2f}{max(times):>8.2f}", flush=True
            )


if __name__ == "__main__":
    main()
