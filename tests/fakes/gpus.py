"""GPUs that the fake NVML of ``tests/fakes/nvml`` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.nvml import pynvml

from spottrain.wire.model import GpuFacts, GpuUse

FAKE_NVML = Path(pynvml.__file__).parent
"""Goes first on PYTHONPATH."""
VARIABLE = "FAKE_NVML"
NAMES = {
    70: "Tesla V100-SXM2-16GB",
    75: "Tesla T4",
    80: "NVIDIA A100-SXM4-40GB",
    86: "NVIDIA A10G",
    90: "NVIDIA H100 80GB HBM3",
}


def facts(index: int = 0, capability: int = 86, **changes: Any) -> GpuFacts:
    """Return a GPU as NVML would describe it."""
    known: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-0000000{index}-aaaa",
        "name": NAMES[capability],
        "memory_bytes": 24 * 10**9,
        "compute_capability": capability,
        "driver": "580.95.05",
        "cuda": "13.0",
    }
    return GpuFacts(**known | changes)


def use(index: int = 0, **changes: Any) -> GpuUse:
    """Return what a GPU does that is busy."""
    known: dict[str, Any] = {
        "index": index,
        "utilisation": 0.97,
        "memory_used_bytes": 3 * 10**9,
        "power_w": 151.2,
        "temperature_c": 64.0,
    }
    return GpuUse(**known | changes)


class FakeGpus:
    """The file that describes them.

    Args:
        file: Where it is.
        count: GPUs at first, healthy ones with ECC and events.
    """

    def __init__(self, file: Path, count: int = 1, **changes: Any) -> None:
        self.file = file
        gpu: dict[str, Any] = {
            "name": NAMES[86],
            "memory_bytes": 24 * 10**9,
            "capability": 86,
            "mig": 0,
            "ecc": 0,
            "rows": [0, 0, 0, 0],
            "reasons": 0,
            "recovery": 0,
            "xids": [],
        }
        gpus = [{**gpu, "uuid": f"GPU-0000000{index}-aaaa", **changes} for index in range(count)]
        self._world: dict[str, Any] = {"driver": "580.95.05", "gpus": gpus}
        self._write()

    def change(self, index: int = 0, **changes: Any) -> None:
        """Change a GPU from now on; None takes a fact away."""
        self._world = json.loads(self.file.read_text())
        gpu = {**self._world["gpus"][index], **changes}
        gpu = {key: value for key, value in gpu.items() if value is not None}
        self._world["gpus"][index] = gpu
        self._write()

    def set(self, **changes: Any) -> None:
        """Change the driver: ``driver``, its version, or ``error``, of ``nvmlInit``."""
        self._world = {**json.loads(self.file.read_text()), **changes}
        self._write()

    def _write(self) -> None:
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps(self._world))
        draft.replace(self.file)
