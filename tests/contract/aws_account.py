"""AWS under contract: moto and its layer, by way of boto3."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.account import Account
from tests.fakes.aws import FakeAws


class AwsWire:
    """The line to the fake."""

    def __init__(self, fake: FakeAws) -> None:
        self._fake = fake

    def cut(self, after: int, *, carried_out: bool) -> None:
        self._fake.ask("cut", after=after, carried_out=carried_out)

    def heal(self) -> int:
        return int(self._fake.ask("heal"))


def aws(request: pytest.FixtureRequest) -> Iterator[Account]:
    fake: FakeAws = request.getfixturevalue("fake_aws")
    fake.reset()
    yield Account(
        fake.provider,
        "job",
        3,
        wire=AwsWire(fake),
        left=lambda: list(fake.ask("left")),
    )
    assert fake.ask("drifts") == []
