"""Availability traces: the lives of the VMs of a spot group.

Three formats are read, told apart by how they begin:

- ``milliseconds,add|remove,node``: one VM per row;
- ``YYYY-mm-dd, HH:MM:SS, count``: the number of VMs;
- ``{"metadata": {"gap_seconds": 600}, "data": [1, 0, ...]}``: the number of VMs, looked at
  every so many seconds, as in SkyPilot's traces.

Which VMs are lost when a number falls is not known, so they are drawn from a seed.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeGuard

from spottrain.errors import shortened
from spottrain.morphing.errors import PlanError
from spottrain.units import DAY_S

_MOST_VMS = 100_000
LONGEST_S = 3652.5 * DAY_S
"""Maximum length of a trace; times in another unit would play for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmInterval:
    """One VM: here from ``from_s`` until ``until_s``."""

    vm_id: str
    from_s: float
    until_s: float
    """Infinite if it is still there when the trace ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A spot group; its first row is at 0 s, its last one at ``end_s``."""

    lives: tuple[VmInterval, ...]
    """By ascending ``from_s``."""
    end_s: float
    notices: tuple[str, ...] = ()
    """Corrections made while reading, a line each."""

    def vm_s(self) -> float:
        """Return the seconds of all VMs together within the trace."""
        return sum(min(vm.until_s, self.end_s) - vm.from_s for vm in self.lives)

    def max_vms(self) -> int:
        """Return the maximum number of VMs at a time."""
        moments = [(vm.from_s, 1) for vm in self.lives]
        moments += [(vm.until_s, -1) for vm in self.lives]
        counts = itertools.accumulate(change for _, change in sorted(moments))
        return max(counts, default=0)


def joined(traces: Sequence[Trace]) -> Trace:
    """Return the spot groups of several zones as one, all from their first rows on.

    It ends with the shortest of them.
    """
    if len(traces) == 1:
        return traces[0]
    end_s = min(trace.end_s for trace in traces)
    lives = [
        replace(vm, vm_id=f"{number}/{vm.vm_id}")
        for number, trace in enumerate(traces)
        for vm in trace.lives
        if vm.from_s < end_s
    ]
    return Trace(
        lives=tuple(sorted(lives, key=lambda vm: vm.from_s)),
        end_s=end_s,
        notices=tuple(notice for trace in traces for notice in trace.notices),
    )


def limited(trace: Trace, vms: int) -> Trace:
    """Return what a job that never has more than ``vms`` VMs sees of a group.

    A VM is kept until it is lost; then another one that is there is started, the newest.
    """
    lives: list[VmInterval] = []
    held: list[float] = []
    """When each VM that is held is lost."""
    free: list[VmInterval] = []

    def start(now_s: float) -> None:
        while free and len(held) < vms:
            vm = free.pop()
            if vm.until_s > now_s:
                heapq.heappush(held, vm.until_s)
                lives.append(replace(vm, from_s=now_s))

    def lose_until(now_s: float) -> None:
        while held and held[0] <= now_s:
            start(heapq.heappop(held))

    for vm in trace.lives:
        lose_until(vm.from_s)
        free.append(vm)
        start(vm.from_s)
    lose_until(trace.end_s)
    kept = tuple(sorted(lives, key=lambda vm: vm.from_s))
    return replace(trace, lives=kept)


def parse_trace(text: str, *, seed: int = 0) -> Trace:
    """Read a trace of any of the formats.

    Rows in disorder are sorted, rows that occur twice or change nothing are left out;
    ``Trace.notices`` says how many.

    Args:
        text: The file.
        seed: Draws which VMs go where only counts are known.

    Raises:
        PlanError: A row is of no format or of another one than the first row, or
            there is none.
    """
    if text.lstrip().startswith("{"):
        rows, are_counts = _samples(text), True
    else:
        rows, are_counts = _rows(text)
    rows, notices = _put_in_order(rows)
    if are_counts:
        rows = list(_events_of_counts(rows, random.Random(seed)))
    lives, idle = _lives(rows)
    if idle:
        notices += (f"{idle} rows changed nothing (a VM added twice or never there)",)
    start_s, end_s = rows[0].at_s, rows[-1].at_s
    if not end_s > start_s:
        raise PlanError("the trace has no length: give rows of at least two moments")
    if end_s - start_s > LONGEST_S:
        raise PlanError(
            f"the trace must last {LONGEST_S:.0f} s (ten years) or less: got "
            f"{end_s - start_s:.3g} s; fix its times"
        )
    return Trace(
        lives=tuple(
            VmInterval(vm_id=vm.vm_id, from_s=vm.from_s - start_s, until_s=vm.until_s - start_s)
            for vm in lives
        ),
        end_s=end_s - start_s,
        notices=notices,
    )


def _rows(text: str) -> tuple[list[_Row], bool]:
    """Return the rows of a trace of lines, and whether they are counts."""
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise PlanError("the trace is empty: give at least one row")
    read: Callable[[str], _Row | None]
    read = _event if _event(lines[0][1]) else _count
    rows = []
    for number, line in lines:
        row = read(line)
        if row is None:
            raise PlanError(
                f"row {number} of the trace has an unknown format: got {shortened(line)}; "
                "write 'milliseconds,add|remove,node' or "
                "'YYYY-mm-dd, HH:MM:SS, count' in every row"
            )
        rows.append(row)
    return rows, read is _count


def _samples(text: str) -> list[_Row]:
    """Return the rows of a trace in JSON; the last number holds for one more gap."""
    form = 'write {"metadata": {"gap_seconds": 600}, "data": [1, 0, ...]}'
    try:
        found = json.loads(text)
        gap_s, counts = found["metadata"]["gap_seconds"], found["data"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(
            f"the trace begins as JSON and cannot be read ({type(error).__name__}): got "
            f"{shortened(text)}; {form}"
        ) from error
    if not _is_number(gap_s, LONGEST_S) or gap_s == 0:
        raise PlanError(f"gap_seconds of the trace must be seconds: got {shortened(gap_s)}; {form}")
    if not isinstance(counts, list) or not counts:
        raise PlanError(f"data of the trace must be a list of numbers; {form}")
    for number, count in enumerate(counts):
        if not _is_number(count, _MOST_VMS) or count != int(count):
            raise PlanError(
                f"number {number} in data of the trace must be a number of VMs: got "
                f"{shortened(count)}; {form}"
            )
    return [
        _Row(at_s=number * gap_s, count=int(count))
        for number, count in enumerate((*counts, counts[-1]))
    ]


def _is_number(value: Any, most: float) -> TypeGuard[float]:
    """Return whether a JSON value is a number from 0 to ``most``; NaN is not."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and 0 <= value <= most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An event, or a count with neither VM nor direction."""

    at_s: float
    added: bool = True
    vm_id: str = ""
    count: int = 0


def _event(line: str) -> _Row | None:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 3 or parts[1] not in ("add", "remove") or not parts[2]:
        return None
    try:
        at_s = float(parts[0]) / 1000
    except ValueError:
        return None
    if not (math.isfinite(at_s) and at_s >= 0):
        return None
    return _Row(at_s=at_s, added=parts[1] == "add", vm_id=parts[2])


def _count(line: str) -> _Row | None:
    parts = [part.strip() for part in line.split(",")]
    try:
        day, clock, count = parts
        at = datetime.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S")
        row = _Row(at_s=at.replace(tzinfo=UTC).timestamp(), count=int(count))
    except ValueError:
        return None
    return row if 0 <= row.count <= _MOST_VMS else None


def _put_in_order(rows: list[_Row]) -> tuple[list[_Row], tuple[str, ...]]:
    notices: tuple[str, ...] = ()
    ordered = sorted(rows, key=lambda row: row.at_s)  # stable: ties stay as written
    if ordered != rows:
        late = sum(b.at_s < a.at_s for a, b in itertools.pairwise(rows))
        notices += (f"rows were out of order in {late} places: sorted by time",)
    kept = list(dict.fromkeys(ordered))
    if len(kept) < len(ordered):
        notices += (f"{len(ordered) - len(kept)} duplicate rows left out",)
    return kept, notices


def _events_of_counts(rows: Iterable[_Row], draw: random.Random) -> Iterator[_Row]:
    """Name the VMs of a trace of counts; a row without change keeps its moment."""
    here: list[str] = []
    named = 0
    for row in rows:
        if row.count == len(here):
            yield row
        while len(here) < row.count:
            here.append(f"vm{named}")
            named += 1
            yield _Row(at_s=row.at_s, added=True, vm_id=here[-1])
        while len(here) > row.count:
            gone = here.pop(draw.randrange(len(here)))
            yield _Row(at_s=row.at_s, added=False, vm_id=gone)


def _lives(rows: Iterable[_Row]) -> tuple[list[VmInterval], int]:
    """Return the VMs by ascending start, and how many rows changed nothing."""
    since: dict[str, float] = {}
    lives: list[VmInterval] = []
    idle = 0
    for row in rows:
        if not row.vm_id:
            continue
        if row.added == (row.vm_id in since):
            idle += 1
        elif row.added:
            since[row.vm_id] = row.at_s
        else:
            from_s = since.pop(row.vm_id)
            if row.at_s > from_s:
                life = VmInterval(vm_id=row.vm_id, from_s=from_s, until_s=row.at_s)
                lives.append(life)
    for vm_id, from_s in since.items():
        lives.append(VmInterval(vm_id=vm_id, from_s=from_s, until_s=math.inf))
    return sorted(lives, key=lambda vm: vm.from_s), idle
