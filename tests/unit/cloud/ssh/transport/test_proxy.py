"""VMs behind a cloud's tool: a real SSH server, and stand-ins for the tools."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes import cloud_tools
from tests.fakes.sshd import WHY_NOT, Sshd, keygen

from spottrain.cloud.port.errors import AuthError
from spottrain.cloud.port.provider import SshTarget
from spottrain.cloud.ssh.transport.hosts import (
    Host,
    HostKeyError,
    UnfitHostError,
    UnreachableHostError,
)
from spottrain.cloud.ssh.transport.proxy import dial_through
from spottrain.cloud.ssh.transport.remote import Remote
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.clouds import (
    AnyCloud,
    AwsConfig,
    AzureConfig,
    GcpConfig,
)
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.launch.preflight import ssh_access
from spottrain.varuna_manager.launch.providers import own_network
from spottrain.varuna_manager.launch.ssh_command import argv_to

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

BASTION = "/subscriptions/S/resourceGroups/G/providers/Microsoft.Network/bastionHosts/B"
CLOUDS: tuple[tuple[AnyCloud, str], ...] = (
    (
        AwsConfig(gpus=("A10G",), ssh_proxy="ssm", instance_profile="vms"),
        "aws.i-1.us-east-1",
    ),
    (
        AzureConfig(
            gpus=("T4",),
            ssh_proxy=BASTION,
            subnets={"eastus": "/subscriptions/S/a-subnet"},
            subscription="mine",
        ),
        "azure.st-1.GROUP",
    ),
    (GcpConfig(gpus=("L4",), ssh_proxy="iap", project="p"), "gcp.st-1.us-central1-a"),
)
each_cloud = pytest.mark.parametrize(("cloud", "vm_id"), CLOUDS, ids=["aws", "azure", "gcp"])


@pytest.fixture(scope="module")
def vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("vm")
    keygen(folder / "key")
    server = Sshd(folder, folder / "key")
    server.start()
    cloud_tools.install(folder / "tools", server.port)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def tools(vm: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{vm.folder / 'tools'}:{os.environ['PATH']}")


def host_of(vm: Sshd, vm_id: str, host_key: str = "") -> Host:
    # No public address: only the tool knows the way.
    return Host(
        name=vm_id,
        address="192.0.2.1",
        user=getpass.getuser(),
        host_keys=(host_key or vm.host_key,),
        key_file=vm.key_file,
    )


def dial(cloud: AnyCloud):  # type: ignore[no-untyped-def]
    command = cloud.proxy()
    assert command is not None
    return dial_through(command)


@each_cloud
def test_commands_run_on_a_vm_behind_a_tool_which_ends_with_the_connection(
    cloud: AnyCloud, vm_id: str, vm: Sshd
) -> None:
    sockets = []

    def noted(host: Host):  # type: ignore[no-untyped-def]
        sockets.append(dial(cloud)(host))
        return sockets[-1]

    data = bytes(range(256)) * 4000
    # Of a job on several clouds, ids begin with the cloud.
    with Remote(host_of(vm, vm_id), noted) as remote:
        assert remote.check("wc -c", data).strip() == str(len(data))
        assert remote.check("echo $HOME").strip() == str(vm.home)
    (connection,) = sockets
    connection.close()
    assert connection._process.poll() is not None


@each_cloud
def test_the_host_key_is_checked_behind_a_tool_too(
    cloud: AnyCloud, vm_id: str, vm: Sshd, tmp_path: Path
) -> None:
    other = host_of(vm, vm_id, keygen(tmp_path / "other"))
    with pytest.raises(HostKeyError):
        Remote(other, dial(cloud))


@each_cloud
def test_what_a_tool_complains_of_is_the_error(
    cloud: AnyCloud, vm_id: str, vm: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOL_REFUSES", "yes")
    with pytest.raises(UnreachableHostError, match="not signed in"):
        Remote(host_of(vm, vm_id), dial(cloud))


@each_cloud
def test_spottrain_ssh_goes_through_the_tool(
    cloud: AnyCloud, vm_id: str, vm: Sshd, tmp_path: Path
) -> None:
    target = SshTarget(host="192.0.2.1", user=getpass.getuser(), host_keys=(vm.host_key,))
    job = JobDir(tmp_path)
    proxy = cloud.proxy_argv(vm_id, 22)
    argv = argv_to(job, target, vm.key_file, None, ["echo", "$HOME"], proxy)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"{vm.home}\n", 0), done.stderr


@each_cloud
def test_the_doctor_misses_a_tool(
    cloud: AnyCloud, vm_id: str, vm: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ssh_access(cloud) == f"VMs are reached with {' and '.join(cloud.proxy_tools)}"
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=f"needs the command {cloud.proxy_tools[0]}"):
        ssh_access(cloud)
    if cloud.cloud != "azure":
        with pytest.raises(UnfitHostError, match="cannot be started here"):
            Remote(host_of(vm, vm_id), dial(cloud))


def test_only_the_networks_of_the_tool_are_let_in() -> None:
    assert [own_network(cloud) for cloud, _ in CLOUDS] == [
        (),
        (),
        ("35.235.240.0/20",),
    ]


@pytest.mark.parametrize(
    ("section", "values", "missing"),
    [
        (AwsConfig, {"ssh_proxy": "ssm"}, "needs an instance_profile"),
        (AzureConfig, {"ssh_proxy": "B"}, "must be the resource id of a Bastion"),
        (AzureConfig, {"ssh_proxy": BASTION}, "needs subnets"),
        (
            GcpConfig,
            {"ssh_proxy": "iap", "bastion": {"address": "b"}},
            "ssh_proxy or bastion, not both",
        ),
    ],
)
def test_what_a_tool_needs_is_asked_for(
    section: type[AnyCloud], values: dict[str, object], missing: str
) -> None:
    with pytest.raises(ValueError, match=missing):
        section.model_validate(values)


def test_an_auth_error_is_one_behind_a_tool(vm: Sshd, tmp_path: Path) -> None:
    keygen(tmp_path / "other")
    cloud, vm_id = CLOUDS[2]
    stranger = Host(
        name=vm_id,
        address="192.0.2.1",
        user=getpass.getuser(),
        host_keys=(vm.host_key,),
        key_file=tmp_path / "other",
    )
    with pytest.raises(AuthError):
        Remote(stranger, dial(cloud))
