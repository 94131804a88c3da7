"""Finds, kills, stops or slows down all processes of a VM, and removes its files; Linux only.

A process belongs to a VM if its environment says so (SPOTTRAIN_VM is inherited), if it
is in the session of one that does or of the VM's agent, or if its parent belongs to the
VM. A process that escaped all three is not found.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spottrain.cloud.port.errors import CloudError

VARIABLE = "SPOTTRAIN_VM"
"""Environment variable that marks the processes of a VM."""

_PATIENCE_S = 60.0
"""A process in a system call may take a while to react to a signal."""


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    group: int
    session: int
    state: str
    marked: bool


def kill_all(markers: Collection[str], sessions: Collection[int] = ()) -> None:
    """SIGKILL all processes of some VMs; return when none is left.

    Args:
        markers: Values of SPOTTRAIN_VM.
        sessions: Session ids of the VMs' agents, as far as known.

    Raises:
        CloudError: a process is still there after a minute.
    """
    deadline = time.monotonic() + _PATIENCE_S
    # A fork may slip between the scan and the kill: scan until nothing is found.
    while found := _members(markers, sessions):
        handles = [_signal(process.pid, signal.SIGKILL) for process in found]
        for handle in handles:
            if handle is not None:
                _wait_for_exit(handle, deadline)
                os.close(handle)
        _check_deadline(found, deadline)


def clear_folder(vm_folder: Path) -> None:
    """Remove all files of an ended VM but its logs, as far as possible."""
    for entry in vm_folder.iterdir() if vm_folder.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            # Files that user code made unremovable must not end the cloud.
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.suffix != ".log":
            entry.unlink(missing_ok=True)


def stop_all(markers: Collection[str], sessions: Collection[int] = ()) -> None:
    """SIGSTOP all processes of some VMs; return when all are stopped.

    Raises:
        CloudError: a process still runs after a minute.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while found := [p for p in _members(markers, sessions) if p.state not in "Tt"]:
        for process in found:
            handle = _signal(process.pid, signal.SIGSTOP)
            if handle is not None:
                os.close(handle)
        _check_deadline(found, deadline)
        # Only a parent is notified when a process stops; most of these have others.
        time.sleep(0.001)


def groups(markers: Collection[str], sessions: Collection[int] = ()) -> frozenset[int]:
    """Return the process groups of some VMs, without our own.

    Args:
        markers: As in ``kill_all``.
        sessions: As in ``kill_all``.
    """
    found = frozenset(process.group for process in _members(markers, sessions))
    return found - {os.getpgrp()}


def signal_groups(found: Iterable[int], number: signal.Signals) -> None:
    """Signal every process of some groups that still exist."""
    for group in found:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


def _members(markers: Collection[str], sessions: Collection[int]) -> list[_Process]:
    """Return all processes of some VMs except zombies."""
    # A process in the middle of exec has no environment: scan twice.
    return _scan(markers, sessions) or _scan(markers, sessions)


def _scan(markers: Collection[str], sessions: Collection[int]) -> list[_Process]:
    entries = {f"{VARIABLE}={marker}".encode() for marker in markers}
    table = [p for p in _table(entries) if p.pid != os.getpid()]
    their_sessions = {p.session for p in table if p.marked}.union(sessions)
    ours = {p.pid for p in table if p.session in their_sessions}
    while more := {p.pid for p in table if p.parent in ours and p.pid not in ours}:
        ours |= more
    return [p for p in table if p.pid in ours and p.state not in "ZX"]


def _table(entries: set[bytes]) -> Iterator[_Process]:
    """Yield every process of the machine; marked if it has one of ``entries``."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        folder = Path("/proc", name)
        try:
            stat = (folder / "stat").read_bytes()
            state, *ids = stat.rpartition(b")")[2].split()[:4]
            parent, group, session = map(int, ids)
        except (FileNotFoundError, ProcessLookupError):
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or gone since
            environment = []
        marked = not entries.isdisjoint(environment)
        yield _Process(int(name), parent, group, session, state.decode(), marked)


def _signal(pid: int, number: signal.Signals) -> int | None:
    """Send a signal; return a descriptor of the process, ``None`` if it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        os.close(handle)
        return None
    return handle


def _wait_for_exit(handle: int, deadline: float) -> None:
    """Wait until a process has exited, or the deadline (monotonic seconds)."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _check_deadline(processes: Collection[_Process], deadline: float) -> None:
    if time.monotonic() > deadline:
        pids = ", ".join(str(p.pid) for p in processes)
        raise CloudError(
            f"processes {pids} of a VM do not react to signals within "
            f"{_PATIENCE_S:g} s; check what they wait for"
        )
