"""Faults that workers suffer at hooks (``pipeline.base.faults``), as tests script them.

A script is a list of ``{"hook", "step", "rank", "action", "mark"}``. A fault fires once, even
when a successor passes the same hook again: it creates the file ``mark`` and fires only if that
file was not there. The file also proves that the hook was reached.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from spottrain.pipeline.base.faults import ENVIRONMENT_VARIABLE, FaultScript, Hook


class Action(StrEnum):
    """Kinds of faults."""

    KILL_WORKER = "kill_worker"
    KILL_VM = "kill_vm"
    """Every process of the supervisor's process group."""
    RAISE = "raise"
    """An exception, as from a broken connection."""
    HANG = "hang"
    """The main thread waits for ever, as for a device that waits for a peer."""
    END_ITSELF = "end_itself"
    """The worker ends itself, as when a communicator cannot be aborted."""
    OUT_OF_MEMORY = "out_of_memory"
    """The exception of an allocator that has no memory left on the device."""


class InjectedFaultError(RuntimeError):
    """Stands for an error of the communication library."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    hook: Hook
    step: int
    """It fires when the hook is first passed after this many mini-batches or more."""
    rank: int
    action: Action
    mark: str


@dataclass(slots=True)
class Script(FaultScript):
    """Faults of one process."""

    faults: tuple[Fault, ...] = ()
    _end: Callable[[], None] = field(default=lambda: None)

    def end_with(self, end: Callable[[], None]) -> None:
        self._end = end

    def at(self, hook: Hook) -> None:
        for fault in self.faults:
            here = (fault.hook, fault.rank) == (hook, self.rank)
            if here and self.step >= fault.step:
                try:
                    os.close(os.open(fault.mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                self._fire(fault.action)

    def _fire(self, action: Action) -> None:
        match action:
            case Action.KILL_WORKER:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.KILL_VM:
                os.killpg(0, signal.SIGKILL)
            case Action.RAISE:
                raise InjectedFaultError("injected fault")
            case Action.HANG:
                threading.Event().wait()
            case Action.END_ITSELF:
                self._end()
            case Action.OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity "
                    "of 15.77 GiB of which 1.12 GiB is free."
                )


def environment_of(script: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the variable by which a supervisor's workers suffer a script."""
    return {ENVIRONMENT_VARIABLE: f"tests.faults:{json.dumps(script)}"}


def open_faults(argument: str) -> Script:
    rows: list[dict[str, Any]] = json.loads(argument)
    faults = (
        Fault(Hook(row["hook"]), row["step"], row["rank"], Action(row["action"]), row["mark"])
        for row in rows
    )
    return Script(faults=tuple(faults))
