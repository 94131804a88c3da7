"""Two people with one account and one name for their jobs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builders import a_launch
from tests.fakes import aws, azure, gcp
from tests.unit.cloud.renting import offer_in, settle

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.facts import without_attached
from spottrain.cloud.port.provider import Vm

Fake = aws.FakeAws | azure.FakeAzure | gcp.FakeGcp
ANN = {"uid": "a" * 32, "owner": "ann@example.org"}
BEN = {"uid": "b" * 32, "owner": "ben@example.org"}


def rent(provider: Any, intent: str = "intent-0") -> Vm:
    """Rent as managers do: intents are called the same for everybody."""
    request = a_launch(
        offer_in(provider),
        token=f"{provider._settings.uid}-{intent}",
        job="quickstart",
        intent=intent,
    )
    vms: tuple[Vm, ...] = provider.launch(request).vms
    return vms[0]


def alive(provider: Any) -> dict[str, str]:
    """Return the living VMs of the job and whose they are."""
    vms = provider.list_vms("quickstart")
    return {vm.vm_id: vm.owner for vm in vms if vm.state.is_alive}


@pytest.mark.rotated
def test_neither_sees_or_ends_what_the_other_has(fake: Fake) -> None:
    ann, ben = fake.provider(**ANN), fake.provider(**BEN)
    hers, his = rent(ann), rent(ben)
    assert hers.vm_id != his.vm_id
    assert alive(ann) == {hers.vm_id: ANN["owner"]}
    assert alive(ben) == {his.vm_id: BEN["owner"]}
    everybody = {vm.vm_id: (vm.uid, vm.owner) for vm in ann.list_all()}
    assert everybody == {
        hers.vm_id: tuple(ANN.values()),
        his.vm_id: tuple(BEN.values()),
    }
    ann.terminate(list(alive(ann)))
    settle(fake)
    ann.release("quickstart")
    assert alive(fake.provider(**BEN)) == {his.vm_id: BEN["owner"]}
    more = rent(fake.provider(**BEN), "intent-1")  # what his VMs share is there
    with pytest.raises(CloudError, match="terminate them first"):
        ben.release("quickstart")
    ben.terminate([his.vm_id, more.vm_id])
    settle(fake)
    ben.release("quickstart")
    assert fake.ask("left") == []


def test_a_vm_without_an_id_is_no_jobs_that_has_one(fake: Fake) -> None:
    other = rent(fake.provider())
    ann = fake.provider(**ANN)
    assert alive(ann) == {}
    hers = rent(ann, "intent-1")
    ann.terminate(list(alive(ann)))
    settle(fake)
    assert hers.vm_id not in alive(fake.provider(**ANN))
    assert list(alive(fake.provider())) == [other.vm_id]


def test_an_offer_and_its_vm_cost_what_machine_disk_and_address_do(fake: Fake) -> None:
    bare = {(o.zone, o.spot): o.usd_per_hour for o in fake.provider().offers()}
    whole = fake.provider(attached_usd_per_hour=0.03)
    for offer in whole.offers():
        machine = bare[offer.zone, offer.spot]
        assert offer.usd_per_hour == pytest.approx(machine + 0.03)
        assert offer.attached_usd_per_hour == 0.03
        assert without_attached(offer).usd_per_hour == pytest.approx(machine)
    vm = rent(whole)
    (listed,) = fake.provider().list_vms("quickstart")
    for each in (vm, listed):
        assert each.offer.attached_usd_per_hour == 0.03
        assert each.offer.usd_per_hour == pytest.approx(bare[vm.offer.zone, True] + 0.03)


@pytest.mark.rotated
def test_tags_of_the_user_and_the_principal_are_on_what_is_rented(fake: Fake) -> None:
    mine = {"cost-centre": "4711"}
    provider = fake.provider(uid=ANN["uid"], tags=mine)
    vm = rent(provider)
    who = provider.principal()
    assert vm.owner == who
    expected = {
        "FakeAws": "arn:aws:sts::123456789012:user/moto",
        "FakeAzure": "33333333-0000-0000-0000-000000000000@22222222-0000-0000-0000-000000000000",
        "FakeGcp": f"us@{gcp.PROJECT}.iam.gserviceaccount.com",
    }
    assert who == expected[type(fake).__name__]
