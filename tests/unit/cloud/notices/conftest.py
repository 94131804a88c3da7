"""A fake metadata service of the module's cloud, and VMs that ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.metadata import FakeMetadata, running
from tests.unit.cloud.metadata_vms import Vms


@pytest.fixture(scope="module")
def fake(request: pytest.FixtureRequest) -> Iterator[FakeMetadata]:
    with running(request.module.CLOUD) as service:
        yield service


@pytest.fixture
def vms(request: pytest.FixtureRequest, fake: FakeMetadata, monkeypatch: pytest.MonkeyPatch) -> Vms:
    fake.ask("reset")
    return Vms(request.module.CLOUD, fake, monkeypatch)
