"""What time it is by clouds that refuse a machine whose clock is wrong."""

from __future__ import annotations

import time

import pytest
from tests.fakes import aws, azure, gcp

from spottrain.cloud.http import time_at
from spottrain.cloud.port.errors import CloudError

Fake = aws.FakeAws | azure.FakeAzure | gcp.FakeGcp
HOURS_S = 8 * 3600.0


@pytest.mark.rotated
@pytest.mark.parametrize("ahead_s", [HOURS_S, -HOURS_S])
def test_a_cloud_tells_its_own_time_also_where_it_refuses_credentials(
    fake: Fake, ahead_s: float
) -> None:
    if isinstance(fake, aws.FakeAws):
        fake.ask("pass_time", seconds=ahead_s)
    else:
        fake.ask("skew", seconds=ahead_s)
    provider = fake.provider()
    before_s = int(time.time())
    told_s = provider.time_s()
    assert told_s is not None
    assert before_s <= told_s - ahead_s <= time.time()
    if isinstance(fake, aws.FakeAws):
        fake.ask("pass_time", seconds=-ahead_s)


def test_a_cloud_that_is_away_tells_no_time() -> None:
    with pytest.raises(CloudError, match="what time it is"):
        time_at("http://127.0.0.1:9")
