"""When one rank did what in a mini-batch: what ``spottrain timeline`` asks workers for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spottrain.codec import SCHEMA_VERSION

Phase = Literal["reduction", "commit", "update"]
"""After a stage's last backward: the sum of gradients, all ranks' exchange by which the
mini-batch is committed, the optimizer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """A task of the schedule, on the device."""

    work: Literal["F", "R", "B"]
    microbatch: int
    chunk: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SentAt:
    """When an activation or a gradient was given to its link."""

    is_gradient: bool
    microbatch: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedAt:
    """When an activation or a gradient had arrived; in the order of its sender."""

    is_gradient: bool
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """What a rank does besides its tasks."""

    phase: Phase
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """One rank; times are seconds after ``wall_s``."""

    replica: int
    stage: int
    pipeline_depth: int
    wall_s: float
    """When it began, in Unix time by the clock of its VM."""
    tasks: tuple[TaskTimes, ...]
    """In the order in which they ran; so are the others."""
    sent: tuple[SentAt, ...]
    arrived: tuple[ArrivedAt, ...]
    phases: tuple[PhaseTimes, ...]
    schema_version: int = SCHEMA_VERSION
