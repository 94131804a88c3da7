"""The fake AWS that commands are tried against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.aws import FakeAws


@pytest.fixture
def aws(fake_aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "state"))
    fake_aws.reset()
    yield fake_aws
    assert fake_aws.ask("drifts") == []
