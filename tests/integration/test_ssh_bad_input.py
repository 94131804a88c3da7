"""Hosts that are not what the job file says: one clear line each, before anything begins."""

from __future__ import annotations

import sys
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.sshd import WHY_NOT, Sshd, keygen
from tests.integration.ssh_hosts import SshJob, ssh_hosts, vm_processes
from tests.view import View

from spottrain.cloud.port.errors import AuthError, CloudError
from spottrain.cloud.ssh.hosts.bootstrap import check_hosts
from spottrain.cloud.ssh.transport.hosts import Host, HostKeyError, UnfitHostError
from spottrain.errors import CapacityError

pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

OLD = "import sys; sys.version_info = (3, 8, 10, 'final', 0); exec(sys.argv.pop(1))"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sshd]]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts"), 2) as hosts:
        yield hosts


@pytest.fixture
def host(hosts: list[Sshd]) -> Host:
    return hosts[0].host("a")


def python(folder: Path, *lines: str) -> str:
    """Return a command in the place of a Python."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return str(path)


def refusal(*hosts: Host) -> CloudError:
    with pytest.raises(CloudError) as refused:
        check_hosts(hosts, min_hosts=1, needs_software=True)
    assert "\n" not in str(refused.value)
    return refused.value


def test_good_hosts_are_told_in_a_line(hosts: list[Sshd]) -> None:
    (line,) = check_hosts([h.host("a") for h in hosts], min_hosts=2, needs_software=True)
    assert line.startswith("2 of 2 hosts answer: ")
    assert "torch" in line


def test_a_host_key_that_changed_is_refused_by_name(host: Host, tmp_path: Path) -> None:
    error = refusal(replace(host, host_key=keygen(tmp_path / "other")))
    assert isinstance(error, HostKeyError)
    assert f"host a (127.0.0.1:{host.port}): its host key is not the known one" in str(error)
    assert "change host_key" in str(error)


def test_known_hosts_are_believed_and_never_added_to(host: Host, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    asking = replace(host, host_key=None, known_hosts=known)
    assert isinstance(refusal(asking), HostKeyError)
    assert not known.exists()
    known.write_text(f"[127.0.0.1]:{host.port} {keygen(tmp_path / 'other')}\n")
    assert isinstance(refusal(asking), HostKeyError)
    known.write_text(f"[127.0.0.1]:{host.port} {host.host_key}\n")
    check_hosts([asking], min_hosts=1, needs_software=True)


def test_a_host_key_that_is_none_is_refused(host: Host) -> None:
    for text in ("", "ssh-ed25519", "ssh-ed25519 AAAA", "rot13 AAAA", "ssh-rsa ä"):
        assert "host_key must be 'type base64'" in str(refusal(replace(host, host_key=text)))


def test_a_key_that_opens_nothing_is_named(host: Host, tmp_path: Path) -> None:
    keygen(tmp_path / "stranger")
    error = refusal(replace(host, key_file=tmp_path / "stranger"))
    assert isinstance(error, AuthError)
    assert f"with {tmp_path / 'stranger'}; check user and key_file" in str(error)
    assert "No such file" in str(refusal(replace(host, key_file=tmp_path / "none")))


def test_a_host_without_python_is_unfit(host: Host) -> None:
    error = refusal(replace(host, python="/no/such/python3"))
    assert isinstance(error, UnfitHostError)
    assert "has no /no/such/python3; install Python 3.11 or newer" in str(error)


def test_a_host_with_an_old_python_is_unfit(host: Host, tmp_path: Path) -> None:
    old = python(tmp_path, f'shift; exec {sys.executable} -c "{OLD}" "$@"')
    error = refusal(replace(host, python=old))
    assert "has Python 3.8.10, needs 3.11 or newer; name another" in str(error)


def test_a_python_that_fails_is_unfit(host: Host, tmp_path: Path) -> None:
    broken = python(tmp_path, "echo libpython is missing >&2; exit 1")
    assert "ended with 1: libpython is missing" in str(refusal(replace(host, python=broken)))


@pytest.mark.parametrize("said", ["welcome\\n", "no end of line", '{"id": 0}\\n'])
def test_what_a_login_shell_prints_does_no_harm(tmp_path: Path, said: str) -> None:
    command = f"printf '{said}'; exec sh -c \"$SSH_ORIGINAL_COMMAND\""
    with ssh_hosts(tmp_path, 1, f"ForceCommand {command}") as (talking,):
        (line,) = check_hosts([talking.host("a")], min_hosts=1, needs_software=True)
        assert line.startswith("1 of 1 hosts answer")


def test_a_login_shell_that_ends_at_once_is_unfit(tmp_path: Path) -> None:
    with ssh_hosts(tmp_path, 1, "ForceCommand exit 0") as (ending,):
        error = refusal(ending.host("a"))
        assert isinstance(error, UnfitHostError)
        assert "login shell" in str(error)


def test_a_host_without_torch_is_unfit(host: Host, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    bare = replace(host, python=str(tmp_path / "bare" / "bin" / "python"))
    assert "its Python has no torch, numpy, safetensors; install it there" in str(refusal(bare))
    check_hosts([bare], min_hosts=1, needs_software=False)


@pytest.mark.rotated
def test_another_torch_than_the_other_hosts_have_is_unfit(host: Host, tmp_path: Path) -> None:
    metadata = tmp_path / "torch-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    other = python(tmp_path, f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    error = refusal(host, replace(host, name="b", python=other))
    assert "host b (" in str(error)
    assert "torch 1.0" in str(error)


def test_hosts_that_are_away_are_told_unless_too_few_are_left(host: Host) -> None:
    away = replace(host, name="b", port=1)
    first, last = check_hosts([host, away], min_hosts=1, needs_software=True)
    assert "host b (127.0.0.1:1)" in first
    assert last.startswith("1 of 2 hosts answer")
    with pytest.raises(CapacityError, match=r"1 of 2 hosts answer, .*min_vms is 2"):
        check_hosts([host, away], min_hosts=2, needs_software=True)


@pytest.mark.rotated
def test_launch_refuses_a_changed_host_key(hosts: list[Sshd], tmp_path: Path) -> None:
    with SshJob(tmp_path, "changed", hosts) as job:
        other = keygen(tmp_path / "other")
        job.file.write_text(job.file.read_text().replace(hosts[1].host_key, other))
        answer = job.launch()
    assert answer.code == 6
    assert f"127.0.0.1:{hosts[1].port}" in answer.error
    assert not job.dir.path.exists()


def test_launch_refuses_a_secret_that_is_not_there(hosts: list[Sshd], tmp_path: Path) -> None:
    with SshJob(tmp_path, "secretive", hosts, secrets=["NOT_THERE"]) as job:
        answer = job.launch()
    assert answer.code == 2
    assert answer.error.startswith("error: secrets: NOT_THERE ")


@pytest.mark.rotated
def test_a_job_whose_setup_fails_ends_with_exit_code_3(hosts: list[Sshd], tmp_path: Path) -> None:
    with SshJob(tmp_path, "unset", hosts, setup="echo no wheel; exit 7") as job:
        answer = job.launch()
    assert answer.code == 3
    assert "setup ended with 7: no wheel" in answer.err
    assert View(job.state()).tally.preemptions_unnoticed == 0
    assert vm_processes(hosts) == []
    assert [host.left() for host in hosts] == [[], []]
