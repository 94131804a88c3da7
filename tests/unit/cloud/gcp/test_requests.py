"""Request builders; no network, no SDK."""

from __future__ import annotations

import re
import subprocess
import uuid
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_launch
from tests.fakes.gcp import ATTACHED, FACTS, KIND, PROJECT, PUBLIC_KEY, ZONE

from spottrain.cloud.gcp import answers, requests
from spottrain.cloud.gcp.requests import GcpPlacement
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.port import lease, tags
from spottrain.cloud.port.facts import make_offer
from spottrain.cloud.port.provider import LaunchRequest, cloud_of

SETTINGS = GcpSettings(
    project=PROJECT, instance_types=(KIND,), public_key=PUBLIC_KEY, max_run_s=3600.5
)
PLACE = GcpPlacement("projects/p/global/networks/n", "projects/p/regions/r/subnetworks/n", ())
LABEL = re.compile(r"[a-z0-9_-]{1,63}")
NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def launch_request(
    spot: bool = True,
    token: str = "t",
    usd: float = 1.1,
    kind: str = KIND,
    job: str = "job",
    intent: str = "intent-1",
) -> LaunchRequest:
    offer = make_offer(
        FACTS,
        cloud="gcp",
        region=requests.region_of(ZONE),
        family=answers.family_of(kind),
        zone=ZONE,
        instance_type=kind,
        spot=spot,
        usd_per_hour=usd,
        observed_at_s=1.0,
    )
    return a_launch(offer, 3, token=token, job=job, intent=intent, lease_s=600.5)


def test_a_repeated_launch_request_is_identical() -> None:
    first = requests.bulk_insert(launch_request(), PLACE, SETTINGS, 0)
    assert requests.bulk_insert(launch_request(), PLACE, SETTINGS, 0) == first
    other = requests.bulk_insert(launch_request(), PLACE, SETTINGS, 1)
    assert other["request_id"] != first["request_id"]


@given(st.text(min_size=1, max_size=200), st.integers(0, 99))
def test_every_token_makes_an_id_and_names_that_google_takes(token: str, attempt: int) -> None:
    assert uuid.UUID(requests.request_id(token, attempt))
    names = requests.vm_names(launch_request(token=token), "")
    assert len(set(names)) == 3
    assert all(NAME.fullmatch(name) for name in names)


@given(st.text(max_size=200), st.text(max_size=200))
def test_labels_are_valid_and_distinct_for_any_text(one: str, other: str) -> None:
    assert LABEL.fullmatch(requests.label(one))
    assert (requests.label(one) == requests.label(other)) == (one == other)
    assert NAME.fullmatch(requests.shared_name(one, ""))


@given(
    st.text(min_size=1, max_size=50),
    st.text(min_size=1, max_size=50),
    st.floats(min_value=1e-4, max_value=1000),
)
def test_job_and_intent_are_read_back_from_a_vm(job: str, intent: str, usd: float) -> None:
    asked = requests.bulk_insert(
        launch_request(usd=usd, kind=ATTACHED, job=job, intent=intent),
        PLACE,
        SETTINGS,
        0,
    )
    made = asked["bulk_insert_instance_resource_resource"]["instance_properties"]
    instance = {
        **made,
        "name": "spottrain-x-0",
        "zone": f"https://www.googleapis.com/compute/v1/projects/p/zones/{ZONE}",
        "creation_timestamp": "2026-11-20T12:00:00.000-07:00",
        "status": "RUNNING",
    }
    vm = answers.vm_of(instance, FACTS)
    assert (vm.job, vm.intent, vm.offer.usd_per_hour) == (job, intent, usd)
    assert (vm.offer.instance_type, vm.offer.zone) == (ATTACHED, ZONE)
    assert vm.launched_at_s == 1795201200.0


def test_a_launch_ends_in_deletion_and_leaves_no_disk() -> None:
    for spot, model in ((True, "SPOT"), (False, "STANDARD")):
        asked = requests.bulk_insert(launch_request(spot), PLACE, SETTINGS, 0)
        made = asked["bulk_insert_instance_resource_resource"]["instance_properties"]
        notice = {"preemption_notice_duration": {"seconds": 120}} if spot else {}
        assert made["scheduling"] == {
            **notice,
            "provisioning_model": model,
            "instance_termination_action": "DELETE",
            "max_run_duration": {"seconds": 3601},
            "on_host_maintenance": "TERMINATE",
            "automatic_restart": False,
        }
        (disk,) = made["disks"]
        assert disk["auto_delete"] is True
        for labels in (made["labels"], disk["initialize_params"]["labels"]):
            assert labels == {
                tags.JOB: "job",
                tags.INTENT: "intent-1",
                tags.EXPIRES: "601",
            }


def test_a_vm_with_a_service_account_deletes_itself() -> None:
    def script(settings: GcpSettings) -> str:
        asked = requests.bulk_insert(launch_request(), PLACE, settings, 0)
        made = asked["bulk_insert_instance_resource_resource"]["instance_properties"]
        items = made["metadata"]["items"]
        return str({i["key"]: i["value"] for i in items}["startup-script"])

    own = GcpSettings(
        project=PROJECT, instance_types=(), service_account="vms@p.iam", public_key="k"
    )
    assert script(SETTINGS) == lease.boot_script(600.5)
    assert "-X DELETE" in script(own)
    for each in (script(SETTINGS), script(own)):
        parsed = subprocess.run(["sh", "-n"], input=each, text=True, check=False)
        assert parsed.returncode == 0


def test_gpus_are_attached_to_machines_without_gpus() -> None:
    assert requests.kind_of(KIND) == requests.GcpInstanceKind(KIND)
    kind = requests.kind_of("n1-standard-32+4xP100")
    assert kind == requests.GcpInstanceKind("n1-standard-32", "nvidia-tesla-p100", 4)
    assert answers.family_of("n1-standard-32+4xP100") == "NVIDIA_P100_GPUS"
    assert answers.family_of("a2-ultragpu-8g") == "NVIDIA_A100_80GB_GPUS"
    assert answers.family_of("x9-huge") == "x9-huge"


@pytest.mark.parametrize(
    ("spot", "gpus", "then"),
    [(False, 0, "MIGRATE"), (False, 1, "TERMINATE"), (True, 0, "TERMINATE")],
)
def test_a_movable_vm_is_migrated_for_maintenance(spot: bool, gpus: int, then: str) -> None:
    asked = launch_request(spot=spot)
    asked = replace(asked, offer=replace(asked.offer, gpus=gpus))
    bulk = requests.bulk_insert(asked, PLACE, SETTINGS, 0)
    made = bulk["bulk_insert_instance_resource_resource"]["instance_properties"]
    assert made["scheduling"]["on_host_maintenance"] == then


def test_new_machines_boot_from_hyperdisks() -> None:
    for kind, disk in (("a3-ultragpu-8g", "hyperdisk-balanced"), (KIND, "pd-balanced")):
        asked = requests.bulk_insert(launch_request(kind=kind), PLACE, SETTINGS, 0)
        made = asked["bulk_insert_instance_resource_resource"]["instance_properties"]
        assert made["disks"][0]["initialize_params"]["disk_type"] == disk


@given(st.from_regex(NAME, fullmatch=True))
def test_a_vm_id_contains_its_cloud_and_zone(name: str) -> None:
    vm_id = requests.vm_id_of("europe-west4-a", name)
    assert requests.split_vm_id(vm_id) == ("europe-west4-a", name)
    assert cloud_of(vm_id) == "gcp"
    for other in ("vm-of-nobody", vm_id.replace("gcp", "aws", 1)):
        assert requests.split_vm_id(other) == ("", "")
    assert requests.region_of("europe-west4-a") == "europe-west4"


def test_ssh_is_allowed_from_the_given_networks_only() -> None:
    (inside,) = requests.firewalls(SETTINGS, "job", PLACE.network)
    assert inside["firewall_resource"]["source_tags"] == [requests.shared_name("job", "")]
    settings = GcpSettings(
        project=PROJECT, instance_types=(), ssh_from=("192.0.2.0/24",), ssh_port=2222
    )
    _, ssh = requests.firewalls(settings, "job", PLACE.network)
    rule = ssh["firewall_resource"]
    assert rule["source_ranges"] == ["192.0.2.0/24"]
    assert rule["allowed"] == [{"I_p_protocol": "tcp", "ports": ["2222"]}]


def test_a_vm_of_an_unknown_type_is_still_listed() -> None:
    instance = {
        "name": "x",
        "zone": f"projects/p/zones/{ZONE}",
        "machine_type": f"projects/p/zones/{ZONE}/machineTypes/x9-huge",
        "creation_timestamp": "2026-11-20T12:00:00.000-07:00",
        "status": "TERMINATED",
        "labels": {tags.JOB: "theirs"},
    }
    vm = answers.vm_of(instance, FACTS)
    assert (vm.job, vm.offer.gpus, vm.offer.instance_type) == ("theirs", 0, "x9-huge")


def test_addresses_and_host_keys_may_be_missing() -> None:
    assert answers.public_address({}) == ""
    config = [{"name": "External NAT"}, {"nat_i_p": "203.0.113.7"}]
    instance = {"network_interfaces": [{"access_configs": config}]}
    assert answers.public_address(instance) == "203.0.113.7"
    items = [
        {"namespace": "hostkeys", "key": "ssh-ed25519", "value": "AAAA"},
        {"namespace": "other", "key": "ssh-rsa", "value": "BBBB"},
    ]
    told = {"query_value": {"items": items}}
    assert answers.host_keys(told) == ("ssh-ed25519 AAAA",)
    assert answers.host_keys({}) == ()
