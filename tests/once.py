"""What the test processes of a run do once for all of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes import NUMBER


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all test processes of this run share."""
    base = factory.getbasetemp()
    return base.parent if NUMBER in os.environ else base


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock that one process of all can hold."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
