"""Fault injection: every sub-step of a mini-batch is a hook that can be made to fail.

Tests put a script of faults, as JSON, into the environment variable
``SPOTTRAIN_FAULTS`` of a supervisor: a list of ``{"hook", "step", "rank", "action",
"mark"}``. A fault fires once, even when a successor passes the same hook again: it
creates the file ``mark`` and fires only if that file was not there. The file also
proves that the hook was reached.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

ENVIRONMENT_VARIABLE = "SPOTTRAIN_FAULTS"


class Hook(StrEnum):
    """Places between the sub-steps of a mini-batch (design: Commit) and of a morph."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    REDUCE = "reduce"
    """Before the reductions begin."""
    REDUCED = "reduced"
    """Reductions are over, the prepared mark is not set."""
    PREPARED = "prepared"
    """The prepared mark is set, the gather has not begun."""
    GATHERED = "gathered"
    """The gather is over, the decision is not written."""
    DECIDED = "decided"
    """The decision is written, no section has been touched."""
    UNDO_SAVED = "undo_saved"
    """The undo slot of a section is valid, the section has not been touched."""
    UPDATED = "updated"
    """A section has been updated, its version word has not been flipped."""
    FLIPPED = "flipped"
    """A version word has been flipped, its undo slot is still valid."""
    APPLIED = "applied"
    """All sections are applied, nothing has been reported."""
    REPORTED = "reported"
    SNAPSHOT = "snapshot"
    """A checkpoint is due, nothing has been copied."""
    CHECKPOINT_WRITTEN = "checkpoint_written"
    """This rank's share of a checkpoint is on disk, its manifest is not."""
    EVALUATED = "evaluated"
    """This rank's share of an evaluation is computed, the loss has not been summed."""
    JOINED = "joined"
    """The hand-over group of a generation is formed."""
    AGREED = "agreed"
    """The first exchange is over, nothing has been moved."""
    MOVED = "moved"
    """Sections have moved, the training groups are not formed."""


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
class FaultScript:
    """The faults that this process may still suffer."""

    faults: tuple[Fault, ...] = ()
    rank: int = -1
    step: int = -1
    """Mini-batches applied before the one that runs."""
    _actions: dict[Action, Callable[[], None]] = field(
        default_factory=lambda: {
            Action.KILL_WORKER: lambda: os.kill(os.getpid(), signal.SIGKILL),
            Action.KILL_VM: lambda: os.killpg(0, signal.SIGKILL),
            Action.RAISE: _raise,
            Action.HANG: _hang,
            Action.OUT_OF_MEMORY: _run_out_of_memory,
        }
    )

    def end_with(self, end: Callable[[], None]) -> None:
        """Let ``END_ITSELF`` call ``end``."""
        self._actions[Action.END_ITSELF] = end

    @classmethod
    def from_environment(cls) -> FaultScript:
        """Return the script that the environment holds; usually an empty one."""
        text = os.environ.get(ENVIRONMENT_VARIABLE, "[]")
        rows: list[dict[str, Any]] = json.loads(text)
        return cls(
            tuple(
                Fault(
                    Hook(row["hook"]),
                    row["step"],
                    row["rank"],
                    Action(row["action"]),
                    row["mark"],
                )
                for row in rows
            )
        )

    def at(self, hook: Hook) -> None:
        """Fire the faults scripted for ``hook`` at the current rank and step."""
        for fault in self.faults:
            here = (fault.hook, fault.rank) == (hook, self.rank)
            if here and self.step >= fault.step:
                try:
                    os.close(os.open(fault.mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                self._actions[fault.action]()


def _raise() -> None:
    raise InjectedFaultError("injected fault")


def _hang() -> None:
    threading.Event().wait()


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of "
        "15.77 GiB of which 1.12 GiB is free."
    )
