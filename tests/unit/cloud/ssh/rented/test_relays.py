from __future__ import annotations

import pytest

from spottrain.cloud.ssh.rented.relays import OUTAGE_S, Region, is_direct


def test_a_lost_relay_explains_silence_for_a_limited_time() -> None:
    region = Region()
    assert region.may_cause_silence(100.0)
    assert region.may_cause_silence(100.0 + OUTAGE_S - 1)
    assert not region.may_cause_silence(100.0 + OUTAGE_S)
    assert not region.may_cause_silence(100.0 + 10 * OUTAGE_S)


@pytest.mark.parametrize(
    ("address", "direct"),
    [("127.0.0.1", False), ("localhost", False), ("10.0.0.7", True)],
)
def test_only_a_manager_on_loopback_needs_relays(address: str, direct: bool) -> None:
    assert is_direct((address, 443)) == direct
