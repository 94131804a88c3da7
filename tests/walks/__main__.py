"""Prints the modules whose functions run on each walk that docs/architecture.md tells.

    scripts/walks            with the key hang_s of the job file
    scripts/walks lease_s    with another one

Runs a job and a pool of real processes on the local cloud, each with Python's tracing on,
and looks at what ran between two marked events. What also runs while the job simply
trains (heartbeats, mini-batches) is counted, and left out of the list.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.integration.jobs import Job, trains
from tests.integration.test_pool import Lab
from tests.view import View

ROOT = Path(__file__).parents[2]
VMS = 2
STAGE_BYTES = 200_000
"""Too little for the whole model: all VMs train."""
STEPS, LOSS_S = 2000, 0.1
"""Mini-batches, and how long each loss takes: so that jobs outlast the walks."""
QUIET_S, QUIET_STEPS = 10.0, 30
"""How long, and for how many mini-batches, a job is watched at least while nothing happens to
it: a busy machine does less in the same time."""
PLAN = (
    "spottrain.varuna_manager.core.planning.plan_inputs",
    "spottrain.varuna_manager.core.planning.plan_computed",
)
COMMIT = (
    "spottrain.pipeline.train.generation._Training._commit",
    "spottrain.pipeline.train.generation._Training._report",
)


class Line(NamedTuple):
    """What ``sitecustomize`` noted."""

    at_s: float
    pid: int
    kind: str
    what: str


@dataclass(frozen=True)
class Span:
    """A time, in one process or (``None``) in all."""

    begin_s: float
    end_s: float
    pid: int | None = None

    def modules(self, lines: Collection[Line]) -> set[str]:
        """Return the modules whose functions ran within it."""
        return {
            line.what
            for line in lines
            if line.kind == "ran"
            and self.begin_s <= line.at_s <= self.end_s
            and self.pid in (None, line.pid)
        }


class Traced:
    """What is noted of the processes of jobs.

    Args:
        log: The file that they all write to.
        key: A key of the job file, to see who reads it.
    """

    def __init__(self, log: Path, key: str) -> None:
        self._log = log
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        self.environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "WALK_LOG": str(log),
            "WALK_SOURCES": f"{ROOT}/src/spottrain/",
            "WALK_MARKS": " ".join((*PLAN, *COMMIT)),
            "WALK_KEY": key,
        }

    def lines(self) -> list[Line]:
        """Return what has been noted so far."""
        whole = self._log.read_text().rpartition("\n")[0].splitlines()
        parts = (line.split() for line in whole)
        return [Line(float(at), int(pid), kind, what) for at, pid, kind, what in parts]

    def between(self, marks: tuple[str, str], within: Span) -> Span:
        """Return the time from the last of the one mark to the first of the other after it.

        Both in the process in which the second one is first seen to follow the first.
        """
        began: dict[int, float] = {}
        begin, end = marks
        for line in self.lines():
            if line.kind != "mark" or not within.begin_s <= line.at_s <= within.end_s:
                continue
            if line.what == begin:
                began[line.pid] = line.at_s
            elif line.what == end and line.pid in began:
                return Span(began[line.pid], line.at_s, line.pid)
        raise AssertionError(f"{end} did not follow {begin}")


def show(walk: str, modules: Collection[str], anyway: Collection[str] = ()) -> None:
    """Print a walk, without what runs anyway."""
    own = sorted(set(modules) - set(anyway))
    besides = f", and {len(modules) - len(own)} that run anyway" if anyway else ""
    print(f"\n{walk}: {len(own)} modules{besides}")
    for module in own:
        print(f"    {module.removeprefix('spottrain.')}")
    sys.stdout.flush()


def watch(job: Job) -> Span:
    """Watch a job that simply trains."""
    begin_s, step = time.time(), View(job.state()).step
    time.sleep(QUIET_S)
    job.until("it has trained on", lambda state: View(state).step >= step + QUIET_STEPS)
    return Span(begin_s, time.time())


def walk_job(folder: Path, key: str) -> None:
    """Follow a job that starts, loses a VM and goes on."""
    traced = Traced(folder / "job.log", key)
    zone = {"name": "a", "capacity": VMS + 1, "slot_memory_bytes": STAGE_BYTES}
    with Job(
        folder,
        "walks",
        profile=None,
        steps=STEPS,
        resources={"max_vms": VMS},
        local={"zones": [zone]},
    ) as job:
        job.environment |= traced.environment
        job.pace(LOSS_S)
        begin_s = time.time()
        assert job.launch("--detach").code == 0
        job.until_trains()
        launch = Span(begin_s, time.time())
        quiet = watch(job)
        before = View(job.state()).generation.number
        job.market("kill", machine=0)
        job.until(
            "another generation trains",
            lambda state: trains(state) and View(state).generation.number > before,
        )
        lost = Span(quiet.end_s, time.time())
    lines = traced.lines()
    anyway = quiet.modules(lines)
    plan, commit = traced.between(PLAN, launch), traced.between(COMMIT, quiet)
    show("A VM is lost, until training resumes", lost.modules(lines), anyway)
    show("`spottrain launch`, until the first mini-batch is trained", launch.modules(lines))
    show("A plan is chosen", plan.modules(lines), anyway)
    show("A mini-batch commits", commit.modules(lines))
    show(f"Functions that name the key {key}", {x.what for x in lines if x.kind == "key"})


def walk_pool(folder: Path, key: str) -> None:
    """Follow a pool that takes a VM from one job and gives it to another."""
    traced = Traced(folder / "pool.log", key)
    lab = Lab(folder)
    try:
        for job in (lab.first, lab.urgent):
            job.environment |= traced.environment
            job.settings["steps"] = STEPS
            job.save()
        assert lab.run("create", str(lab.file)).code == 0
        assert lab.launch(lab.first).code == 0
        lab.has(first=2)
        quiet = watch(lab.first)
        assert lab.launch(lab.urgent, "--priority", "9").code == 0
        begin_s = time.time()
        lab.has(first=1, urgent=2)
        moved = Span(begin_s, time.time())
    finally:
        lab.first.kill_everything()
    lines = traced.lines()
    show("A pool moves a VM to another job", moved.modules(lines), quiet.modules(lines))


def main() -> None:
    """Run the walks and print them."""
    key = sys.argv[1] if len(sys.argv) > 1 else "hang_s"
    with tempfile.TemporaryDirectory(prefix="spottrain-walks-") as folder:
        for walk in (walk_job, walk_pool):
            (Path(folder) / walk.__name__).mkdir()
            walk(Path(folder) / walk.__name__, key)


if __name__ == "__main__":
    main()
