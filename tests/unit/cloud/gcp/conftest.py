"""A fake GCP, empty at each test's start, drift-free at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.gcp import FakeGcp


@pytest.fixture
def gcp(fake_gcp: FakeGcp) -> Iterator[FakeGcp]:
    fake_gcp.reset()
    yield fake_gcp
    assert fake_gcp.ask("drifts") == []
