"""What tests of several folders use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gpus import VARIABLE, FakeGpus
from tests.fakes.nvml import pynvml
from tests.fakes.object_store import CREDENTIALS, S3, new_bucket, serve_s3

from spottrain.storage.open import open_store
from spottrain.storage.store import Store


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    with serve_s3() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """Return an empty bucket, and have what it takes to use it in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return new_bucket(s3_server.endpoint)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return an empty store, once a folder, once a bucket."""
    if request.param == "folder":
        return open_store(tmp_path / "store")
    s3: S3 = request.getfixturevalue("s3")
    return open_store(s3.url("some/prefix"))


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a file system of 256 kB, or as the test's parameter says."""
    size = getattr(request, "param", "256k")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a full disk is a small tmpfs here: mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


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
