"""AWS under contract: moto and its layer, by way of boto3."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.account import Account, FakeWire
from tests.fakes.aws import FakeAws


def aws(request: pytest.FixtureRequest) -> Iterator[Account]:
    fake: FakeAws = request.getfixturevalue("fake_aws")
    fake.reset()
    yield Account(
        fake.provider,
        "job",
        3,
        wire=FakeWire(fake.ask),
        left=lambda: list(fake.ask("left")),
    )
    assert fake.ask("drifts") == []
