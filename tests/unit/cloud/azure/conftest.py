"""A fake Azure, empty at each test's start, drift-free at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.azure import FakeAzure


@pytest.fixture
def azure(fake_azure: FakeAzure) -> Iterator[FakeAzure]:
    fake_azure.reset()
    yield fake_azure
    assert fake_azure.ask("drifts") == []
