"""The fake AWS that commands are tried against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.aws import FakeAws


@pytest.fixture
def aws(fake_aws: FakeAws) -> Iterator[FakeAws]:
    fake_aws.reset()
    yield fake_aws
    assert fake_aws.ask("drifts") == []
