"""The VM that is rented for a manager, and the job file there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_launch
from tests.unit.varuna_manager.story import OFFER

from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import SshTarget
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.config.manager_vm import DEFAULTS, IDENTITY
from spottrain.varuna_manager.jobs import manager_location
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.manager_location import OwnVm, RemoteManager
from spottrain.varuna_manager.launch.manager.bundle import root_of
from spottrain.varuna_manager.launch.manager.vm import config_there, renting, requests
from spottrain.varuna_manager.launch.submit import check_manager

NAMED: dict[str, dict[str, Any]] = {
    "aws": {
        "instance_types": ["g5.xlarge"],
        "regions": ["us-east-1", "us-west-2"],
        "zones": ["us-east-1a", "us-west-2b"],
        "profile": "work",
        "image_owner": "123456789012",
        "bastion": {"address": "192.0.2.9"},
    },
    "azure": {"instance_types": ["Standard_NC4as_T4_v3"], "subscription": "s"},
    "gcp": {"instance_types": ["g2-standard-4"], "project": "p"},
}
CLOUDS = tuple(NAMED)


def config_of(cloud: str, **changes: Any) -> JobConfig:
    data: dict[str, Any] = {
        "name": "far",
        "entrypoint": "train:job",
        "minibatch_size": 8,
        "steps": 10,
        "resources": {"provider": cloud},
        "checkpoint": {"path": "s3://bucket/far"},
        "manager_vm": {"identity": "manager"},
        **{name: NAMED[name] for name in NAMED if name == cloud},
    }
    return parse_config({**data, **changes}, "job.yaml")


OFFERS = st.lists(
    st.builds(
        lambda region, zone, usd, gpus: replace(
            OFFER,
            region=region,
            zone=f"{region}{zone}",
            usd_per_hour=usd,
            gpus=gpus,
        ),
        st.sampled_from(["east", "west"]),
        st.sampled_from("abc"),
        st.floats(0.1, 50),
        st.integers(1, 8),
    ),
    min_size=1,
)


@given(OFFERS)
def test_each_zone_of_the_cheapest_region_is_asked_once_under_a_token_of_its_own(
    offers: list[Any],
) -> None:
    asked = list(requests(config_of("aws"), offers, "uid"))
    cheapest = min(offers, key=lambda one: one.usd_per_hour / one.gpus)
    assert {one.offer.region for one in asked} == {cheapest.region}
    zones = [one.offer.zone for one in asked]
    assert zones[0] == cheapest.zone
    assert sorted(zones) == sorted({one.zone for one in offers if one.region == cheapest.region})
    assert len({one.token for one in asked}) == len(asked)
    for one in asked:
        assert (one.intent, one.count, one.offer.spot) == (tags.MANAGER, 1, False)
        assert one.offer.instance_type == DEFAULTS["aws"].instance_type
        assert one.offer.usd_per_hour == pytest.approx(
            DEFAULTS["aws"].usd_per_hour + one.offer.attached_usd_per_hour
        )


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_vm_of_a_manager_acts_as_what_is_named_and_has_a_plain_image(
    cloud: str,
) -> None:
    rented = renting(config_of(cloud))
    assert getattr(rented, IDENTITY[cloud]) == "manager"
    assert rented.image == DEFAULTS[cloud].image
    settings = rented.settings("ssh-ed25519 AAAA", ())
    assert settings.instance_types == ()  # the catalogue knows GPUs only
    assert settings.disk_gib == 30


def test_an_image_of_the_job_file_has_the_owner_that_the_job_file_names() -> None:
    wish = {"identity": "manager", "image": "ours *"}
    rented = renting(config_of("aws", manager_vm=wish))
    assert (rented.image, getattr(rented, "image_owner", "")) == (
        "ours *",
        "123456789012",
    )


def away_in(region: str, networks: tuple[str, ...] = ("192.0.2.0/24",)) -> RemoteManager:
    offer = replace(OFFER, cloud="aws", region=region, zone=f"{region}a")
    request = a_launch(offer, token="t", job="far", intent=tags.MANAGER, lease_s=9.0)
    return RemoteManager(requests=(request,), networks=networks)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_manager_there_rents_where_it_reaches_vms_and_lets_us_in_still(
    cloud: str,
) -> None:
    told = config_there(config_of(cloud), away_in("us-east-1")).clouds[0]
    assert told.regions == ("us-east-1",)
    assert set(told.zones) <= {"us-east-1a"}
    assert told.ssh_from == ("192.0.2.0/24",)
    assert told.bastion is None
    assert getattr(told, "profile", "") == ""
    assert not getattr(told, IDENTITY[cloud])  # workers do not act as the manager


def test_a_network_of_the_users_keeps_all_its_regions() -> None:
    named = {**NAMED["aws"], "subnets": {"us-east-1a": "subnet-1"}}
    told = config_there(config_of("aws", aws=named), away_in("us-east-1"))
    assert told.clouds[0].regions == ("us-east-1", "us-west-2")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resources": {"provider": "local"}}, "exactly one cloud: got resources"),
        ({"checkpoint": {"path": "/mnt/shared"}}, "must be in an object store"),
        ({"checkpoint": {"path": "file:///mnt/x"}}, "must be in an object store"),
        ({"manager_vm": {}}, "needs manager_vm.identity"),
    ],
)
def test_what_is_missing_is_said_before_money_is_spent(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        check_manager(config_of("aws", **changes), on_vm=True)
    assert "\n" not in str(refused.value)


def test_on_slurm_the_manager_needs_a_partition_of_its_own() -> None:
    slurm = {"partitions": ["p"]}
    config = config_of("slurm", slurm=slurm, checkpoint={"path": "/shared"})
    with pytest.raises(ConfigError, match=r"--manager-vm needs slurm\.manager_partition"):
        check_manager(config, on_vm=True)
    steady = {"partitions": ["p"], "manager_partition": "steady"}
    check_manager(config_of("slurm", slurm=steady, checkpoint={"path": "/shared"}), on_vm=True)
    with pytest.raises(ConfigError, match=r"slurm\.address .* leave it out"):
        check_manager(config_of("slurm", slurm={**steady, "address": "10.0.0.1"}), on_vm=True)


def test_from_a_laptop_to_a_slurm_cluster_the_checkpoints_must_outlive_the_manager() -> None:
    slurm = {"partitions": ["p"], "manager_partition": "steady", "login": "me@login"}
    config = config_of("slurm", slurm=slurm, checkpoint={"path": "/shared"})
    with pytest.raises(ConfigError, match="must be in an object store"):
        check_manager(config, on_vm=True)
    check_manager(config_of("slurm", slurm=slurm), on_vm=True)


def test_on_kubernetes_the_manager_needs_a_service_account() -> None:
    kubernetes = {"image": "registry.example/torch:2"}
    with pytest.raises(ConfigError, match=r"identity.*\(kubernetes\.service_account\)"):
        check_manager(config_of("kubernetes", kubernetes=kubernetes, manager_vm={}), on_vm=True)
    check_manager(config_of("kubernetes", kubernetes=kubernetes), on_vm=True)


@pytest.mark.parametrize(
    ("folder", "root"),
    [
        (".spottrain", '"$HOME"/.spottrain/manager'),
        ("~/of mine", "\"$HOME\"/'of mine/manager'"),
        ("/shared/of mine", "'/shared/of mine/manager'"),
    ],
)
def test_our_folder_where_a_manager_goes_is_a_word_for_the_shell(folder: str, root: str) -> None:
    assert root_of(folder) == root


def test_a_manager_on_a_laptop_handles_at_most_128_vms() -> None:
    most = {"provider": "aws", "max_vms": 128}
    check_manager(config_of("aws", resources=most), on_vm=False)
    more = config_of("aws", resources={**most, "max_vms": 129})
    with pytest.raises(ConfigError, match="got 129; launch with --manager-vm"):
        check_manager(more, on_vm=False)
    check_manager(more, on_vm=True)


def test_a_type_of_ones_own_needs_its_price() -> None:
    with pytest.raises(ConfigError, match="instance_type needs usd_per_hour"):
        config_of("aws", manager_vm={"instance_type": "m7i.large"})


def test_where_a_manager_is_survives_a_restart(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    assert (manager_location.read(job), manager_location.own_vm(job)) == (None, None)
    target = SshTarget(host="h", user="u", host_keys=("ssh-ed25519 A",), port=23)
    known = replace(away_in("us-east-1"), vm_id="i-1", target=target, started=True)
    manager_location.write(job, known)
    assert manager_location.read(job) == known
    manager_location.forget(job)
    assert manager_location.read(job) is None
    own = OwnVm(vm_id="i-1", private_address="10.0.0.7")
    (tmp_path / "vm.json").write_bytes(manager_location.own_vm_file(own))
    assert manager_location.own_vm(job) == own
