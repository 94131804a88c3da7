"""How a journal grows with training, and how long questions about it take.

Training of 64 ranks is made up, and a market whose prices move: what is reported and seen
goes the way that it goes in the manager, from the watches to the core, the sampler and the
journal. It all takes 30 days, of however many mini-batches. The same for a journal as earlier
versions wrote it, with every report an event. Ranks report no timings: stragglers are not
looked for. Numbers of mini-batches may be given: now, then. With ``--keep`` a later run only asks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tests.builders import a_plan, minibatch_committed, slots_of
from tests.unit.varuna_manager.stored_jobs import submit
from tests.unit.varuna_manager.story import OFFER, SPEC, Story
from tests.view import View

from spottrain.eventlog.loop import SNAPSHOT_EVENTS
from spottrain.units import HOUR_S
from spottrain.varuna_manager.core import step as core
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.journal import Journal, Step
from spottrain.varuna_manager.jobs.measurements import Measurements, Sample
from spottrain.varuna_manager.jobs.replication import begin_replication
from spottrain.varuna_manager.jobs.samples import Sampler
from spottrain.varuna_manager.jobs.trust import digest_of
from spottrain.varuna_manager.launch.takeover import take_over
from spottrain.varuna_manager.reporting.history import JobHistory
from spottrain.varuna_manager.watch.watches import Watches
from spottrain.wire.messages import MinibatchCommitted

RANKS = 64
DAYS = 30
"""However many mini-batches they have."""
ZONES = 200
MOVES, MOVES_EVERY_S = 5, 300.0
"""How many prices change, and how often."""
BATCH = 100
"""Mini-batches that are written together."""
MB = 1e6
DAY_S = 24 * HOUR_S


def committed(step: int, rank: int, step_s: float) -> MinibatchCommitted:
    report = minibatch_committed(
        step,
        sections=(rank % 2,),
        loss=5.0 / step,
        step_s=step_s,
        peak_bytes=1 << 30,
    )
    return replace(report, grad_norm=1.2345678, weight=8.0, learning_rate=1e-4)


def begin(steps: int, uid: str) -> tuple[Story, list[str]]:
    """A generation of all ranks that begins to train."""
    ids = [f"vm-{rank:02d}" for rank in range(RANKS)]
    spec = replace(SPEC, name="demo", steps=steps + 1, minibatch_size=RANKS)
    story = Story(uid=uid, max_vms=RANKS, spec=spec)
    story.start()
    story.boot(*ids)
    story.prepare()
    plan = a_plan(2, RANKS // 2, virtual_nodes=RANKS, slots=slots_of(ids))
    story.tell(e.PlanComputed, inputs_hash=story.plan_asked, plan=plan)
    story.open()
    story.begin(0)
    return story, ids


class Market:
    """Prices of spot VMs in many zones, which change now and then."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self._offers = [
            replace(OFFER, zone=f"zone-{number}", usd_per_hour=1.0) for number in range(ZONES)
        ]

    def seen(self, at_s: float, *, first: bool = False) -> e.OffersSeen:
        """Return what the market watch feeds."""
        changed = range(ZONES) if first else self._random.sample(range(ZONES), MOVES)
        for number in changed:
            price = round(self._random.uniform(0.5, 1.5), 4)
            self._offers[number] = replace(
                self._offers[number], usd_per_hour=price, observed_at_s=at_s
            )
        offers = tuple(self._offers[number] for number in changed)
        return e.OffersSeen(at_s=at_s, offers=offers, only_changes=not first)


class Manager:
    """Decides, journals, and saves snapshots, as the manager's loop does."""

    def __init__(self, journal: Journal, measurements: Measurements, story: Story) -> None:
        self._journal, self._measurements = journal, measurements
        self.state, self._history = story.state, JobHistory()
        for step in story.steps:
            self._history.note(step.before, step.event, step.after)
        self._saved = journal.append(*story.steps)
        self._steps = list[Step]()
        self.samples = list[Sample]()
        self.decided_s = 0.0
        self.decided = 0

    def take(self, event: e.Event) -> None:
        """Decide on an event."""
        before, begin_s = self.state, time.process_time()
        self.state, commands = core.step(before, event)
        self.decided_s += time.process_time() - begin_s
        self.decided += 1
        self._history.note(before, event, self.state)
        self._steps.append(Step(before, event, self.state, commands))

    def write(self) -> None:
        """Journal what was decided and measured."""
        self._measurements.write(self.samples)
        last = self._saved
        if self._steps:
            last = self._journal.append(*self._steps)
        self._steps, self.samples = [], []
        if last - self._saved >= SNAPSHOT_EVENTS:
            self._journal.save_snapshot(last, self.state, self._history.snapshot())
            self._saved = last


def train(job: JobDir, steps: int, uid: str) -> None:
    """Train as the manager does."""
    story, ids = begin(steps, uid)
    step_s = DAYS * DAY_S / steps
    market, sampler, watches = Market(), Sampler(), Watches()
    with (
        closing(Journal(job.journal)) as journal,
        closing(Measurements(job.measurements)) as measurements,
    ):
        manager = Manager(journal, measurements, story)
        at_s, looked_s = story.now_s, story.now_s
        manager.take(market.seen(at_s, first=True))
        for step in range(1, steps + 1):
            at_s += step_s
            # What other ranks report of the same mini-batch adds nothing.
            for rank, vm_id in enumerate(ids[:2]):
                report = committed(step, rank, step_s)
                manager.samples += sampler.measured(report, at_s, manager.state)
                for event in watches.observe(manager.state, vm_id, report, at_s):
                    manager.take(event)
            if at_s - looked_s >= MOVES_EVERY_S:
                looked_s = at_s
                manager.take(market.seen(at_s))
            if step % BATCH == 0:
                manager.write()
        manager.write()
        each_us = manager.decided_s / manager.decided * 1e6
        print(f"a live step takes {each_us:.0f} us of CPU, the mean of {manager.decided:,}")


QUESTIONS = {
    "a manager that starts": "from spottrain.varuna_manager.reporting.history import "
    "replay; from spottrain.varuna_manager.jobs.journal import Journal; "
    "replay(Journal(job.journal))",
    "spottrain status": "cli(['status', 'demo'])",
    "spottrain cost": "cli(['cost', 'demo'])",
    "spottrain report --html": "cli(['report', 'demo', '--html', str(job.page)])",
    "without a snapshot: a manager that starts": "from spottrain.varuna_manager.reporting."
    "history import replay; from spottrain.varuna_manager.jobs.journal import Journal; "
    "Journal.snapshot = lambda *_: None; replay(Journal(job.journal))",
}
_ASK = """
import resource, sys, time
from pathlib import Path
begin_s = time.process_time()
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.cli.main import main
job = find('demo')
imported_s = time.process_time() - begin_s
def cli(args):
    sys.argv = ['spottrain', *args]
    try:
        main()
    except SystemExit as error:
        assert not error.code, error.code
{question}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
whole_s = time.process_time() - begin_s
print(f'{{whole_s:.2f}} s of CPU, {{imported_s:.2f}} s of it imports; {{peak / 1e6:.0f}} MB', file=sys.stderr)
"""


def ask(home: Path) -> None:
    """Print what questions about the job cost, each in a process of its own."""
    for name, question in QUESTIONS.items():
        done = subprocess.run(
            [sys.executable, "-c", _ASK.format(question=question)],
            env={**os.environ, "SPOTTRAIN_HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}")


def tell(job: JobDir, steps: int, wrote_s: float) -> None:
    """Print what the files take."""
    with closing(Journal(job.journal, read_only=True)) as journal:
        last, state = journal.last_seq(), journal.replay()
    with closing(Measurements(job.measurements, read_only=True)) as measurements:
        rows = len(measurements.minibatches(last=9))
    size = job.journal.stat().st_size + job.measurements.stat().st_size
    behind = steps - View(state).step
    print(
        f"{steps:,} mini-batches, {last:,} events, {size / MB:.1f} MB, "
        f"{size / steps:.0f} bytes a mini-batch, written in {wrote_s:.1f} s, progress "
        f"{behind} mini-batches old, {rows} rows read"
    )


def take_over_once(folder: Path) -> None:
    """Print what it costs to go on on another machine, from the copy in a bucket."""
    job = find("demo")
    url = str(job.config().checkpoint.path)
    copy = begin_replication(job)
    assert copy is not None
    begin_s = time.process_time()
    assert asyncio.run(copy.finish(600.0))
    copy.close()
    print(f"the copy: {time.process_time() - begin_s:.2f} s of CPU")
    os.environ["SPOTTRAIN_HOME"] = str(folder / "elsewhere")
    begin_s = time.process_time()
    take_over(url, lambda _: None, trusted=digest_of(job))
    print(f"a takeover: {time.process_time() - begin_s:.2f} s of CPU")


def write(folder: Path, steps: int) -> None:
    """Write the files of a job of so many mini-batches, and print what they take."""
    job = submit(folder, f"file://{folder}/store")
    uid = uid_of(job)
    job.journal.unlink()
    begin_s = time.perf_counter()
    train(job, steps, uid)
    tell(job, steps, time.perf_counter() - begin_s)


def main() -> None:
    """Print what journals take, and questions about the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=20_000)
    parser.add_argument("--takeover", action="store_true", help="what that costs, too")
    parser.add_argument("--keep", type=Path, help="folder; written unless it is there")
    args = parser.parse_args()
    print(f"{RANKS} ranks, {DAYS} days, {ZONES} offers")
    with tempfile.TemporaryDirectory() as made:
        folder = args.keep or Path(made)
        os.environ["SPOTTRAIN_HOME"] = str(folder)
        if not folder.exists() or folder == Path(made):
            folder.mkdir(exist_ok=True)
            write(folder, args.steps)
        ask(folder)
        if args.takeover:
            take_over_once(folder)


if __name__ == "__main__":
    main()
