"""Many launches, interruptions and ends under faults: nothing is left, all is billed."""

from __future__ import annotations

import contextlib
import random

import pytest
from tests.fakes.aws import KIND, ZONE, FakeAws
from tests.unit.cloud.renting import launch_request, offer_in

from spottrain.cloud.aws.provider import AwsProvider
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import LaunchRequest, Vm, VmState

FAULTS = (
    {"kind": "drop"},
    {"kind": "lost"},
    {"kind": "error", "code": "RequestLimitExceeded", "status": 503},
    {"kind": "error", "code": "InternalError", "status": 500},
    {"kind": "error", "code": "InsufficientInstanceCapacity", "status": 500},
)
ALIVE = (VmState.STARTING, VmState.RUNNING)


def again_and_again(provider: AwsProvider, asked: LaunchRequest) -> tuple[Vm, ...]:
    """Ask until there is an answer, as the manager does with its token."""
    while True:
        with contextlib.suppress(CloudError):
            return provider.launch(asked).vms


@pytest.mark.rotated
@pytest.mark.parametrize("seed", range(1))
def test_after_many_faults_the_cloud_is_empty_and_the_bill_agrees(aws: FakeAws, seed: int) -> None:
    chance = random.Random(seed)
    aws.ask("stock", zone=ZONE, instance_type=KIND, count=6)
    provider = aws.provider()
    offer = offer_in(provider)
    launched: dict[str, str] = {}
    for number in range(20):
        aws.ask("fail", operation="*", times=chance.randint(0, 2), **chance.choice(FAULTS))
        if chance.random() < 0.3:
            provider = aws.provider()  # the manager died
        asked = launch_request(offer, chance.randint(1, 3), f"intent-{number}")
        got = again_and_again(provider, asked)
        assert launched.keys().isdisjoint(vm.vm_id for vm in got)
        launched |= {vm.vm_id: vm.intent for vm in got}
        for vm in chance.sample(got, chance.randint(0, len(got))):
            _, instance_id, region = vm.vm_id.split(".")
            aws.ask("interrupt", region=region, instance_id=instance_id)
        for vm_id in chance.sample(sorted(launched), chance.randint(0, len(launched))):
            with contextlib.suppress(CloudError):
                provider.terminate([vm_id])
        if number % 4 == 3:
            with contextlib.suppress(CloudError):
                provider.terminate(launched)
    provider.terminate(launched)
    listed = {vm.vm_id: vm for vm in provider.list_vms("job")}
    assert {vm_id: vm.intent for vm_id, vm in listed.items()} == launched
    assert not any(vm.state in ALIVE for vm in listed.values())
    for row in aws.ask("bill"):
        vm = listed.pop(f"aws.{row['instance_id']}.us-east-1")
        assert vm.ended_at_s is not None
        assert abs(vm.launched_at_s - row["launched_at"]) < 1
        assert vm.ended_at_s == row["ended_at"]
    assert listed == {}
    provider.release("job")
    assert aws.ask("left") == []
