"""The VM of a manager, rented by the real adapters: small, no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.builders import a_launch
from tests.fakes import aws as aws_fake
from tests.fakes import azure as azure_fake
from tests.fakes.gcp import running as running_gcp

from spottrain.cloud.gcp.requests import GcpPlacement, bulk_insert
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import LaunchRequest, Offer
from spottrain.varuna_manager.config.manager_vm import DEFAULTS, ManagerMachine

FAKES: dict[str, Any] = {"aws": aws_fake, "azure": azure_fake}


def stock(cloud: str, fake: Any, machine: ManagerMachine) -> None:
    """Let a cloud have one."""
    kind, region = machine.instance_type, FAKES[cloud].REGION
    if cloud == "aws":
        fake.ask("stock", zone=FAKES[cloud].ZONE, instance_type=kind, count=1)
        return
    size = {"vcpus": 2, "family": "standardBSFamily"}
    fake.ask("offer", region=region, name=kind, usd=[0.01, 0.04], **size)
    fake.ask("stock", zone=FAKES[cloud].ZONE, instance_type=kind, count=1)


def wish_for(offer: Offer, machine: ManagerMachine) -> LaunchRequest:
    small = replace(
        offer,
        instance_type=machine.instance_type,
        spot=False,
        usd_per_hour=machine.usd_per_hour,
        gpus=0,
        gpu_memory_bytes=0,
        family="",
    )
    return a_launch(small, token="token-0", job="far", intent=tags.MANAGER, lease_s=1800.0)


@pytest.mark.rotated
@pytest.mark.parametrize("cloud", FAKES)
def test_a_manager_vm_is_rented_once_tagged_and_priced(cloud: str) -> None:
    machine = DEFAULTS[cloud]
    with FAKES[cloud].running() as fake:
        fake.reset()
        stock(cloud, fake, machine)
        request = wish_for(next(iter(fake.provider().offers())), machine)
        provider = fake.provider(instance_types=(), disk_gib=30)
        (vm,) = provider.launch(request).vms
        (again,) = provider.launch(request).vms
        assert again.vm_id == vm.vm_id
        (listed,) = fake.provider().list_vms("far")
        assert (listed.intent, listed.offer.spot) == (tags.MANAGER, False)
        assert listed.offer.instance_type == machine.instance_type
        assert listed.offer.usd_per_hour == machine.usd_per_hour
        provider.terminate([vm.vm_id])
        provider.release("far")
        assert fake.ask("left") == []
        assert fake.ask("drifts") == []


@pytest.mark.rotated
def test_a_manager_vm_on_gcp_has_no_accelerators() -> None:
    machine = DEFAULTS["gcp"]
    settings = GcpSettings(
        project="p", instance_types=(), service_account="m@p", image=machine.image
    )
    with running_gcp() as fake:
        fake.reset()
        offer = next(iter(fake.provider().offers()))
    place = GcpPlacement(network="n", subnetwork="s", network_tags=())
    asked = bulk_insert(wish_for(offer, machine), place, settings, 0)
    told = asked["bulk_insert_instance_resource_resource"]["instance_properties"]
    assert told["machine_type"] == machine.instance_type
    assert "guest_accelerators" not in told
    assert told["scheduling"]["provisioning_model"] == "STANDARD"
    (account,) = told["service_accounts"]
    assert account["email"] == "m@p"
    marks = {item["key"]: item["value"] for item in told["metadata"]["items"]}
    assert marks[tags.INTENT] == tags.MANAGER
    assert float(marks[tags.PRICE]) == machine.usd_per_hour
