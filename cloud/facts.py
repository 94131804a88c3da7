"""What an adapter needs to be told about the kinds of machines, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Gpu(Protocol):
    """A kind of GPU."""

    @property
    def memory_bytes(self) -> int:
        """Memory of one."""


class Machine(Protocol):
    """A kind of machine."""

    @property
    def gpu(self) -> Gpu:
        """Its GPUs are alike."""

    @property
    def gpus(self) -> int:
        """How many it has."""


class Facts(Protocol):
    """Knows the kinds of machines; ``pricing.catalogue.Catalogue`` is one."""

    def find(self, cloud: str, instance_type: str) -> Machine | None:
        """Return a kind of machine, None if it is not known."""


OnDemandPrice = Callable[[str, str], float | None]
"""(region, instance type) -> USD per hour, None where it is not known."""
