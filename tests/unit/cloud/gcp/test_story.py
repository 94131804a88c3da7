"""Many launches, preemptions and ends under faults: nothing is left, all is billed."""

from __future__ import annotations

import contextlib
import random

import pytest
from tests.fakes.gcp import KIND, ZONE, FakeGcp
from tests.unit.cloud.renting import launch_request, offer_in

from spottrain.cloud.gcp.provider import GcpProvider
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import LaunchRequest, Vm, VmState

FAULTS = (
    {"kind": "drop"},
    {"kind": "lost"},
    {"kind": "error", "code": "rateLimitExceeded", "status": 403},
    {"kind": "error", "code": "internalError", "status": 500},
    {"kind": "error", "code": "resourcesExhausted", "status": 503},
)
ALIVE = (VmState.STARTING, VmState.RUNNING)


def again_and_again(provider: GcpProvider, asked: LaunchRequest) -> tuple[Vm, ...]:
    """Ask until there is an answer, as the manager does with its token."""
    while True:
        with contextlib.suppress(CloudError):
            return provider.launch(asked).vms


@pytest.mark.rotated
@pytest.mark.parametrize("seed", range(2))
def test_after_many_faults_the_cloud_is_empty_and_the_bill_agrees(gcp: FakeGcp, seed: int) -> None:
    chance = random.Random(seed)
    gcp.ask("stock", zone=ZONE, kind=KIND, count=6)
    provider = gcp.provider()
    offer = offer_in(provider)
    launched: dict[str, str] = {}
    for number in range(20):
        gcp.ask("fail", operation="*", times=chance.randint(0, 2), **chance.choice(FAULTS))
        asked = launch_request(offer, chance.randint(1, 3), f"intent-{number}")
        got = again_and_again(provider, asked)
        assert launched.keys().isdisjoint(vm.vm_id for vm in got)
        launched |= {vm.vm_id: vm.intent for vm in got}
        for vm in chance.sample(got, chance.randint(0, len(got))):
            gcp.ask("preempt", zone=ZONE, name=vm.vm_id.split(".")[1])
        for vm_id in chance.sample(sorted(launched), chance.randint(0, len(launched))):
            with contextlib.suppress(CloudError):
                provider.terminate([vm_id])
        if number % 4 == 3:
            with contextlib.suppress(CloudError):
                provider.terminate(launched)
            gcp.ask("finish_all")
    provider.terminate(launched)
    gcp.ask("finish_all")
    listed = {vm.vm_id: vm for vm in provider.list_vms("job")}
    assert {vm_id: vm.intent for vm_id, vm in listed.items()} == launched
    assert not any(vm.state in ALIVE for vm in listed.values())
    for row in gcp.ask("bill"):
        vm = listed.pop(f"gcp.{row['name']}.{row['zone']}")
        assert (vm.launched_at_s, vm.ended_at_s) == (
            row["launched_at"],
            row["ended_at"],
        )
    assert listed == {}
    provider.release("job")
    assert gcp.ask("left") == []
