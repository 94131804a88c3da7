"""Errors of planning."""

from __future__ import annotations

from spottrain.errors import SpottrainError


class PlanError(SpottrainError):
    """A plan or a schedule was asked for that cannot exist."""
