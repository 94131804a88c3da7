"""Many launches, interruptions and ends under faults: nothing is left, all is billed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest
from tests.fakes import aws, azure, gcp
from tests.unit.cloud.renting import launch_request, offer_in, settle

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import Vm

T = TypeVar("T")
Fake = aws.FakeAws | azure.FakeAzure | gcp.FakeGcp


@dataclass(frozen=True)
class Words:
    """What a cloud calls what happens in the story."""

    stock: dict[str, str]
    errors: dict[str, int]
    """Statuses of its errors, by their codes."""
    interrupt: Callable[[Any, str, str], None]
    """Interrupts the VM of a fake whose id has these two parts."""
    vm_id: Callable[[dict[str, str]], str]
    """The id of a VM of the bill."""
    keeps_intents: bool = True
    """Whether another manager is told the intents of VMs that have ended."""


WORDS: dict[type[Fake], Words] = {
    aws.FakeAws: Words(
        {"zone": aws.ZONE, "instance_type": aws.KIND},
        {"RequestLimitExceeded": 503, "InternalError": 500, "InsufficientInstanceCapacity": 500},
        lambda fake, name, region: fake.ask("interrupt", region=region, instance_id=name),
        lambda row: f"aws.{row['instance_id']}.{aws.REGION}",
    ),
    azure.FakeAzure: Words(
        {"zone": azure.ZONE, "instance_type": azure.KIND},
        {"TooManyRequests": 429, "InternalServerError": 500, "ZonalAllocationFailed": 409},
        lambda fake, name, _: fake.ask("evict", name=name),
        lambda row: f"azure.{row['name']}.{row['group']}",
    ),
    gcp.FakeGcp: Words(
        {"zone": gcp.ZONE, "kind": gcp.KIND},
        {"rateLimitExceeded": 403, "internalError": 500, "resourcesExhausted": 503},
        lambda fake, name, zone: fake.ask("preempt", zone=zone, name=name),
        lambda row: f"gcp.{row['name']}.{row['zone']}",
        keeps_intents=False,
    ),
}


def again_and_again(ask: Callable[[], T]) -> T:
    """Ask until there is an answer, as the manager does."""
    while True:
        with contextlib.suppress(CloudError):
            return ask()


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("fake", "seed"),
    [("aws", 0), ("azure", 0), ("azure", 1), ("gcp", 0), ("gcp", 1)],
    indirect=["fake"],
)
def test_after_many_faults_the_cloud_is_empty_and_the_bill_agrees(fake: Fake, seed: int) -> None:
    chance, words = random.Random(seed), WORDS[type(fake)]
    errors = [{"kind": "error", "code": c, "status": s} for c, s in words.errors.items()]
    faults: list[dict[str, Any]] = [{"kind": "drop"}, {"kind": "lost"}, *errors]
    is_azure = isinstance(fake, azure.FakeAzure)
    if is_azure:
        fake.ask("moods", late=bool(seed))
    fake.ask("stock", count=6, **words.stock)
    provider = fake.provider()
    offer = offer_in(provider)
    launched: dict[str, Vm] = {}
    for number in range(12 if is_azure else 20):
        fake.ask("fail", operation="*", times=chance.randint(0, 2), **chance.choice(faults))
        if words.keeps_intents and chance.random() < 0.3:
            provider = fake.provider()  # the manager died
        asked = launch_request(offer, chance.randint(1, 3), f"intent-{number}")
        got = again_and_again(partial(provider.launch, asked)).vms
        assert launched.keys().isdisjoint(vm.vm_id for vm in got)
        launched |= {vm.vm_id: vm for vm in got}
        for vm in chance.sample(got, chance.randint(0, len(got))):
            words.interrupt(fake, *vm.vm_id.split(".")[1:])
        for vm_id in chance.sample(sorted(launched), chance.randint(0, len(launched))):
            with contextlib.suppress(CloudError):
                provider.terminate([vm_id])
        if number % 4 == 3:
            with contextlib.suppress(CloudError):
                provider.terminate(launched)
            if not is_azure:
                settle(fake)
    again_and_again(lambda: provider.terminate(launched))
    settle(fake)
    # Azure may have made a VM and lost it again before its launch had an answer.
    bill = [r for r in fake.ask("bill") if not is_azure or r["ended_at"] != r["launched_at"]]
    billed = {words.vm_id(row): row for row in bill}
    assert len(billed) == len(bill)
    for vm_id, row in billed.items():
        assert launched[vm_id].launched_at_s == pytest.approx(row["launched_at"], abs=1)
        assert row["ended_at"] is not None
    if not is_azure:  # which lists no VM that has ended
        listed = {vm.vm_id: vm for vm in provider.list_vms("job")}
        assert listed.keys() == billed.keys() == launched.keys()
        for vm_id, vm in listed.items():
            assert not vm.state.is_alive
            assert (vm.intent, vm.ended_at_s) == (launched[vm_id].intent, billed[vm_id]["ended_at"])
    again_and_again(lambda: provider.release("job"))
    assert fake.ask("left") == []
