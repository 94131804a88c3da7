"""Request builders; no network."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_launch
from tests.fakes.azure_model import check
from tests.fakes.azure_rules import check_body

from spottrain.cloud.azure import requests
from spottrain.cloud.azure.requests import AzurePlacement
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.port import lease, tags
from spottrain.cloud.port.facts import make_offer
from spottrain.cloud.port.provider import LaunchRequest, cloud_of
from spottrain.cloud.ssh_keys import new_host_key
from spottrain.pricing.prices.catalogue import catalogue

KIND = "Standard_NC4as_T4_v3"
SETTINGS = AzureSettings(instance_types=(KIND,), public_key="ssh-ed25519 AAAA", owner="us")
PLACE = AzurePlacement("/net/subnets/vms", "/identity", accelerated=True)
KEY = ("private half", "ssh-ed25519 AAAA")
FACTS = catalogue()
UID = "0123456789abcdef" * 2


def launch_request(
    spot: bool = True, token: str = "t", usd: float = 0.4, zone: str = "eastus-2"
) -> LaunchRequest:
    offer = make_offer(
        FACTS,
        cloud="azure",
        family="",
        region="eastus",
        zone=zone,
        instance_type=KIND,
        spot=spot,
        usd_per_hour=usd,
        observed_at_s=1.0,
    )
    return a_launch(offer, 3, token=token, job="j", intent="intent-1", lease_s=600.5)


def vm(
    asked: LaunchRequest | None = None,
    placement: AzurePlacement = PLACE,
    settings: AzureSettings = SETTINGS,
) -> dict[str, Any]:
    return requests.virtual_machine(asked or launch_request(), "vm-0", placement, KEY, settings)


def boot_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return what cloud-init is told."""
    text = base64.b64decode(body["properties"]["osProfile"]["customData"]).decode()
    head, _, rest = text.partition("\n")
    assert head == "#cloud-config"
    told: dict[str, Any] = json.loads(rest)
    return told


@pytest.mark.parametrize("spot", [True, False])
@pytest.mark.parametrize("zone", ["eastus-2", "eastus"])
def test_a_launch_fits_the_sdks_model_and_our_rules(spot: bool, zone: str) -> None:
    body = vm(launch_request(spot, zone=zone))
    check("compute.VirtualMachine", body, request=True)
    check_body("PUT virtualMachines", body)
    assert body.get("zones") == (["2"] if zone == "eastus-2" else None)
    assert body["properties"]["priority"] == ("Spot" if spot else "Regular")
    assert ("evictionPolicy" in body["properties"]) is spot


def test_resources_of_a_vm_are_deleted_with_it() -> None:
    told = vm()["properties"]
    assert told["evictionPolicy"] == "Delete"
    assert told["storageProfile"]["osDisk"]["deleteOption"] == "Delete"
    (card,) = told["networkProfile"]["networkInterfaceConfigurations"]
    assert card["properties"]["deleteOption"] == "Delete"
    (address,) = card["properties"]["ipConfigurations"]
    public = address["properties"]["publicIPAddressConfiguration"]
    assert public["properties"]["deleteOption"] == "Delete"


def test_everything_rented_is_tagged() -> None:
    body = vm()
    (card,) = body["properties"]["networkProfile"]["networkInterfaceConfigurations"]
    for marks in (body["tags"], card["tags"]):
        assert (marks[tags.JOB], marks[tags.INTENT]) == ("j", "intent-1")
        assert marks[tags.EXPIRES] == "601"


@given(st.floats(min_value=1e-4, max_value=1000))
def test_the_price_comes_back_from_the_tags_as_it_was(usd: float) -> None:
    body = vm(launch_request(usd=usd))
    body |= {"id": "/subscriptions/s/resourceGroups/G/providers/x/y/vm-0"}
    body["properties"] |= {"timeCreated": "2026-11-20T07:49:24.5+00:00"}
    seen = requests.vm_of(body, FACTS)
    assert seen.offer.usd_per_hour == usd
    assert seen.offer.zone == "eastus-2"
    assert (seen.vm_id, seen.launched_at_s) == ("azure.vm-0.g", 1795160964.5)


@given(st.text(min_size=1, max_size=200), st.integers(1, 64))
def test_names_follow_from_the_token_and_fit_azure(token: str, count: int) -> None:
    asked = a_launch(launch_request().offer, count, token=token, job="j", intent="i", lease_s=1)
    names = requests.vm_names(asked, SETTINGS)
    assert names == requests.vm_names(asked, SETTINGS)
    assert len(set(names)) == count
    assert all(name.startswith(requests.prefix("j", SETTINGS)) for name in names)
    assert all(len(name) <= 64 and "." not in name for name in names)
    vm_id = requests.vm_id_of("Some.Group", names[0])
    assert requests.split_vm_id(vm_id) == ("some.group", names[0])
    assert cloud_of(vm_id) == "azure"
    for other in ("vm-of-nobody", vm_id.replace("azure", "aws", 1)):
        assert requests.split_vm_id(other)[0] == ""


def test_the_longest_job_name_fits_a_group() -> None:
    assert len(requests.group_of("j" * 63, replace(SETTINGS, uid=UID))) <= 90
    named = AzureSettings(instance_types=(), resource_group="Theirs")
    assert requests.group_of("j", named) == "theirs"


def test_an_id_names_its_group_however_it_is_written() -> None:
    for word in ("resourceGroups", "RESOURCEGROUPS", "resourcegroups"):
        told = f"/subscriptions/s/{word}/My.Group/providers/a/b/vm-0"
        assert requests.split_resource_id(told) == ("my.group", "vm-0")
    assert requests.split_resource_id("vm-0") == ("", "vm-0")


def test_a_vm_boots_with_one_host_key_and_a_lease() -> None:
    told = boot_of(vm())
    assert told["ssh_keys"] == {"ed25519_private": KEY[0], "ed25519_public": KEY[1]}
    assert told["ssh_deletekeys"] is True
    ((shell, option, script),) = told["runcmd"]
    assert (shell, option) == ("/bin/sh", "-c")
    end = requests.delete_itself("https://management.azure.com")
    assert script == lease.boot_script(600.5, end)


def test_without_an_identity_a_vm_only_shuts_down() -> None:
    body = vm(placement=AzurePlacement("/net", "", accelerated=False))
    assert "identity" not in body
    assert boot_of(body)["runcmd"][0][2] == lease.boot_script(600.5)


def test_a_bid_is_sent_as_it_is_and_none_means_the_on_demand_price() -> None:
    assert vm()["properties"]["billingProfile"] == {"maxPrice": -1}
    bid = AzureSettings(instance_types=(), max_usd_per_hour=0.7)
    assert vm(settings=bid)["properties"]["billingProfile"] == {"maxPrice": 0.7}


def test_images_are_named_in_either_way() -> None:
    assert requests.image("/sub/images/mine") == {"id": "/sub/images/mine"}
    assert requests.image("a:b:c:latest")["sku"] == "c"


def test_without_public_addresses_none_is_requested() -> None:
    hidden = AzureSettings(instance_types=(), public_addresses=False)
    (card,) = vm(settings=hidden)["properties"]["networkProfile"]["networkInterfaceConfigurations"]
    (address,) = card["properties"]["ipConfigurations"]
    assert "publicIPAddressConfiguration" not in address["properties"]


def test_ssh_is_allowed_from_the_given_networks_only() -> None:
    assert requests.rules("j", "eastus", SETTINGS)["properties"]["securityRules"] == []
    some = AzureSettings(instance_types=(), ssh_from=("192.0.2.0/24",), ssh_port=2222)
    (rule,) = requests.rules("j", "eastus", some)["properties"]["securityRules"]
    assert rule["properties"]["sourceAddressPrefixes"] == ["192.0.2.0/24"]
    assert rule["properties"]["destinationPortRange"] == "2222"


def test_a_grant_is_the_same_each_time_and_holds_in_one_group_only() -> None:
    scope, body = requests.grant("s", "g", "principal")
    assert requests.grant("s", "g", "principal") == (scope, body)
    assert scope.startswith("/subscriptions/s/resourceGroups/g/providers/")
    assert requests.grant("s", "g", "another")[0] != scope


def test_host_keys_are_new_each_time_and_belong_together() -> None:
    private, public = new_host_key()
    assert new_host_key() != (private, public)
    key = serialization.load_ssh_private_key(private.encode(), None)
    made = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    assert made.decode() == public
