"""Fault injection: every sub-step of a mini-batch is a hook that can be made to fail.

Tests put their own script in: ``SPOTTRAIN_FAULTS`` of a supervisor is a module on its path, a
colon and the argument of that module's function ``open_faults``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(slots=True)
class FaultScript:
    """The faults that this process may still suffer: by itself none."""

    rank: int = -1
    step: int = -1
    """Mini-batches applied before the one that runs."""

    def at(self, hook: Hook) -> None:
        """Fire the faults scripted for ``hook`` at the current rank and step."""

    def end_with(self, end: Callable[[], None]) -> None:
        """Let a fault end this worker by ``end``."""


def open_faults() -> FaultScript:
    """Return the script that the environment names; usually an empty one."""
    module, _, argument = os.environ.get(ENVIRONMENT_VARIABLE, "").partition(":")
    if not module:
        return FaultScript()
    script: FaultScript = importlib.import_module(module).open_faults(argument)
    return script
