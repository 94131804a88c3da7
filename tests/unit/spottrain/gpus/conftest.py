"""A machine whose NVML is the fake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gpus import VARIABLE, FakeGpus
from tests.fakes.nvml import pynvml


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeGpus]:
    """Return a function that puts GPUs into this machine."""

    def put(count: int = 1, **changes: Any) -> FakeGpus:
        gpus = FakeGpus(tmp_path / "nvml.json", count, **changes)
        monkeypatch.setenv(VARIABLE, str(gpus.file))
        monkeypatch.setitem(sys.modules, "pynvml", pynvml)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return gpus

    return put
