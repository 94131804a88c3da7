"""Clouds throttle by the rates that they document: a job stays within them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.aws import KIND, ZONE, FakeAws
from tests.fakes.throttling import AWS, per_minute, token_bucket
from tests.unit.cloud.renting import rent

from spottrain.cloud.port.errors import ThrottledError

POLLS = 90
"""Of a minute and a half, one a second."""
VMS = 4


def launch(provider: Any, intent: int) -> Any:
    return rent(provider, VMS, f"intent-{intent}")


@pytest.mark.rotated
def test_a_job_that_is_polled_each_second_is_not_throttled(fake: Any) -> None:
    """Nor is a launch in the middle of it, or the return of its VMs."""
    provider = fake.provider()
    fake.ask("throttle_calls")
    vms = launch(provider, 1)
    for _ in range(POLLS):
        fake.ask("pass_time", seconds=1.0)
        provider.list_vms("job")
        provider.offers()
    provider.terminate([vm.vm_id for vm in vms])
    provider.quotas()
    provider.spot_pools(VMS)


@pytest.mark.rotated
def test_more_launches_than_ec2_takes_at_once_are_told_to_wait(aws: FakeAws) -> None:
    aws.ask("stock", zone=ZONE, instance_type=KIND, count=99)
    provider = aws.provider()
    launch(provider, 0)
    aws.ask("throttle_calls")
    aws.ask("stop_time")  # tokens come back with it
    for intent in range(1, 6):
        launch(provider, intent)
    with pytest.raises(ThrottledError, match="RequestLimitExceeded") as told:
        launch(provider, 6)
    aws.ask("pass_time", seconds=told.value.retry_after_s)
    launch(provider, 6)


@given(st.lists(st.floats(0.0, 3.0), max_size=200))
def test_a_bucket_gives_no_more_than_it_holds_and_is_refilled_with(
    pauses_s: list[float],
) -> None:
    passes = token_bucket(AWS)("RunInstances")
    now_s, taken = time.time(), 0
    began_s = now_s
    for pause_s in pauses_s:
        now_s += pause_s
        taken += passes(now_s)
        assert taken <= 5 + 2 * (now_s - began_s) + 1e-3


def test_a_minute_begins_anew_on_the_clock() -> None:
    passes = per_minute(2)("get")
    assert [passes(at_s) for at_s in (118.0, 119.0, 119.5, 120.0)] == [
        True,
        True,
        False,
        True,
    ]
