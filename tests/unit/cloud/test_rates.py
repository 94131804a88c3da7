"""Clouds throttle by the rates that they document: a job stays within them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_launch
from tests.fakes import aws, azure, gcp
from tests.fakes.throttling import AWS, per_minute, token_bucket

from spottrain.cloud.port.errors import ThrottledError

POLLS = 90
"""Of a minute and a half, one a second."""
VMS = 4
CLOUDS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any]]] = {
    "aws": (aws.running, {}),
    "azure": (azure.running, {}),
    "gcp": (gcp.running, {}),
}


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> Iterator[Any]:
    running, _ = CLOUDS[request.param]
    with running() as fake:
        fake.reset()
        yield fake


def launch(provider: Any, intent: int) -> Any:
    offer = next(offer for offer in provider.offers() if offer.spot)
    return provider.launch(
        a_launch(offer, VMS, token=f"uid-{intent}", intent=f"intent-{intent}")
    ).vms


@pytest.mark.rotated
def test_a_job_that_is_polled_each_second_is_not_throttled(cloud: Any) -> None:
    """Nor is a launch in the middle of it, or the return of its VMs."""
    provider = cloud.provider()
    cloud.ask("throttle_calls")
    vms = launch(provider, 1)
    for _ in range(POLLS):
        cloud.ask("pass_time", seconds=1.0)
        provider.list_vms("job")
        provider.offers()
    provider.terminate([vm.vm_id for vm in vms])
    provider.quotas()
    provider.spot_pools(VMS)


@pytest.mark.rotated
def test_more_launches_than_ec2_takes_at_once_are_told_to_wait() -> None:
    with aws.running() as fake:
        fake.reset()
        fake.ask("stock", zone=aws.ZONE, instance_type=aws.KIND, count=99)
        provider = fake.provider()
        launch(provider, 0)
        fake.ask("throttle_calls")
        fake.ask("stop_time")  # tokens come back with it
        for intent in range(1, 6):
            launch(provider, intent)
        with pytest.raises(ThrottledError, match="RequestLimitExceeded") as told:
            launch(provider, 6)
        fake.ask("pass_time", seconds=told.value.retry_after_s)
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
