"""A stand-in of the catalogue of instance types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FakeGpu:
    """A GPU model."""

    memory_bytes: int


@dataclass(frozen=True)
class FakeMachine:
    """An instance type."""

    gpu: FakeGpu
    gpus: int = 1
    device: Literal["gpu", "cpu"] = "gpu"


@dataclass(frozen=True)
class FakeFacts:
    """A catalogue of one cloud's machines, which all have one GPU."""

    cloud: str
    known: tuple[str, ...]
    """What their names begin with."""
    memory_bytes: int

    def find(self, cloud: str, instance_type: str) -> FakeMachine | None:
        """Return one, whatever its size."""
        known = cloud == self.cloud and instance_type.startswith(self.known)
        return FakeMachine(FakeGpu(self.memory_bytes)) if known else None
