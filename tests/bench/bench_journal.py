"""How a journal grows with training, and how long a manager takes to read it again.

Training of 64 ranks is made up: its reports go the way that they go in the manager, from
the watches to the fold, the sampler and the journal. The same for a journal as earlier
versions wrote it, with every report an event. Ranks report no timings: stragglers are not
looked for. Numbers of mini-batches may be given: now, then.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tests.unit.varuna_manager.story import SPEC, Story, plan_over

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Sample
from spottrain.varuna_manager.jobs.replay.fold import Fold
from spottrain.varuna_manager.jobs.samples import Sampler
from spottrain.varuna_manager.reporting.history import replay
from spottrain.varuna_manager.watch.watches import Watches
from spottrain.wire.messages import MinibatchCommitted
from spottrain.wire.model import Slot

RANKS = 64
STEP_S = 2.6
"""A million mini-batches take 30 days."""
BATCH = 100
"""Mini-batches that are written together."""
MB = 1e6


def committed(step: int, rank: int) -> MinibatchCommitted:
    return MinibatchCommitted(
        generation=1,
        slot=0,
        step=step,
        sections=(rank % 2,),
        loss=5.0 / step,
        grad_norm=1.2345678,
        step_s=STEP_S,
        peak_bytes=1 << 30,
        weight=8.0,
        learning_rate=1e-4,
    )


def begin(steps: int) -> tuple[Story, list[str]]:
    """A generation of all ranks that begins to train."""
    ids = [f"vm-{rank:02d}" for rank in range(RANKS)]
    spec = replace(SPEC, steps=steps + 1, minibatch_size=RANKS)
    story = Story(max_vms=RANKS, spec=spec)
    story.start()
    story.intend()
    story.boot(*ids)
    story.prepare()
    plan = replace(
        plan_over(("a", "b")),
        data_parallel_width=RANKS // 2,
        minibatch_size=RANKS,
        replica_bounds=tuple(range(0, RANKS + 1, 2)),
        slots=tuple(Slot(vm_id=vm_id, index=0) for vm_id in ids),
    )
    story.tell(e.PlanComputed, inputs_hash=story.state.plan_asked, plan=plan)
    story.open()
    story.begin(0)
    return story, ids


def write_now(path: Path, steps: int) -> None:
    """Train as the manager does."""
    story, ids = begin(steps)
    fold, sampler, watches = Fold(), Sampler(), Watches()
    with closing(Journal(path)) as journal:
        for event in story.events:
            fold.take(event)
        journal.append(*story.events, samples=())
        at_s = story.now_s
        told, samples = list[e.Event](), list[Sample]()
        for step in range(1, steps + 1):
            at_s += STEP_S
            for rank, vm_id in enumerate(ids):
                report = committed(step, rank)
                samples += sampler.measured(report, at_s, fold.state)
                for event in watches.observe(fold.state, vm_id, report, at_s):
                    fold.take(event)
                    told.append(event)
            if step % BATCH == 0:
                journal.append(*told, samples=samples)
                told, samples = [], []


def write_then(path: Path, steps: int) -> None:
    """Train as managers did that journalled every report."""
    story, ids = begin(steps)
    numbers = {vm_id: story.state.vms[vm_id].reports_received for vm_id in ids}
    fold, sampler = Fold(), Sampler()
    with closing(Journal(path)) as journal:
        for event in story.events:
            fold.take(event)
        journal.append(*story.events, samples=())
        at_s = story.now_s
        for step in range(1, steps + 1):
            at_s += STEP_S
            told, samples = list[e.Event](), list[Sample]()
            for rank, vm_id in enumerate(ids):
                event = e.ReportReceived(
                    at_s=at_s,
                    vm_id=vm_id,
                    number=numbers[vm_id] + step - 1,
                    report=committed(step, rank),
                )
                fold.take(event)
                told.append(event)
                samples += sampler.samples(event, fold.state)
            journal.append(*told, samples=samples)


def tell(name: str, path: Path, steps: int, wrote_s: float) -> None:
    """Print what a journal costs."""
    begin_s = time.perf_counter()
    with closing(Journal(path, read_only=True)) as journal:
        last = journal.last_seq()
        state, _ = replay(journal)
        read_s = time.perf_counter() - begin_s
        rows = len(journal.measurements().between(1, steps))
    assert isinstance(state, State)
    size, behind = path.stat().st_size, steps - state.progress.step
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{name:5} {steps:9,} {last:10,} {size / MB:8.1f} {size / steps:10.0f} "
        f"{wrote_s / steps * 1e3:8.2f} {read_s:8.2f} {read_s / steps * 1e6:10.1f} "
        f"{rows:9,} {behind:6} {peak / MB:6.0f}"
    )


def main(now: int = 20_000, then: int = 500) -> None:
    """Print a table."""
    print(f"{RANKS} ranks, {STEP_S:g} s a mini-batch")
    print(
        "form  minibatch     events  size MB bytes/step write ms replay s  us a step"
        "      rows behind    MB"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, write, steps in (("now", write_now, now), ("then", write_then, then)):
            path = Path(folder) / f"{name}.sqlite"
            begin_s = time.perf_counter()
            write(path, steps)
            tell(name, path, steps, time.perf_counter() - begin_s)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
