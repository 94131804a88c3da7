"""Azure under contract: our own Resource Manager, by way of Azure's SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.account import Account, FakeWire
from tests.fakes.azure import FakeAzure


def azure(request: pytest.FixtureRequest) -> Iterator[Account]:
    fake: FakeAzure = request.getfixturevalue("fake_azure")
    fake.reset()
    yield Account(
        fake.provider,
        "job",
        3,
        wire=FakeWire(fake.ask),
        left=lambda: list(fake.ask("left")),
    )
    assert fake.ask("drifts") == []
