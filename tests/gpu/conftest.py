"""Skips this folder where there is no GPU, and says why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.gpu.devices import NoGpuError, device_name, is_gpu

from spottrain.machine import OWNER_VARIABLE

if TYPE_CHECKING:
    from tests.integration.fleet import Zygote

ROOT = Path(__file__).parents[2]


def pytest_configure(config: pytest.Config) -> None:
    """Let no warning of a library on a machine seen for the first time be an error."""
    here = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    if here and all(path.is_relative_to(Path(__file__).parent) for path in here):
        config.addinivalue_line("filterwarnings", "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    try:
        device_name()
    except NoGpuError as error:
        reason = str(error)
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(300))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def importable() -> None:
    """Let processes that tests start import the package, and be of one job."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault(OWNER_VARIABLE, "tests")


@pytest.fixture(scope="session")
def zygote(importable: None) -> Iterator[Zygote]:
    from tests.integration.fleet import Zygote  # imports torch

    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def device() -> str:
    """Return the name of the device."""
    return device_name()


@pytest.fixture
def gpu(device: str) -> str:
    """Return the name of a real GPU, for what a stand-in cannot show."""
    if not is_gpu(device):
        pytest.skip(f"needs a real GPU: runs on {device}")
    return device
