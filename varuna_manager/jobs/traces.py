"""Profiler traces of a job, in its folder: ``traces/<number>/rank-<rank>.json.gz``.

``traces.json`` beside them says what was asked for and what has come. It is all that the
manager knows of them: one that is started anew takes in those that are still on their
way. They are no events of the journal, as nothing depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spottrain.codec import SCHEMA_VERSION, decode, encode
from spottrain.errors import SpottrainError
from spottrain.files import write_whole
from spottrain.wire.messages import TraceWritten

_RECORD = "traces.json"


class TracesRefusedError(SpottrainError):
    """Nothing trains that could be profiled, or a trace comes that nobody waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank has sent."""

    rank: int
    first_step: int
    """Mini-batches applied when it began."""
    last_step: int
    """Mini-batches applied when it ended."""
    file: str
    """In the folder of the set, a Chrome trace; empty: there is none."""
    num_bytes: int
    reason: str
    """Why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSet:
    """Traces of the same mini-batches, one of each rank of a generation."""

    number: int
    generation: int
    minibatches: int
    """To be recorded; fewer if training ends."""
    vm_ids: tuple[str, ...]
    """Of the ranks, in order."""
    traces: tuple[RankTrace, ...] = ()
    """That have come, by rank."""
    schema_version: int = SCHEMA_VERSION

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose trace has not come."""
        come = {trace.rank for trace in self.traces}
        return tuple(rank for rank in range(len(self.vm_ids)) if rank not in come)


class Traces:
    """The sets of traces of one job.

    Args:
        folder: Of all of them; need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder_of(self, number: int) -> Path:
        """Return the folder of a set."""
        return self._folder / str(number)

    def begin(self, generation: int, vm_ids: Sequence[str], minibatches: int) -> TraceSet:
        """Make the folder of a new set, whose number is the highest so far."""
        numbers = (int(one.name) for one in self._folder.glob("[0-9]*"))
        traces = TraceSet(
            number=max(numbers, default=0) + 1,
            generation=generation,
            minibatches=minibatches,
            vm_ids=tuple(vm_ids),
        )
        self.folder_of(traces.number).mkdir(parents=True)
        self._write(traces)
        return traces

    def read(self, number: int) -> TraceSet | None:
        """Return a set; ``None`` if there is none of that number."""
        file = self.folder_of(number) / _RECORD
        if not file.exists():
            return None
        traces: TraceSet = decode(TraceSet, file.read_text())
        return traces

    def add(self, vm_id: str, sent: TraceWritten, content: bytes) -> None:
        """Keep a rank's trace; one that comes twice counts once.

        Args:
            vm_id: Who sends it.
            sent: What it is.

        Raises:
            TracesRefusedError: This rank of this VM was not asked for one.
        """
        known = self.read(sent.number)
        if known is None or known.vm_ids[sent.rank : sent.rank + 1] != (vm_id,):
            raise TracesRefusedError(
                f"rank {sent.rank} on {vm_id} was not asked for trace {sent.number}"
            )
        name = f"rank-{sent.rank}.json.gz" if content else ""
        if name:
            (self.folder_of(sent.number) / name).write_bytes(content)
        trace = RankTrace(
            rank=sent.rank,
            first_step=sent.first_step,
            last_step=sent.last_step,
            file=name,
            num_bytes=len(content),
            reason=sent.reason,
        )
        others = (one for one in known.traces if one.rank != sent.rank)
        traces = sorted((*others, trace), key=lambda one: one.rank)
        self._write(replace(known, traces=tuple(traces)))

    def _write(self, traces: TraceSet) -> None:
        """Write ``traces.json``, whole or not at all."""
        write_whole(self.folder_of(traces.number) / _RECORD, encode(traces))
