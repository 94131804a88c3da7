"""Many launches, evictions and ends under faults: nothing is left, all is accounted."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
from tests.fakes.azure import KIND, ZONE, FakeAzure
from tests.unit.cloud.renting import launch_request, offer_in

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import Vm

T = TypeVar("T")

FAULTS = (
    {"kind": "drop"},
    {"kind": "lost"},
    {"kind": "error", "code": "TooManyRequests", "status": 429},
    {"kind": "error", "code": "InternalServerError", "status": 500},
    {"kind": "error", "code": "ZonalAllocationFailed", "status": 409},
)


def again_and_again(ask: Callable[[], T]) -> T:
    """Ask until there is an answer, as the manager does."""
    while True:
        with contextlib.suppress(CloudError):
            return ask()


@pytest.mark.rotated
@pytest.mark.parametrize("late", [False, True])
def test_after_many_faults_the_cloud_is_empty_and_the_bill_agrees(
    azure: FakeAzure, late: bool
) -> None:
    chance = random.Random(int(late))
    azure.ask("moods", late=late)
    azure.ask("stock", zone=ZONE, instance_type=KIND, count=6)
    provider = azure.provider()
    offer = offer_in(provider)
    launched: dict[str, Vm] = {}
    for number in range(12):
        azure.ask("fail", operation="*", times=chance.randint(0, 2), **chance.choice(FAULTS))
        if chance.random() < 0.3:
            provider = azure.provider()  # the manager died
        asked = launch_request(offer, chance.randint(1, 3), f"intent-{number}")
        got = again_and_again(partial(provider.launch, asked)).vms
        assert launched.keys().isdisjoint(vm.vm_id for vm in got)
        launched |= {vm.vm_id: vm for vm in got}
        for vm in chance.sample(got, chance.randint(0, len(got))):
            azure.ask("evict", name=vm.vm_id.split(".")[1])
        for vm_id in chance.sample(sorted(launched), chance.randint(0, len(launched))):
            with contextlib.suppress(CloudError):
                provider.terminate([vm_id])
        if number % 4 == 3:
            with contextlib.suppress(CloudError):
                provider.terminate(launched)
    again_and_again(lambda: provider.terminate(launched))
    azure.ask("pass_time", seconds=1.0)  # VMs take a moment to end
    bill = [row for row in azure.ask("bill") if row["ended_at"] != row["launched_at"]]
    by_name = {f"azure.{row['name']}.{row['group']}": row for row in bill}
    assert len(by_name) == len(bill)
    for vm_id, row in by_name.items():
        # One may have been made and lost again before its launch had an answer.
        vm = launched[vm_id]
        assert vm.intent == row["tags"]["spottrain-intent"]
        assert row["ended_at"] is not None
        assert vm.launched_at_s == pytest.approx(row["launched_at"], abs=0.05)
    again_and_again(lambda: provider.release("job"))
    assert azure.ask("left") == []
