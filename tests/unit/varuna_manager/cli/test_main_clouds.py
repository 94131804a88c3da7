"""doctor, gc and ssh from the command line, against AWS's fake."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_launch
from tests.fakes.aws import KIND, REGION, FakeAws
from tests.fakes.sshd import WHY_NOT, Sshd, keygen
from tests.unit.varuna_manager.story import FACTS

from spottrain.cloud.port.errors import AuthError, CloudError, MisconfiguredError
from spottrain.cloud.port.provider import SshTarget
from spottrain.errors import BudgetError, CapacityError, ConfigError
from spottrain.varuna_manager.cli.ssh import choose_vm, ssh_argv
from spottrain.varuna_manager.config.clouds import BastionConfig
from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.daemon.main import ManagerError
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.launch import machines
from spottrain.varuna_manager.launch.ssh_command import argv_to
from spottrain.varuna_manager.launch.submit import submit
from tests.commands import Run

QUOTA = "L-3819A6DF"


def job_file(fake: FakeAws, folder: Path, name: str = "job", **changes: Any) -> Path:
    section = {
        "instance_types": [KIND],
        "endpoint_url": fake.url,
        "ssh_from": ["192.0.2.0/24"],
    }
    config: dict[str, Any] = {
        "name": name,
        "entrypoint": "train:job",
        "minibatch_size": 8,
        "steps": 1,
        "resources": {"provider": "aws"},
        "checkpoint": {"path": "saved"},
        "aws": section | changes.pop("aws", {}),
        **changes,
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config))
    return file


def rent(aws: FakeAws, job: str) -> str:
    provider = aws.provider()
    offer = next(offer for offer in provider.offers() if offer.spot)
    request = a_launch(offer, token=job, job=job, intent="intent-0", lease_s=60)
    (vm,) = provider.launch(request).vms
    return vm.vm_id


# --- before launch --------------------------------------------------------------------


@pytest.mark.rotated
def test_a_launch_reports_its_findings_and_what_happens_during_sleep(
    aws: FakeAws, tmp_path: Path
) -> None:
    lines, rented = machines.check_machines(load_config(job_file(aws, tmp_path)))
    offers, *_, asleep = lines
    assert rented
    assert offers == "aws: 1 offer in 1 zone"
    assert asleep == (
        "if this machine sleeps or goes offline, VMs keep training for 600 s "
        "(manager.lease_s), then save a checkpoint and end themselves; 'spottrain "
        "resume job' continues from there"
    )
    assert aws.ask("left") == []


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"aws": {"regions": ["eu-nowhere-7"]}}, CloudError, "not an enabled region"),
    ({"aws": {"image": "ami-00000000"}}, CloudError, "image us-east-1"),
    ({"aws": {"zones": ["us-east-1f"]}}, CapacityError, "no spot price is known for"),
    ({"budget": {"max_usd_per_hour": 0.01}}, BudgetError, "does not pay for one"),
]


@pytest.mark.rotated
@pytest.mark.parametrize(("changes", "kind", "told"), REFUSED)
def test_what_cannot_be_rented_is_refused_before_money_is_spent(
    aws: FakeAws,
    tmp_path: Path,
    changes: dict[str, Any],
    kind: type[Exception],
    told: str,
) -> None:
    config = load_config(job_file(aws, tmp_path, **changes))
    with pytest.raises(kind, match=told):
        machines.check_machines(config)
    assert not any(
        r["operation"] == "RunInstances" and "DryRun" not in r["body"] for r in aws.ask("requests")
    )


@pytest.mark.rotated
def test_what_one_region_or_family_lacks_is_reported_and_leaves_the_others(
    aws: FakeAws, tmp_path: Path
) -> None:
    aws.ask("quota", code=QUOTA, vcpus=0)
    section = {"instance_types": [KIND, "p4d.24xlarge"]}
    lines, rented = machines.check_machines(load_config(job_file(aws, tmp_path, aws=section)))
    assert rented
    told = "aws quota us-east-1 G and VT spot: 0 virtual CPUs: nothing can be rented"
    assert any(line.startswith(told) for line in lines), lines
    alone = load_config(job_file(aws, tmp_path, name="alone"))
    with pytest.raises(CloudError, match="G and VT spot: 0 virtual CPUs"):
        machines.check_machines(alone)


# --- doctor ---------------------------------------------------------------------------


def test_doctor_says_one_line_each_and_ends_with_0(aws: FakeAws, tmp_path: Path, run: Run) -> None:
    code, out, _ = run("doctor", str(job_file(aws, tmp_path)))
    lines = out.splitlines()
    assert code == 0, out
    (warning,) = (line for line in lines if not line.startswith("ok "))
    assert warning.startswith("warn here traffic between VMs: ")
    assert "NOT encrypted" in warning
    assert "ok   aws SSH: VMs will accept SSH from 192.0.2.0/24" in lines


def test_doctor_names_what_is_wrong_and_ends_with_6(aws: FakeAws, tmp_path: Path, run: Run) -> None:
    aws.ask("quota", code=QUOTA, vcpus=0)
    code, out, _ = run("doctor", str(job_file(aws, tmp_path)), "-o", "json")
    findings = json.loads(out)["findings"]
    wrong = [each for each in findings if each["status"] == "failed"]
    assert {each["ok"] for each in wrong} == {False}
    assert code == 6
    assert [each["what"] for each in wrong] == [f"quota {REGION} G and VT spot"]


def test_doctor_does_not_fail_for_clouds_that_nobody_has_logged_in_to(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    code, out, _ = run("doctor", "-o", "json")
    found = {each["provider"]: each for each in json.loads(out)["findings"]}
    assert code == 0
    assert {name: found[name]["status"] for name in ("aws", "azure", "gcp")} == dict.fromkeys(
        ("aws", "azure", "gcp"), "unused"
    )
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\n")
    code, out, _ = run("doctor")
    assert code == 6
    assert "FAIL aws credentials: " in out
    assert "-    gcp credentials: " in out


def test_doctor_takes_a_job_without_a_cloud_too(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "{name: job, entrypoint: 'train:job', minibatch_size: 8, steps: 1, "
        "secrets: [NOBODY_HAS_SET_THIS], checkpoint: {path: /proc/nowhere}}"
    )
    code, out, _ = run("doctor", str(file))
    assert code == 6
    assert "FAIL here secrets: secrets: NOBODY_HAS_SET_THIS " in out
    assert "FAIL here checkpoints: checkpoint.path: " in out
    assert "ok   local machines: " in out


# --- gc -------------------------------------------------------------------------------


def test_gc_shows_orphans_and_returns_them_only_on_request(
    aws: FakeAws, tmp_path: Path, run: Run
) -> None:
    vm_id = rent(aws, "lost")
    asked = ("gc", str(job_file(aws, tmp_path)))
    code, out, err = run(*asked)
    assert code == 0
    assert vm_id in out
    assert "1 VM " in err
    assert "another may manage it" in run(*asked, "--yes")[2]
    assert aws.ask("left") != []
    code, out, _ = run(*asked, "--job", "lost", "--yes", "-o", "json")
    document = json.loads(out)
    assert document["returned"] is True
    assert [vm["vm_id"] for vm in document["vms"]] == [vm_id]
    assert aws.ask("left") == []
    assert "0 VMs without a manager here" in run(*asked)[2]


@pytest.mark.rotated
def test_gc_leaves_managed_jobs_and_those_not_named_alone(
    aws: FakeAws, tmp_path: Path, run: Run
) -> None:
    mine, named, other = (rent(aws, job) for job in ("mine", "named", "other"))
    managed = job_dir("mine")
    managed.path.mkdir(parents=True)
    file = str(job_file(aws, tmp_path))
    with managed.locked(ManagerError("there is another one")):
        shown = json.loads(run("gc", file, "-o", "json")[1])["vms"]
        assert {vm["vm_id"] for vm in shown} == {named, other}
        run("gc", file, "--job", "named", "--job", "mine", "--yes")
    live = {vm.vm_id for vm in aws.provider().list_all() if vm.state == "running"}
    assert live == {mine, other}


def test_gc_reports_which_cloud_it_could_not_ask(aws: FakeAws, tmp_path: Path, run: Run) -> None:
    aws.ask("expire", expired=True)
    code, _, err = run("gc", str(job_file(aws, tmp_path)))
    assert code == AuthError.exit_code
    assert "aws: not asked: AWS, asking for regions: RequestExpired" in err


# --- several clouds -------------------------------------------------------------------


def test_of_several_clouds_one_that_can_be_used_is_enough(
    aws: FakeAws, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_SUBSCRIPTION_ID", raising=False)
    azure = {"gpus": ["A10"], "ssh_from": ["192.0.2.0/24"]}
    wanted: dict[str, Any] = {"resources": {"provider": ["azure", "aws"]}}
    wanted["azure"] = azure
    file = job_file(aws, tmp_path, **wanted)
    lines, offers = machines.check_machines(load_config(file))
    assert lines[0].startswith("continuing without this cloud: azure")
    assert lines[1:3] == [
        "aws: 1 offer in 1 zone",
        "aws: VMs will accept SSH from 192.0.2.0/24",
    ]
    assert offers is not None
    assert {offer.cloud for offer in offers} == {"aws"}
    told = json.loads(run("doctor", str(file), "-o", "json")[1])["findings"]
    found = {(each["provider"], each["ok"]) for each in told}
    assert {("azure", False), ("aws", True)} <= found
    assert ("aws", False) not in found


def test_ssh_finds_the_cloud_of_a_vm_among_several(aws: FakeAws, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {
        "resources": {"provider": ["aws", "gcp"]},
        "gcp": {"gpus": ["L4"], "project": "p"},
    }
    (tmp_path / "train.py").write_text("")
    job = submit(load_config(job_file(aws, tmp_path, **wanted)), FACTS)[0]
    vm_id = rent(aws, "job")
    instance_id = vm_id.split(".")[1]
    aws.ask("console", instance_id=instance_id, keys="ssh-ed25519 AAAAC3Nza root@vm")
    argv = ssh_argv(job, vm_id, ["true"])
    assert argv[argv.index("-i") + 1] == str(job.cloud / "ssh_key")


# --- ssh ------------------------------------------------------------------------------


def submitted(aws: FakeAws, folder: Path) -> JobDir:
    (folder / "train.py").write_text("")
    return submit(load_config(job_file(aws, folder)), FACTS)[0]


@pytest.mark.rotated
def test_ssh_accepts_no_key_but_those_that_the_cloud_shows(aws: FakeAws, tmp_path: Path) -> None:
    job, vm_id = submitted(aws, tmp_path), rent(aws, "job")
    with pytest.raises(CloudError, match="is still booting"):
        ssh_argv(job, vm_id, [])
    key = "ssh-ed25519 AAAAC3Nza"
    instance_id = vm_id.split(".")[1]
    aws.ask("console", instance_id=instance_id, keys=f"{key} root@vm")
    argv = ssh_argv(job, vm_id, ["nvidia-smi", "-L"])
    assert argv[-2:] == ["nvidia-smi", "-L"]
    assert argv[-4] == "--"
    assert argv[argv.index("-i") + 1] == str(job.cloud / "ssh_key")
    assert "StrictHostKeyChecking=yes" in argv
    known = (job.path / "known_hosts").read_text()
    assert known == f"{argv[-3]} {key}\n"


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_ssh_goes_through_the_bastion_with_the_keys_of_the_job_file(
    tmp_path: Path,
) -> None:
    job = JobDir(tmp_path / "a job")
    job.path.mkdir()
    hosts = []
    for name in ("vm", "bastion"):
        folder = tmp_path / name
        folder.mkdir()
        keygen(folder / "key")
        hosts.append(Sshd(folder / "sshd", folder / "key"))
    vm, door = hosts
    user = getpass.getuser()
    with ExitStack() as stack:
        for host in hosts:
            host.folder.mkdir()
            host.start()
            stack.callback(host.stop)
        target = SshTarget(host=vm.address, port=vm.port, user=user, host_keys=(vm.host_key,))
        bastion = BastionConfig(
            address=door.address,
            port=door.port,
            host_key=door.host_key,
            key_file=str(door.key_file.rename(job.path / "the key")),
        )

        def enters(bastion: BastionConfig) -> subprocess.CompletedProcess[str]:
            argv = argv_to(job, target, vm.key_file, bastion, ["echo", "$HOME"])
            return subprocess.run(argv, capture_output=True, text=True, check=False)

        assert enters(bastion).stdout == f"{vm.home}\n"
        other = bastion.model_copy(update={"host_key": vm.host_key})
        assert "Host key verification failed" in enters(other).stderr
        known = tmp_path / "known"
        known.write_text(f"[{door.address}]:{door.port} {door.host_key}\n")
        listed = {"host_key": None, "known_hosts": str(known)}
        assert enters(bastion.model_copy(update=listed)).returncode == 0
        assert enters(bastion.model_copy(update={"key_file": None})).returncode == 255


def test_ssh_asks_which_vm_is_meant(aws: FakeAws, tmp_path: Path) -> None:
    job = submitted(aws, tmp_path)
    with pytest.raises(ConfigError, match="job job has no VMs now"):
        choose_vm(job, None)


def test_an_unknown_profile_of_credentials_is_reported_in_one_line(
    aws: FakeAws, tmp_path: Path
) -> None:
    config = load_config(job_file(aws, tmp_path, aws={"profile": "nobody"}))
    with pytest.raises((CloudError, MisconfiguredError), match="nobody"):
        machines.check_machines(config)
