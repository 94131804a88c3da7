"""The files for the VM of a manager."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.launch.manager.bundle import (
    bundle,
    needed,
    pinned,
    prepare_script,
    root_of,
    software,
)


def names_in(archive: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return set(tar.getnames())


def test_our_software_comes_with_its_tables() -> None:
    names = names_in(software())
    assert "spottrain/errors.py" in names
    assert "spottrain/varuna_manager/daemon/watchdog.py" in names
    assert "spottrain/pricing/prices/data/instances.csv" in names


def test_a_bundle_has_the_job_and_no_secret_but_the_key_to_its_vms(tmp_path: Path) -> None:
    job = JobDir(tmp_path / "far")
    (job.path / "cloud").mkdir(parents=True)
    for name in (
        "facts.json",
        "workdir.tar.gz",
        "journal.sqlite",
        "measurements.sqlite",
        "folder.id",
        "identity.pem",
        "away.json",
        "cloud/ssh_key",
    ):
        (job.path / name).write_text(name)
    packed = bundle(job, b"{}", {"cloud/ssh_key": b"key", "vm.json": b"{}"})
    assert {name.removeprefix("jobs/far/") for name in names_in(packed)} == {
        "config.json",
        "facts.json",
        "workdir.tar.gz",
        "journal.sqlite",
        "measurements.sqlite",
        "folder.id",
        "cloud/ssh_key",
        "vm.json",
        "market.sqlite",
    }


def test_only_the_named_extras_of_what_is_needed_counts() -> None:
    lines = [
        "numpy>=1.26",
        "uvloop>=0.19; sys_platform != 'win32'",
        "boto3>=1.34; extra == 'aws'",
        'google-cloud-compute>=1.56; extra == "gcp"',
        "moto[server]<5.3,>=5.2; extra == 'dev'",
    ]
    lines.append("wandb>=0.19; extra == 'wandb'")
    assert needed(lines, ("aws",)) == ["numpy", "uvloop", "boto3"]
    assert needed(lines, ("gcp", "wandb")) == [
        *("numpy", "uvloop", "google-cloud-compute", "wandb")
    ]


def test_versions_are_those_of_this_machine() -> None:
    pins = pinned(("aws",))
    assert {"pydantic", "boto3", "paramiko"} <= pins.keys()
    assert all(number[0].isdigit() for number in pins.values())


def prepared(home: Path, python: str) -> subprocess.CompletedProcess[bytes]:
    ours = software()
    script = prepare_script(root_of(".spottrain"), python, ("aws",), ours)
    return subprocess.run(
        ["/bin/sh", "-c", script],
        check=False,
        input=ours,
        capture_output=True,
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
    )


@pytest.mark.rotated
def test_a_python_that_has_all_is_taken_as_it_is_and_runs_our_modules(
    tmp_path: Path,
) -> None:
    for _ in range(2):  # it may be repeated
        done = prepared(tmp_path, sys.executable)
        assert done.returncode == 0, done.stderr
    root = tmp_path / ".spottrain" / "manager"
    assert not (root / "venv").exists()
    ran = subprocess.run(
        [root / "run", "spottrain.varuna_manager.cli.main", "--version"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout.startswith("spottrain ")


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c "
        '"import sys; sys.version_info = (3, 10); exec(sys.argv[1])" "$2"\n'
    )
    old.chmod(0o700)
    done = prepared(tmp_path, str(old))
    assert done.returncode != 0
    last = done.stderr.decode().strip().splitlines()[-1]
    assert last == "manager_vm.python: needs Python 3.11 or newer"


def command(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o700)


def test_a_package_that_is_missing_is_waited_for_while_the_image_installs_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    installed, locked = tmp_path / "installed", tmp_path / "locked"
    locked.touch()
    venv = "mkdir -p venv/bin; cp {0}/ok venv/bin/python; cp {0}/ok venv/bin/pip"
    command(folder, "ok", "exit 0")
    command(folder, "cloud-init", f"echo cloud-init $* >> {log}")
    command(folder, "sleep", f"rm -f {locked}")
    command(
        folder,
        "sudo",
        f"echo $* >> {log}; [ ! -e {locked} ] || exit 100; "
        f"case $* in *install*) touch {installed};; esac",
    )
    command(
        folder,
        "bare",  # a Python that has nothing
        f"case $* in *importlib*) exit 1;; *venv*) [ -e {installed} ] || exit 1; "
        f"{venv.format(folder)};; esac",
    )
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    done = prepared(tmp_path, str(folder / "bare"))
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines() == [
        "cloud-init status --wait",
        "apt-get -qq update",
        "apt-get -qq update",
        "apt-get -qq -o DPkg::Lock::Timeout=300 install -y python3-venv",
    ]


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_each_cloud_has_its_sdk_in_what_is_needed(cloud: str) -> None:
    sdk = {"aws": "boto3", "azure": "azure-mgmt-compute", "gcp": "google-cloud-compute"}
    assert sdk[cloud] in pinned((cloud,))
