"""The job file's parts about clouds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python
from tests.fakes.web import serve_web

from spottrain.cloud.ssh.transport.hosts import Host
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.clouds import AnyCloud
from spottrain.varuna_manager.config.job import JobConfig, load_config, parse_config
from spottrain.varuna_manager.launch.preflight import check_build
from spottrain.varuna_manager.launch.providers import own_network

WANTED: dict[str, dict[str, Any]] = {
    "aws": {"instance_types": ["g5.xlarge"]},
    "azure": {"instance_types": ["Standard_NC24ads_A100_v4"]},
    "gcp": {"instance_types": ["g2-standard-4"], "project": "p"},
}


def job(provider: str, section: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "job",
        "entrypoint": "train:job",
        "minibatch_size": 8,
        "steps": 1,
        "resources": {"provider": provider},
        "checkpoint": {"path": "/shared"},
        provider: section,
        **changes,
    }


def several(*names: str, **changes: Any) -> dict[str, Any]:
    """Return a job on several clouds."""
    sections = {name: WANTED[name] for name in names}
    data = job("aws", WANTED["aws"], resources={"provider": names}, **sections)
    return {**data, **changes}


def cloud_of(provider: str, **section: Any) -> AnyCloud:
    config = parse_config(job(provider, {**WANTED[provider], **section}), "x")
    assert config.cloud is not None
    return config.cloud


@pytest.mark.parametrize("provider", WANTED)
def test_a_cloud_needs_to_know_what_to_rent_and_nothing_else(provider: str) -> None:
    cloud = cloud_of(provider)
    assert cloud.cloud == provider
    settings = cloud.settings("ssh-ed25519 AAAA", ("192.0.2.1/32",))
    assert settings.instance_types == tuple(WANTED[provider]["instance_types"])
    assert settings.public_key == "ssh-ed25519 AAAA"
    assert settings.ssh_from == ("192.0.2.1/32",)
    assert len(settings.regions) == 1


@pytest.mark.parametrize("provider", WANTED)
def test_settings_survive_the_way_into_the_child(provider: str) -> None:
    settings = cloud_of(provider, ssh_from=["10.0.0.0/8"]).settings("key", ())
    plain = to_jsonable_python(settings)
    assert TypeAdapter(type(settings)).validate_python(plain) == settings


def test_gpus_stand_for_all_types_that_have_them_beside_those_named() -> None:
    cloud = cloud_of("aws", gpus=["L4"])
    kinds = cloud.kinds()
    assert kinds[0] == "g5.xlarge"
    assert "g6.xlarge" in kinds
    assert not any(kind.startswith("p") for kind in kinds)


def test_this_machines_address_must_be_one_that_vms_can_let_in() -> None:
    cloud = cloud_of("aws")
    with serve_web() as web:
        web.files = {"/4": b"192.0.2.7\n", "/6": b"2001:db8::7\n"}
        assert own_network(cloud, f"{web.url}/4") == ("192.0.2.7/32",)
        with pytest.raises(ConfigError, match=r"aws.ssh_from: .*2001:db8::7.*; list"):
            own_network(cloud, f"{web.url}/6")


def test_paths_of_a_bastion_are_relative_to_the_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "{name: job, entrypoint: 'train:job', minibatch_size: 8, steps: 1, resources: "
        "{provider: aws}, checkpoint: {path: saved}, aws: {gpus: [A10G], bastion: "
        "{address: b, user: me, key_file: key, known_hosts: hosts}}}"
    )
    cloud = load_config(file).cloud
    assert cloud is not None
    assert cloud.bastion is not None
    assert cloud.bastion.host() == Host(
        name="bastion",
        address="b",
        user="me",
        key_file=tmp_path / "key",
        known_hosts=tmp_path / "hosts",
    )


def test_several_clouds_are_taken_in_the_order_of_the_file() -> None:
    config = parse_config(several("gcp", "aws"), "x")
    assert config.resources.provider == ("gcp", "aws")
    assert [cloud.cloud for cloud in config.clouds] == ["gcp", "aws"]
    assert config.cloud == config.gcp
    assert parse_config(config.model_dump(mode="json"), "x") == config


def test_a_list_of_one_cloud_is_that_cloud() -> None:
    config = parse_config(several("gcp"), "x")
    assert config.resources.provider == "gcp"
    assert config.clouds == (config.gcp,)
    own = parse_config(job("local", {}, checkpoint={}), "x")
    assert (own.clouds, own.cloud) == ((), None)


def test_the_example_for_several_clouds_can_be_read() -> None:
    file = Path(__file__).resolve().parents[4] / "examples/anywhere.yaml"
    config = load_config(file)
    assert [cloud.cloud for cloud in config.clouds] == ["aws", "azure", "gcp"]
    assert all(cloud.kinds() for cloud in config.clouds)


_NAMES = "must be local, ssh, slurm, kubernetes, aws, azure or gcp, or a list of clouds such as [aws, gcp]"
MISTAKES = [
    (several("aws", "gcp", checkpoint={}), "provider aws, gcp needs a checkpoint.path"),
    (
        job("gcp", {}, checkpoint={}),
        "rented; and gcp.project, the project that pays; and a checkpoint.path",
    ),
    (several("aws", "gcp", resources={"provider": ["aws", "ssh"]}), _NAMES),
    (several("aws", "gcp", resources={"provider": []}), _NAMES),
    (several("aws", "gcp", resources={"provider": "ibm"}), f"{_NAMES}: got 'ibm'"),
    (
        several("aws", "gcp", resources={"provider": ["aws", "aws"]}),
        "resources.provider: must name each cloud once: got aws, aws",
    ),
    (job("aws", {}), "resources.provider aws needs aws.instance_types or aws.gpus"),
    (job("aws", {"instance_types": ["g5.tiny"]}), "g5.tiny"),
    (job("aws", {"gpus": ["A1000"]}), "no such GPU: got A1000; did you mean A10"),
    (job("aws", {"instance_types": ["p5.48xlarg"]}), "got p5.48xlarg; did you mean p5.48xlarge?"),
    (job("aws", {"instance_type": []}), "aws.instance_type: unknown key; did you mean"),
    (job("aws", {"gpus": ["L4"], "ssh_from": ["here"]}), "aws.ssh_from"),
    (
        job("aws", {"gpus": ["L4"], "ssh_from": ["2001:db8::/32"]}),
        "must be an IPv4 network such as 198.51.100.7/32, as VMs have no IPv6 address",
    ),
    (
        job("gcp", {"gpus": ["L4"]}),
        "resources.provider gcp needs gcp.project, the project that pays",
    ),
    (job("aws", {"gpus": ["A10"]}), "aws has no A10; 'spottrain prices --cloud aws'"),
    (
        job("aws", {"gpus": ["L4"], "regions": ["us-east-1a"]}),
        "such as us-east-1: got us-east-1a",
    ),
    (
        job("azure", {"gpus": ["T4"], "regions": ["East US"]}),
        "such as eastus: got East US",
    ),
    (
        job("azure", {"gpus": ["T4"], "zones": ["1"]}),
        "zones: 1: none is in the regions eastus",
    ),
    (
        job("aws", {"gpus": ["L4"], "subnets": {"us-east-1": "subnet-1"}}),
        "subnets: are given by zone, such as us-east-1a: got us-east-1",
    ),
    (
        job("azure", {"gpus": ["T4"], "subnets": {"eastsu": "/subscriptions/s"}}),
        "subnets: eastsu is none of the job's; eastus has none",
    ),
    (
        job("azure", {"gpus": ["T4"], "subnets": {"eastus": "vms"}}),
        "subnets: must be a resource id, /subscriptions/…: got vms",
    ),
    (
        job("gcp", {"gpus": ["L4"], "project": "p", "service_account": "vms"}),
        "service_account: must be an email",
    ),
    (
        job(
            "gcp",
            {"gpus": ["L4"], "project": "p", "subnetworks": {"us-central1": "s"}},
        ),
        "subnetworks needs network",
    ),
    (
        job("gcp", {"gpus": ["L4"], "project": "p", "public_addresses": False}),
        "public_addresses: false needs network of yours, bastion or ssh_proxy",
    ),
    (job("aws", {"gpus": ["L4"], "owner": "a\nb"}), "aws.owner"),
    (
        job("aws", {"gpus": ["L4"], "endpoint_url": "localhost"}),
        "aws.endpoint_url: must be a URL such as https://example.org: got localhost",
    ),
    (
        job("aws", {"gpus": ["L4"]}, checkpoint={"path": "s3:/bucket/p"}),
        "checkpoint.path: must begin with s3:// to be a URL: got s3:/bucket/p",
    ),
    *(
        (job("aws", {"gpus": ["L4"]}, checkpoint={"path": place}), f"checkpoint.path: {told}")
        for place, told in {
            "file:~/ck": "must begin with file:// to be a URL",
            "S3://bucket/p": "store must be a folder or one of s3://",
            "s3://bucket/p\n": "store must be a folder or one of s3://",
            "s3://$(whoami)/p": "store must name a bucket",
            "s3://{{ bucket }}/p": "store must name a bucket",
            "s3://%BUCKET%/p": "store must name a bucket",
        }.items()
    ),
    (
        job("aws", {"gpus": ["L4"]}, resources={"provider": "aws", "span": "any"}),
        "resources.span any needs a network of your own",
    ),
]


@pytest.mark.parametrize(("data", "told"), MISTAKES)
def test_a_mistake_is_reported_in_one_line(data: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "job.yaml")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wider_span_takes_a_network_of_the_users_own() -> None:
    section = {
        "gpus": ["L4"],
        "regions": ["us-east-1", "us-west-2"],
        "subnets": {"us-east-1a": "subnet-1", "us-west-2b": "subnet-2"},
        "security_groups": ["sg-1"],
    }
    data = job("aws", section, resources={"provider": "aws", "span": "cloud"})
    assert parse_config(data, "x").resources.span == "cloud"
    for missing in ("security_groups", "subnets"):
        less = {key: value for key, value in section.items() if key != missing}
        data = job("aws", less, resources={"provider": "aws", "span": "cloud"})
        with pytest.raises(ConfigError, match=f"unencrypted .*name aws.{missing}"):
            parse_config(data, "x")
    azure = {
        "gpus": ["T4"],
        "regions": ["eastus", "westus3"],
        "subnets": {"eastus": "/subscriptions/s"},
    }
    data = job("azure", azure, resources={"provider": "azure", "span": "cloud"})
    with pytest.raises(ConfigError, match=r"name azure\.subnets in westus3"):
        parse_config(data, "x")


# --- What VMs are rented for ----------------------------------------------------------------

COMPUTE = {"aws": "c7i.4xlarge", "azure": "Standard_F16s_v2", "gcp": "c3-standard-8"}


def on(provider: str, device: str, *types: str, **changes: Any) -> JobConfig:
    section = {**WANTED[provider], "instance_types": types}
    resources = {"provider": provider, "device": device}
    return parse_config(job(provider, section, resources=resources, **changes), "x")


@pytest.mark.parametrize("provider", WANTED)
def test_vms_of_a_cloud_compute_on_gpus_unless_cpus_are_asked_for(
    provider: str,
) -> None:
    (kind,) = WANTED[provider]["instance_types"]
    for choice in ("auto", "gpu"):
        config = on(provider, choice, kind)
        assert config.device == config.job_spec("/c").device == "gpu"
    config = on(provider, "cpu", COMPUTE[provider])
    assert config.job_spec("/c").device == "cpu"
    with pytest.raises(ConfigError, match="rents machines without GPUs"):
        on(provider, "cpu", COMPUTE[provider], kind)
    for choice in ("auto", "gpu"):
        with pytest.raises(ConfigError, match="has no GPU; set resources"):
            on(provider, choice, kind, COMPUTE[provider])


def test_own_machines_compute_on_what_they_have() -> None:
    data = {"name": "j", "entrypoint": "a:b", "minibatch_size": 1, "steps": 1}
    assert parse_config(data, "x").device == "auto"


def test_types_without_bf16_are_left_out_and_refused_if_nothing_else_is_named() -> None:
    bf16 = {"runtime": {"precision": "bf16"}}
    config = on("aws", "auto", "g4dn.xlarge", "g5.xlarge", **bf16)
    (cloud,) = config.clouds
    assert cloud.kinds() == ("g5.xlarge",)
    assert list(config.slow_types) == ["g4dn.xlarge"]
    assert "bf16" in config.slow_types["g4dn.xlarge"]
    with pytest.raises(ConfigError, match=r"runtime\.precision: .*T4 \(sm_75\)"):
        on("aws", "auto", "g4dn.xlarge", **bf16)
    assert on("aws", "auto", "g4dn.xlarge", runtime={"precision": "fp16"}).clouds


@pytest.mark.parametrize("name", ["aws", "azure", "gcp"])
def test_a_first_job_of_each_cloud_finds_torch_and_has_a_small_budget(
    name: str,
) -> None:
    root = Path(__file__).resolve().parents[4]
    file = root / f"examples/{name}.yaml"
    config = load_config(file)
    assert config.name == f"first-on-{name}"
    assert config.budget.max_usd is not None
    assert config.budget.max_usd <= 5
    assert not any("WARNING" in line for line in check_build(config))
    page = (root / f"docs/clouds/{name}.md").read_text()
    walk, _, _ = page.partition("## Details")
    assert f"spottrain launch examples/{name}.yaml" in walk
    assert len(walk.splitlines()) <= 40, "at most one screen"
