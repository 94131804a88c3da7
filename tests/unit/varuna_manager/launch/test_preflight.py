"""Checks of devices and of torch before anything is rented."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gpus import VARIABLE, FakeGpus
from tests.fakes.nvml import pynvml

from spottrain import machine
from spottrain.cloud.aws.settings import IMAGE_NAME as AWS_IMAGE
from spottrain.cloud.azure.settings import IMAGE as AZURE_IMAGE
from spottrain.cloud.gcp.settings import IMAGE as GCP_IMAGE
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.ssh.hosts.bootstrap import check_gpus
from spottrain.cloud.ssh.transport.hosts import UnfitHostError
from spottrain.errors import ConfigError
from spottrain.gpus.builds import CU126, PYPI, TorchBuild, driver_major
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.launch import preflight

ROLE = {"instance_types": ["g5.xlarge"], "instance_profile": "writes"}
CU126_INDEX = "https://download.pytorch.org/whl/cu126"


def config(folder: Path, setup: str, *types: str, **changes: Any) -> JobConfig:
    data = {
        "name": "job",
        "entrypoint": "train:job",
        "minibatch_size": 8,
        "steps": 1,
        "workdir": str(folder),
        "setup": setup,
        "resources": {"provider": "aws"},
        "checkpoint": {"path": "/shared"},
        "aws": {"instance_types": types or ["g5.xlarge"]},
        **changes,
    }
    return parse_config(data, "x")


@pytest.mark.parametrize(
    ("setup", "requirements", "build"),
    [
        ("", "", None),
        ("pip install einops", "", None),
        ("pip install torch", "", PYPI),
        ("pip install -r needs.txt", "torch==2.13.0\neinops", PYPI),
        ("pip install -r needs.txt", "einops", None),
        ("pip install -r absent.txt", "", None),
        (f"pip install torch --index-url {CU126_INDEX}", "", CU126),
        ("pip install --requirement=needs.txt", "torch==2.13.0+cu126", CU126),
        (
            "pip install -r needs.txt",
            f"--extra-index-url {CU126_INDEX}\ntorch",
            CU126,
        ),
    ],
)
def test_the_torch_that_setup_installs_is_seen(
    tmp_path: Path, setup: str, requirements: str, build: TorchBuild | None
) -> None:
    (tmp_path / "needs.txt").write_text(requirements)
    assert preflight.build_in_setup(config(tmp_path, setup)) == build


def test_pypis_torch_on_a_v100_is_refused_before_renting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"V100: .*sm_70"):
        preflight.check_build(config(tmp_path, "pip install torch", "p3.2xlarge"))
    setup = f"pip install torch --index-url {CU126_INDEX}"
    types = ["p3.2xlarge", "g5.xlarge"]
    own = {"aws": {"instance_types": types, "image": "ami-12345678"}}
    lines = preflight.check_build(config(tmp_path, setup, **own))
    assert lines == ["aws: torch for CUDA 12.6 runs on A10G, V100"]
    loud, line = preflight.check_build(config(tmp_path, "", **own))
    assert loud.startswith("aws: WARNING: no torch: the image ami-12345678 may have none")
    assert line == "aws: torch that runs on A10G, V100: torch for CUDA 12.6"
    with pytest.raises(ConfigError, match=r"driver 595\.91 does not know sm_70"):
        preflight.check_build(config(tmp_path, setup, *types))


def test_nothing_is_said_of_torch_where_no_gpu_is_rented(tmp_path: Path) -> None:
    resources = {"provider": "aws", "device": "cpu"}
    only = config(tmp_path, "pip install torch", "c7i.large", resources=resources)
    assert preflight.check_build(only) == []


def test_types_that_are_left_out_are_told(tmp_path: Path) -> None:
    precision = {"runtime": {"precision": "bf16"}}
    job = config(tmp_path, "", "g4dn.xlarge", "g5.xlarge", **precision)
    first, *_ = preflight.check_build(job)
    assert first.startswith("g4dn.xlarge is left out: runtime.precision: T4 (sm_75)")


def test_drivers_of_images_are_known_as_far_as_they_are_published() -> None:
    for cloud, image in (
        ("aws", AWS_IMAGE),
        ("azure", AZURE_IMAGE),
        ("gcp", GCP_IMAGE),
    ):
        driver = preflight.driver_of_image(cloud, image)
        assert driver_major(driver) >= PYPI.min_driver
    assert preflight.driver_of_image("aws", "ami-1234") == ""
    assert preflight.driver_of_image("gcp", "x/family/common-nvidia-550") == "550"


def test_a_driver_older_than_torch_is_refused_before_renting(tmp_path: Path) -> None:
    old = {"gcp": {"project": "p", "instance_types": ["g2-standard-4"]}}
    old["gcp"]["image"] = "projects/x/global/images/family/common-nvidia-550"
    resources = {"provider": "gcp"}
    job = config(tmp_path, "pip install torch", resources=resources, **old)
    with pytest.raises(ConfigError, match="needs driver 580 or newer: got 550"):
        preflight.check_build(job)


def test_images_without_torch_are_told_loudly(tmp_path: Path) -> None:
    (line,) = preflight.check_build(config(tmp_path, "", "g5.xlarge"))
    assert line == f"aws: torch is in the image {AWS_IMAGE}"
    azure = {"azure": {"instance_types": ["Standard_NC24ads_A100_v4"]}}
    only = config(tmp_path, "./install", resources={"provider": "azure"}, **azure)
    loud = preflight.check_build(only)[0]
    assert "WARNING: no torch: the image microsoft-dsvm:ubuntu-hpc:2404:latest has" in loud
    assert "setup does not name torch" in loud
    named = config(tmp_path, "pip install torch", resources={"provider": "azure"}, **azure)
    assert not any("WARNING" in line for line in preflight.check_build(named))


def test_gpus_that_an_image_has_no_driver_for_are_told_loudly(tmp_path: Path) -> None:
    azure = {"instance_types": ["Standard_NV36ads_A10_v5", "Standard_NC24ads_A100_v4"]}
    job = config(tmp_path, "pip install torch", resources={"provider": "azure"}, azure=azure)
    (loud,) = (line for line in preflight.check_build(job) if "no driver" in line)
    assert "has none for A10;" in loud


HOST = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "driver": "580.95.05",
    "gpu": "NVIDIA A100-SXM4-80GB",
}


@pytest.mark.parametrize("declared", ["", "A100", "A100-80GB"])
def test_a_hosts_gpus_are_those_of_the_job_file(declared: str) -> None:
    check_gpus("host a", HOST, "auto", declared)
    check_gpus("host a", HOST | {"gpu": ""}, "auto", declared)


def test_a_host_with_other_gpus_than_in_the_job_file_is_refused() -> None:
    with pytest.raises(UnfitHostError, match=r"host a: its GPUs are .*gpu says V100"):
        check_gpus("host a", HOST, "auto", "V100")


@pytest.mark.parametrize(
    ("found", "device", "why"),
    [
        ({}, "auto", ""),
        ({}, "gpu", ""),
        ({"driver": ""}, "auto", ""),
        ({"driver": ""}, "gpu", "no NVIDIA driver is loaded"),
        ({"driver": ""}, "cpu", ""),
        ({"driver": "570.1"}, "auto", "needs driver 580 or newer: got 570.1"),
        ({"driver": "570.1"}, "cpu", ""),
        ({"cuda": ""}, "auto", "built for CPUs"),
        ({"torch": "", "cuda": ""}, "gpu", ""),
    ],
)
def test_a_hosts_driver_is_checked_against_its_torch(
    found: dict[str, str], device: Any, why: str
) -> None:
    if not why:
        check_gpus("host a", HOST | found, device)
        return
    with pytest.raises(UnfitHostError, match=f"host a: .*{why}"):
        check_gpus("host a", HOST | found, device)


def test_this_machines_gpus_are_checked_before_a_local_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"name": "j", "entrypoint": "a:b", "minibatch_size": 1, "steps": 1}
    job = parse_config(data, "x")
    gpus = FakeGpus(tmp_path / "nvml.json")
    monkeypatch.setenv(VARIABLE, str(gpus.file))
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setattr("os.cpu_count", machine.cores)
    monkeypatch.setattr(machine, "locked_memory_bytes", lambda *, raised: 0)
    assert preflight.check_here(job) == "computes on NVIDIA A10G"
    gpus.change(rows=[0, 1, 0, 1])
    with pytest.raises(CloudError, match=r"this machine: GPU 0 .* cannot be replaced"):
        preflight.check_here(job)
    gpus.change(rows=[0, 0, 0, 0], recovery=1)
    monkeypatch.setattr("os.cpu_count", lambda: machine.cores() + 1)
    monkeypatch.setattr(machine, "locked_memory_bytes", lambda *, raised: 8_000_000)
    assert re.fullmatch(
        r"computes on NVIDIA A10G; may use \d+ of \d+ cores; may page-lock 8.0 MB .*; GPU 0 .* "
        "asks for a reset of the GPU",
        preflight.check_here(job),
    )
    gpus.set(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert ", 1 thread; may use" in preflight.check_here(job)


def test_this_machines_gpus_may_differ_but_not_in_a_vm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = FakeGpus(tmp_path / "nvml.json", count=2)
    gpus.change(index=1, name="Tesla T4")
    monkeypatch.setenv(VARIABLE, str(gpus.file))
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    local: dict[str, Any] = {"zones": [{"name": "here", "slots": 1}]}
    job = config(tmp_path, "", resources={"provider": "local"}, local=local)
    assert preflight.check_here(job).startswith("computes on NVIDIA A10G")
    for known in ("NVIDIA A10G", "Tesla T4"):
        preflight.check_kernels(job, f"{known} with torch 2.13.0")
    with pytest.raises(ConfigError, match="this machine has NVIDIA A10G and Tesla T4; go on"):
        preflight.check_kernels(job, A100)
    local["zones"][0]["slots"] = 2
    job = config(tmp_path, "", resources={"provider": "local"}, local=local)
    with pytest.raises(CloudError, match="of several types: got NVIDIA A10G, Tesla T4"):
        preflight.check_here(job)


@pytest.mark.parametrize(
    ("path", "changes", "warnings"),
    [
        ("/shared", {}, []),
        (
            "s3://b/x",
            {},
            ["aws: WARNING.*aws.instance_profile, or name AWS_ACCESS_KEY"],
        ),
        ("s3://b/x", {"aws": ROLE}, []),
        ("s3://b/x", {"secrets": ["AWS_ACCESS_KEY_ID"]}, []),
        (
            "s3://b/x",
            {"secrets": ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"]},
            ["AWS_SESSION_TOKEN expires within hours"],
        ),
        (
            "gs://b/x",
            {"aws": ROLE},
            ["no credentials for gs:"],
        ),
        ("gs://b/x", {"env": {"GOOGLE_SERVICE_ACCOUNT_KEY": "k"}}, []),
    ],
)
def test_vms_that_cannot_write_checkpoints_for_long_are_told(
    tmp_path: Path, path: str, changes: dict[str, Any], warnings: list[str]
) -> None:
    job = config(tmp_path, "", **{"checkpoint": {"path": path}, **changes})
    lines = preflight.check_bucket_access(job)
    assert len(lines) == len(warnings)
    for line, warning in zip(lines, warnings, strict=True):
        assert re.search(warning, line)


A10G, A100, EPYC = (
    f"{name} with torch 2.13.0" for name in ("NVIDIA A10G", "NVIDIA A100-SXM4-80GB", "AMD EPYC")
)


def rented(*types: str) -> dict[str, Any]:
    return {"resources": {"provider": "aws"}, "aws": {"instance_types": types}}


def own(**host: str) -> dict[str, Any]:
    return {"resources": {"provider": "ssh"}, "ssh": {"hosts": [{"address": "a", **host}]}}


@pytest.mark.parametrize(
    ("kernels", "machines", "refused"),
    [
        (None, rented("g6.xlarge"), ""),
        (A10G, rented("g5.xlarge"), ""),
        (A10G, rented("g6.xlarge", "g5.xlarge"), ""),
        (A10G, rented("g6.xlarge", "g6e.xlarge"), "computed on NVIDIA A10G .* names L4, L40S; go"),
        (EPYC, rented("g6.xlarge"), "computed on AMD EPYC .* the job file names L4;"),
        (A100, own(gpu="A100"), ""),
        (A100, own(gpu="A10"), "computed on NVIDIA A100-SXM4-80GB .* the job file names A10;"),
        (A10G, own(), ""),
        (EPYC, own(), ""),
    ],
)
def test_an_exact_job_is_refused_whose_machines_round_differently(
    tmp_path: Path, kernels: str | None, machines: dict[str, Any], refused: str
) -> None:
    job = config(tmp_path, "", **machines)
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        preflight.check_kernels(job, kernels)
