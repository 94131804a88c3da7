"""What the workers of a VM do, told even by one that hangs.

Each worker writes into a record of memory that it shares with the agent of its VM, which
maps it too: how many tasks it has begun, what it does, whom it waits for. The agent adds
what the kernel knows of the process (proc_pid_stat(5)). So neither a worker nor a
supervisor that hangs can keep it secret.

Standard library only: the agent's side is copied to machines as it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from spottrain.wire.model import ALL_RANKS, Doing, ProcessState, WorkerState

LOOK_S = 1.0
"""Time between the two looks at a process that show whether it computes."""
BUSY_SHARE = 0.05
"""Of a core: a process that takes less is idle. A thread of the user's that shows progress
once in a while is no work."""
_RECORD_BYTES = 64
_DOINGS: tuple[Doing, ...] = get_args(Doing)
_PID, _GENERATION, _TASKS, _SINCE_NS, _DOING, _WAITS_FOR = range(6)
_NOBODY = -2
_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Activity:
    """A worker's record; each word is written at once, so that it may be read anytime.

    Args:
        record: Where it is; none: in memory that nobody reads.
    """

    def __init__(self, record: memoryview | None = None) -> None:
        room = memoryview(bytearray(_RECORD_BYTES)) if record is None else record
        self._words = room.cast("q")

    @classmethod
    def of_slot(cls, fd: int | None, slot: int) -> Activity:
        """Map the record of a slot of this VM; ``None``: nobody reads it."""
        if fd is None:
            return cls()
        start = slot * _RECORD_BYTES
        return cls(memoryview(mmap.mmap(fd, 0))[start : start + _RECORD_BYTES])

    def begin(self, generation: int = 0) -> None:
        """Begin to take part in a generation; 0: in none yet."""
        self._words[_PID] = os.getpid()
        self._words[_GENERATION] = generation
        self.note("start")

    def end(self) -> None:
        """Take part in no generation any more."""
        self._words[_GENERATION] = 0

    def note(self, doing: Doing, waits_for: int | None = None) -> None:
        """Say what is done from now on: a task begins.

        Args:
            waits_for: The rank that is waited for, or ``ALL_RANKS``.
        """
        self._put(_DOINGS.index(doing), _NOBODY if waits_for is None else waits_for)

    @contextlib.contextmanager
    def during(self, doing: Doing, waits_for: int | None = None) -> Iterator[None]:
        """Say what is done inside; after it, what was done before goes on."""
        before = self._words[_DOING], self._words[_WAITS_FOR]
        self.note(doing, waits_for)
        yield
        self._put(*before)

    def waiting(self, waits_for: int = ALL_RANKS) -> contextlib.AbstractContextManager[None]:
        """Say that a rank, or all of them, is waited for inside."""
        return self.during("wait", waits_for)

    @contextlib.contextmanager
    def showing(self, other: Activity) -> Iterator[None]:
        """Say inside what another thread does, which this one waits for.

        Args:
            other: That thread's, in memory that nobody else reads.
        """
        before = self._words[_DOING], self._words[_WAITS_FOR]
        theirs, other._words = other._words, self._words
        self._put(theirs[_DOING], theirs[_WAITS_FOR])
        try:
            yield
        finally:
            other._words = theirs
            self._put(*before)

    def _put(self, doing: int, waits_for: int) -> None:
        words = self._words
        words[_DOING], words[_WAITS_FOR] = doing, waits_for
        words[_SINCE_NS] = time.monotonic_ns()
        words[_TASKS] += 1


class ActivityPage:
    """The records of all slots of a VM, as its agent reads them.

    Args:
        fd: An empty file in memory; the processes that write inherit it.
        num_slots: Of the VM.
    """

    def __init__(self, fd: int, num_slots: int) -> None:
        self.fd = fd
        os.ftruncate(fd, num_slots * _RECORD_BYTES)
        self._words = memoryview(mmap.mmap(fd, 0)).cast("q")
        self._slots = range(num_slots)

    def inspect(self, generation: int, pause: Callable[[float], object]) -> tuple[WorkerState, ...]:
        """Look twice at the workers that take part in a generation, and at those that are
        stopped, which may be why they do not.

        Args:
            generation: Its number.
            pause: Waits for as many seconds.
        """
        first = {slot: _look(self._record(slot)[_PID]) for slot in self._slots}
        pause(LOOK_S)
        found = []
        for slot in self._slots:
            words = self._record(slot)
            process = state_between(first[slot], _look(words[_PID]))
            if words[_GENERATION] != generation and process != "stopped":
                continue
            waits_for = words[_WAITS_FOR]
            found.append(
                WorkerState(
                    slot=slot,
                    tasks=words[_TASKS],
                    doing=_DOINGS[words[_DOING]],
                    waits_for=None if waits_for == _NOBODY else waits_for,
                    still_s=(time.monotonic_ns() - words[_SINCE_NS]) / 1e9,
                    process=process,
                )
            )
        return tuple(found)

    def slot_of(self, pid: int) -> int | None:
        """Return the slot whose worker a process is; None: it is no worker."""
        return next((s for s in self._slots if self._record(s)[_PID] == pid), None)

    def _record(self, slot: int) -> list[int]:
        words = _RECORD_BYTES // self._words.itemsize
        return self._words[slot * words : (slot + 1) * words].tolist()


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """A process with all its descendants at one moment."""

    at_s: float
    """Monotonic."""
    states: tuple[str, ...]
    """Of its threads, the main one first, as in proc_pid_stat(5); none: it is gone."""
    cpu_s: float
    major_faults: int
    """Pages read from disk: a process that swaps is not idle."""


def state_between(first: ProcessLook, second: ProcessLook) -> ProcessState:
    """Return what a process did between two looks."""
    if not first.states or not second.states or second.states[0] in "ZX":
        return "gone"
    if all(look.states[0] in "tT" for look in (first, second)):
        return "stopped"
    used_s = second.cpu_s - first.cpu_s
    runs = all("R" in look.states for look in (first, second))  # or waits for a core
    swaps = second.major_faults > first.major_faults
    if runs or swaps or used_s > BUSY_SHARE * (second.at_s - first.at_s):
        return "busy"
    blocked = all("D" in look.states for look in (first, second))
    return "blocked" if blocked else "idle"


def _look(pid: int) -> ProcessLook:
    states: list[str] = []
    ticks = faults = 0
    waiting = [pid] if pid else []
    while waiting:
        tasks = _PROC / str(waiting.pop()) / "task"
        with contextlib.suppress(OSError):  # it has ended
            for task in sorted(tasks.iterdir(), key=lambda path: int(path.name)):
                with contextlib.suppress(OSError):
                    fields = (task / "stat").read_bytes().rpartition(b")")[2].split()
                    states.append(fields[0].decode())
                    faults += int(fields[9])
                    ticks += int(fields[11]) + int(fields[12])
                    children = (task / "children").read_text().split()
                    waiting += map(int, children)
    cpu_s = ticks / _TICKS_PER_S
    return ProcessLook(time.monotonic(), tuple(states), cpu_s, faults)
