"""Two clouds as one under contract: GCP's fake and AWS's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.account import Account, FakeWire
from tests.fakes.aws import FakeAws
from tests.fakes.gcp import FakeGcp

from spottrain.cloud.multi import MultiCloudProvider, open_clouds


def multi(request: pytest.FixtureRequest) -> Iterator[Account]:
    gcp: FakeGcp = request.getfixturevalue("fake_gcp")
    aws: FakeAws = request.getfixturevalue("fake_aws")
    for fake in (gcp, aws):
        fake.reset()

    def connect() -> MultiCloudProvider:
        return open_clouds({"gcp": gcp.provider, "aws": aws.provider})

    yield Account(
        connect,
        "job",
        3,
        wire=FakeWire(gcp.ask),
        left=lambda: [*gcp.ask("left"), *aws.ask("left")],
        clouds=frozenset({"gcp", "aws"}),
    )
    assert [*gcp.ask("drifts"), *aws.ask("drifts")] == []
