"""A fake AWS, empty at each test's start, drift-free at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.aws import FakeAws


@pytest.fixture
def aws(fake_aws: FakeAws) -> Iterator[FakeAws]:
    fake_aws.reset()
    yield fake_aws
    assert fake_aws.ask("drifts") == []
