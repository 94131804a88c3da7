"""GCP under contract: our own Compute Engine, by way of Google's SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.account import Account, FakeWire
from tests.fakes.gcp import FakeGcp


def gcp(request: pytest.FixtureRequest) -> Iterator[Account]:
    fake: FakeGcp = request.getfixturevalue("fake_gcp")
    fake.reset()
    yield Account(
        fake.provider,
        "job",
        3,
        wire=FakeWire(fake.ask),
        left=lambda: list(fake.ask("left")),
    )
    assert fake.ask("drifts") == []
