"""What ranks have recorded on demand: waited for, and kept where it can be read."""

from __future__ import annotations

import time
from collections.abc import Iterable

from spottrain.errors import SpottrainError
from spottrain.storage.open import open_store
from spottrain.units import counted
from spottrain.varuna_manager.cli.console import say
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import Follower
from spottrain.varuna_manager.jobs.manager_location import own_vm
from spottrain.varuna_manager.jobs.traces import Traces, TraceSet
from spottrain.varuna_manager.launch import asking
from spottrain.wire.messages import TraceContent

POLL_S = 0.5


class TracesBrokenError(SpottrainError):
    """Ranks are gone, or could not record what they do."""


def record(job: JobDir, minibatches: int, content: TraceContent, follower: Follower) -> TraceSet:
    """Have the next mini-batches of a running job recorded, and wait for all ranks.

    Raises:
        TracesBrokenError: The generation has ended before all had come, or none can.
    """
    begun = asking.begin_traces(job, minibatches, content)
    what = "a mini-batch" if minibatches == 1 else f"{minibatches} mini-batches"
    say(
        f"recording {what} on {counted(len(begun.vm_ids), 'rank')} of generation {begun.generation}"
    )
    return _await_traces(job, begun, follower)


def _await_traces(job: JobDir, begun: TraceSet, follower: Follower) -> TraceSet:
    """Wait for the traces of all ranks.

    Raises:
        TracesBrokenError: The generation has ended before all had come.
    """
    traces = Traces(job.traces)
    while True:
        # Before the folder is read: what has come by then is all there will be.
        over = not job.is_managed() or _has_ended(follower, begun.generation)
        found = traces.read(begun.number) or begun
        if not found.missing:
            return found
        if over:
            missing, ranks = len(found.missing), len(found.vm_ids)
            raise TracesBrokenError(
                f"job {job.name}: generation {begun.generation} ended before {missing} of "
                f"its {counted(ranks, 'rank')} had sent a trace; record the next one once it "
                f"trains: 'spottrain status {job.name}'"
            )
        time.sleep(POLL_S)


def _has_ended(follower: Follower, generation: int) -> bool:
    for _ in follower.advance():
        pass
    runs = follower.state.training.generation
    return runs is None or runs.number != generation


def keep(job: JobDir, done: TraceSet, files: Iterable[str]) -> str:
    """Return the folder of what was recorded; from a manager's VM, which will be gone, they
    are copied to the checkpoint store.
    """
    folder = Traces(job.traces).folder_of(done.number)
    place = job.config().checkpoint.path
    if own_vm(job) is None or place is None:
        return str(folder)
    store, prefix = open_store(place), f"traces/{job.name}/{done.number}"
    for file in files:
        store.put(f"{prefix}/{file}", folder / file)
    return f"{store.place.rstrip('/')}/{prefix}"
