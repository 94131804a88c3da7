"""AWS's rented VMs under contract, with agents brought to them over SSH."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.account import Account, FakeWire
from tests.fakes.aws import FakeAws
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import aws_vms


def aws_over_ssh(request: pytest.FixtureRequest) -> Iterator[Account]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    fake: FakeAws = request.getfixturevalue("fake_aws")
    folder: Path = request.getfixturevalue("tmp_path")
    with aws_vms(folder, fake) as cloud:
        yield Account(
            cloud.provider,
            "job",
            3,
            wire=FakeWire(fake.ask),
            left=lambda: [*fake.ask("left"), *fake.ask("switched_on")],
        )
        assert fake.ask("drifts") == []
