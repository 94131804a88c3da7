"""Rented VMs brought up over SSH: AWS's fake, whose VMs are real SSH servers."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl

import pytest
from tests.fakes.aws import FakeAws, running
from tests.fakes.machines import connections_to, lease_file, systemctl
from tests.fakes.package_index import PackageIndex
from tests.fakes.sshd import WHY_NOT, Sshd, keygen
from tests.integration.aws_vms import AwsVms, aws_vms, wish
from tests.integration.jobs import until
from tests.integration.ssh_hosts import unanswered

from spottrain.cloud.port import lease
from spottrain.cloud.port.errors import CloudError, MisconfiguredError, VmNotFoundError
from spottrain.cloud.port.provider import (
    AgentBootstrap,
    CloudProvider,
    StartStep,
    Vm,
    VmState,
)
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.cloud.ssh.rented.provider import RentedVmProvider
from spottrain.cloud.ssh.transport import session
from spottrain.cloud.ssh.transport.hosts import Published, SetupError
from spottrain.varuna_manager.jobs.identity import Identity, ensure_identity

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

SECRET = "secret-token-of-one-vm"
NOBODY = unanswered(SECRET)
Started = dict[str, StartStep]
PREPARATION = ("software", "workdir", "packages", "setup", "agent")
SOON_S = 15.0
"""Far less than any deadline of a start."""


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeAws]:
    with running() as fake:
        yield fake


@pytest.fixture
def cloud(tmp_path: Path, fake: FakeAws) -> Iterator[AwsVms]:
    with aws_vms(tmp_path, fake) as cloud:
        yield cloud
        assert fake.ask("drifts") == []


class Manager:
    """A port at which calls of agents arrive."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(60)
        self.url = f"https://127.0.0.1:{self._socket.getsockname()[1]}"

    def is_called(self) -> bool:
        """Wait for a call."""
        caller, _ = self._socket.accept()
        caller.settimeout(60)
        called = bool(caller.recv(1))
        caller.close()
        return called

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class Listener(ThreadingHTTPServer):
    """A manager over TLS that notes who calls, and is not ready for anybody yet."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(("127.0.0.1", 0), _Note)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity.path)
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = f"https://127.0.0.1:{self.server_address[1]}"
        self.identity = identity
        self.callers: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Callers may break off."""


class _Note(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert isinstance(self.server, Listener)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.callers.add(body["vm_id"])
        self.send_response(503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def rent(provider: RentedVmProvider) -> Vm:
    (vm,) = provider.launch(wish(provider)).vms
    return vm


def start(provider: RentedVmProvider, vm_id: str, manager: Listener) -> None:
    """Start the agent of a VM, which is to call a manager."""
    told = AgentBootstrap(
        manager_url=manager.url,
        ca_pem=manager.identity.ca_pem,
        token=manager.identity.vm_token(vm_id),
    )
    provider.start_agent(vm_id, told)


def live(provider: RentedVmProvider) -> list[str]:
    ended = (VmState.STOPPING, VmState.TERMINATED)
    return [vm.vm_id for vm in provider.list_vms("job") if vm.state not in ended]


def test_it_can_what_its_cloud_can_and_start_agents_beside(cloud: AwsVms) -> None:
    provider = cloud.provider()
    for ability in (
        CloudProvider.start_agent,
        CloudProvider.serve,
        CloudProvider.release,
        CloudProvider.spot_pools,
        CloudProvider.clear,
    ):
        assert provider.can(ability)


def test_an_agent_is_started_once_it_boots_and_only_once(cloud: AwsVms) -> None:
    provider = cloud.provider()
    vm = rent(provider)
    for _ in range(2):
        provider.start_agent(vm.vm_id, NOBODY)
    keepers = list(cloud.home(vm).glob(".spottrain/*/agent.json"))
    assert len(keepers) == 1
    agents = [p for p in cloud.processes(vm) if b"varuna_manager.agent" in argv(p)]
    assert len(agents) == 1


def argv(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_several_agents_are_started_at_the_same_time(cloud: AwsVms) -> None:
    provider = cloud.provider()
    vms = provider.launch(wish(provider, 3)).vms
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda vm: provider.start_agent(vm.vm_id, NOBODY), vms))
    assert all(cloud.processes(vm) for vm in vms)
    assert len({cloud.home(vm) for vm in vms}) == 3


def test_a_vm_evicted_during_its_setup_is_gone_at_once(cloud: AwsVms) -> None:
    provider = cloud.provider(setup="touch ../begun; sleep 1000")
    vm = rent(provider)
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(provider.start_agent, vm.vm_id, NOBODY)
        until("its setup", lambda: list(cloud.home(vm).glob(".spottrain/*/begun")))
        began_s = time.monotonic()
        cloud.evict(vm)
        with pytest.raises(VmNotFoundError):
            start.result(60)
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.rotated
@pytest.mark.parametrize("by_us", [True, False], ids=["given back", "evicted"])
def test_a_vm_that_goes_before_it_answers_is_gone_at_once(cloud: AwsVms, by_us: bool) -> None:
    cloud.fake.reset()  # its VMs boot for ever
    provider = cloud.provider()
    vm = rent(provider)
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(provider.start_agent, vm.vm_id, NOBODY)
        until("it waits", lambda: asked_for_console(cloud))
        began_s = time.monotonic()
        if by_us:
            provider.terminate([vm.vm_id])
        else:
            cloud.evict(vm)
        with pytest.raises(VmNotFoundError):
            start.result(60)
    assert time.monotonic() - began_s < SOON_S


def asked_for_console(cloud: AwsVms) -> bool:
    asked = [one["operation"] for one in cloud.fake.ask("requests")]
    return "GetConsoleOutput" in asked


@pytest.mark.rotated
def test_an_agent_is_not_started_where_we_left(cloud: AwsVms) -> None:
    provider = cloud.provider()
    vm = rent(provider)
    provider.terminate([vm.vm_id])
    for vm_id in (vm.vm_id, "aws.i-0.us-east-1"):
        with pytest.raises(VmNotFoundError):
            provider.start_agent(vm_id, NOBODY)


def test_setup_that_fails_is_the_users_and_its_log_is_kept(cloud: AwsVms) -> None:
    provider = cloud.provider(setup="echo no such wheel >&2\nfalse")
    vm = rent(provider)
    with pytest.raises(SetupError, match="no such wheel"):
        provider.start_agent(vm.vm_id, NOBODY)
    provider.terminate([vm.vm_id])
    log = cloud.folder / "cloud" / "vms" / vm.vm_id / "setup.log"
    assert log.read_text() == "no such wheel\n"


@pytest.mark.rotated
def test_setup_may_take_longer_than_a_host_is_silent_for(
    cloud: AwsVms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CALL_S", 1.0)
    provider = cloud.provider(setup="sleep 2.5")
    vm = rent(provider)
    steps = provider.start_agent(vm.vm_id, NOBODY)
    assert {step.name: step.seconds for step in steps}["setup"] > 2.0


def test_a_vm_with_another_host_key_is_given_back(
    cloud: AwsVms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spottrain.cloud.ssh.rented.provider.HOST_KEY_S", 0.0)
    provider = cloud.provider()
    vm = rent(provider)
    other = keygen(tmp_path / "other")
    instance_id = vm.vm_id.split(".")[1]
    cloud.fake.ask("console", instance_id=instance_id, keys=other)
    with pytest.raises(VmNotFoundError, match="not the one that its cloud reports"):
        provider.start_agent(vm.vm_id, NOBODY)
    assert live(provider) == []


@pytest.mark.rotated
def test_a_host_key_that_changes_while_a_vm_boots_is_asked_for_again(
    cloud: AwsVms, tmp_path: Path
) -> None:
    """cloud-init and the guest agent may both generate keys."""
    provider = cloud.provider()
    vm = rent(provider)
    instance_id = vm.vm_id.split(".")[1]
    own = until("a host key", lambda: cloud.fake.ask("shown_keys", instance_id=instance_id))
    cloud.fake.ask("console", instance_id=instance_id, keys=keygen(tmp_path / "first"))
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(provider.start_agent, vm.vm_id, NOBODY)
        until("a refusal", lambda: "not the one" in provider._vms[vm.vm_id].log.doing)
        cloud.fake.ask("console", instance_id=instance_id, keys=own)
        start.result()
    assert live(provider) == [vm.vm_id]
    kept = HostMemory(cloud.folder / "cloud").read().targets
    assert kept[vm.vm_id].host_keys, "a console forgets, a manager restarts"


def test_an_unfit_image_is_not_rented_for_ever(cloud: AwsVms) -> None:
    provider = cloud.provider({"python": "python-of-nobody"})
    for _ in range(2):
        with pytest.raises(VmNotFoundError, match="python-of-nobody"):
            provider.start_agent(rent(provider).vm_id, NOBODY)
    with pytest.raises(MisconfiguredError, match="python-of-nobody"):
        rent(provider)
    assert live(provider) == []


def test_vms_that_would_not_end_themselves_are_given_back(
    cloud: AwsVms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "WAIT_S", 0.0)
    provider = cloud.provider()
    unfinished, failed = rent(provider), rent(provider)
    lease_file(cloud.home(unfinished).parent).unlink()
    systemctl(cloud.home(failed).parent).write_text("#!/bin/sh\necho failed; exit 3\n")
    for vm in (unfinished, failed):
        with pytest.raises(VmNotFoundError, match="would not end itself"):
            provider.start_agent(vm.vm_id, NOBODY)
    with pytest.raises(MisconfiguredError, match="would not end itself"):
        rent(provider)
    assert live(provider) == []


@pytest.mark.rotated
def test_a_boot_script_that_ends_after_the_first_login_is_waited_for(
    cloud: AwsVms,
) -> None:
    provider = cloud.provider()
    vm = rent(provider)
    file = lease_file(cloud.home(vm).parent)
    file.unlink()
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(provider.start_agent, vm.vm_id, NOBODY)
        until("a wait", lambda: "boot script" in provider._vms[vm.vm_id].log.doing)
        file.touch()
        assert start.result()
    assert live(provider) == [vm.vm_id]


def test_other_software_than_the_fleets_is_refused(cloud: AwsVms) -> None:
    provider = cloud.provider()
    memory = cloud.folder / "cloud" / "ssh.json"
    first = rent(provider)
    provider.start_agent(first.vm_id, NOBODY)
    found = json.loads(memory.read_text())
    found["software"]["torch"] = "0.1"
    memory.write_text(json.dumps(found))
    with pytest.raises(VmNotFoundError, match=r"torch .* 0\.1"):
        provider.start_agent(rent(provider).vm_id, NOBODY)
    assert live(provider) == [first.vm_id]


def test_calls_are_carried_also_of_agents_that_ran_before(cloud: AwsVms) -> None:
    identity = ensure_identity(cloud.folder, ("127.0.0.1",))
    with Manager() as before:
        provider = cloud.provider()
        provider.serve(before.url)
        vm = rent(provider)
        provider.start_agent(
            vm.vm_id,
            AgentBootstrap(
                manager_url=before.url,
                ca_pem=identity.ca_pem,
                token=identity.vm_token(vm.vm_id),
            ),
        )
        assert before.is_called()
        provider.close()
    with pytest.raises(CloudError, match="is shutting down"):
        provider.start_agent(vm.vm_id, NOBODY)
    with Manager() as after, ThreadPoolExecutor(1) as threads:
        second = cloud.provider()
        second.serve(after.url)
        call = threads.submit(after.is_called)
        until("the call", lambda: live(second) and call.done())
        assert call.result()


def only(addresses: list[str]) -> list[str]:
    """Return them if there is one."""
    return addresses if len(addresses) == 1 else []


def test_one_vm_carries_the_calls_of_all_and_another_takes_its_place(
    cloud: AwsVms,
) -> None:
    manager = Listener(ensure_identity(cloud.folder, ("127.0.0.1",)))
    try:
        provider = cloud.provider()
        provider.serve(manager.url)
        vms = {vm.vm_id: vm for vm in provider.launch(wish(provider, 3)).vms}

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda vm_id: start(provider, vm_id, manager), vms))
        until("all agents call", lambda: manager.callers == set(vms))
        (address,) = until(
            "one connection is left",
            lambda: live(provider) and only(connections_to(cloud.port)),
        )
        relay = next(
            vm
            for vm in vms.values()
            if f"ListenAddress {address}\n" in (cloud.home(vm).parent / "sshd_config").read_text()
        )
        cloud.evict(relay)
        manager.callers.clear()
        others = set(vms) - {relay.vm_id}
        until(
            "the others call again",
            lambda: set(live(provider)) == others == manager.callers,
        )
        (other,) = until("one connection is left", lambda: only(connections_to(cloud.port)))
        assert other != address
    finally:
        manager.shutdown()
        manager.server_close()


def test_a_relay_that_is_back_at_another_port_is_known_to_all(cloud: AwsVms) -> None:
    manager = Listener(ensure_identity(cloud.folder, ("127.0.0.1",)))
    try:
        provider = cloud.provider()
        provider.serve(manager.url)
        first, second = provider.launch(wish(provider, 2)).vms

        start(provider, first.vm_id, manager)
        until("its agent calls", lambda: first.vm_id in manager.callers)
        with contextlib.ExitStack() as others:
            before = relay_of(cloud, first)
            while relay_of(cloud, first) == before:
                take_port(cloud, first, before, others)
                manager.callers.clear()
                until("it calls again", lambda: live(provider) and manager.callers)
            start(provider, second.vm_id, manager)
            until("its agent calls", lambda: second.vm_id in manager.callers)
    finally:
        manager.shutdown()
        manager.server_close()


def relay_of(cloud: AwsVms, vm: Vm) -> tuple[str, int]:
    """Return where a VM's agent calls."""
    known = cloud.home(vm) / ".spottrain" / vm.vm_id / "manager.address"
    address, _, port = known.read_text().rpartition(":")
    return address, int(port)


def take_port(cloud: AwsVms, vm: Vm, port: tuple[str, int], others: contextlib.ExitStack) -> None:
    """Break the connection to a VM, and let another program have the port."""
    for pid in cloud.processes(vm):
        if b"spottrain_host_agent" in argv(pid):
            os.kill(pid, signal.SIGKILL)
    for _ in range(1000):
        with contextlib.suppress(OSError):
            other = others.enter_context(socket.create_server(port))
            others.callback(other.shutdown, socket.SHUT_RDWR)
            threading.Thread(target=refuse, args=(other,), daemon=True).start()
            return


def refuse(other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            other.accept()[0].close()


def test_vms_are_reached_through_a_bastion(cloud: AwsVms, tmp_path: Path) -> None:
    keygen(tmp_path / "bastion-key")
    bastion = Sshd(tmp_path / "bastion", tmp_path / "bastion-key", ("LogLevel VERBOSE",))
    bastion.start()
    try:
        provider = cloud.provider({"bastion": bastion.host("bastion")})
        vms = provider.launch(wish(provider, 2)).vms
        for vm in vms:
            provider.start_agent(vm.vm_id, NOBODY)
            log = (cloud.home(vm).parent / "sshd.log").read_text()
            assert "Accepted publickey" in log
        entered = (bastion.folder / "sshd.log").read_text()
        assert entered.count("Accepted publickey") == 1
        provider.terminate([vm.vm_id for vm in vms])
        provider.close()
    finally:
        bastion.stop()


def test_a_bastion_that_forwards_nothing_says_so(cloud: AwsVms, tmp_path: Path) -> None:
    keygen(tmp_path / "bastion-key")
    bastion = Sshd(tmp_path / "bastion", tmp_path / "bastion-key", ("AllowTcpForwarding no",))
    bastion.start()
    try:
        provider = cloud.provider({"bastion": bastion.host("bastion")})
        with pytest.raises(VmNotFoundError, match="set AllowTcpForwarding yes"):
            provider.start_agent(rent(provider).vm_id, NOBODY)
    finally:
        bastion.stop()


def test_no_secret_is_sent_to_the_cloud_or_written_down(cloud: AwsVms) -> None:
    environment = {"A_SECRET": "hunter2-hunter2"}
    provider = cloud.provider(environment=environment, setup="true")
    vm = rent(provider)
    provider.start_agent(vm.vm_id, NOBODY)
    argvs = [argv(pid) for pid in cloud.processes(vm)]
    provider.terminate([vm.vm_id])
    private_key = (cloud.folder / "cloud" / "ssh_key").read_text()
    sent = [text for one in cloud.fake.ask("requests") for text in texts(one["body"])]
    assert any("spottrain-lease.service" in text for text in sent)  # user data
    written = [x for x in (cloud.folder / "cloud").rglob("*") if x.is_file()]
    for secret in (SECRET, environment["A_SECRET"], private_key.splitlines()[2]):
        assert not any(secret.encode() in words for words in argvs)
        assert not any(secret in text for text in sent)
        holders = [x.name for x in written if secret in x.read_text(errors="replace")]
        assert holders == (["ssh_key"] if secret in private_key else [])


def texts(body: str) -> list[str]:
    """Return what an EC2 request says, user data decoded."""
    form = dict(parse_qsl(body))
    user_data = base64.b64decode(form.get("UserData", "")).decode()
    return [*form.values(), user_data]


def start_all(provider: RentedVmProvider, vms: Sequence[Vm]) -> dict[str, Started]:
    """Start agents at the same time; return the steps of each by name."""

    def start(vm: Vm) -> Started:
        steps = provider.start_agent(vm.vm_id, NOBODY)
        return {step.name: step for step in steps}

    with ThreadPoolExecutor(len(vms)) as threads:
        found = threads.map(start, vms)
        return {vm.vm_id: one for vm, one in zip(vms, found, strict=True)}


@pytest.mark.rotated
def test_later_vms_take_archives_from_a_vm_and_packages_from_the_bucket(
    cloud: AwsVms, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    with PackageIndex(tmp_path / "index") as index:
        index.add("tiny_thing", "1.0")
        provider = cloud.provider(
            setup=f"{sys.executable} -m pip install -q --target here tiny-thing",
            wheels=str(bucket),
            published=Published(tmp_path / "published"),
            environment=index.environment,
        )
        (first,) = provider.launch(wish(provider)).vms
        begun = start_all(provider, [first])[first.vm_id]
        assert list(begun) == ["boot", *PREPARATION]
        assert begun["software"].source == begun["workdir"].source == "manager"
        assert begun["packages"].source == ""
        assert begun["software"].num_bytes > 100_000
        until("the first one published", lambda: list(bucket.glob("*/index.json")))
        index.forget()

        later = start_all(provider, provider.launch(wish(provider, 2)).vms)
        for steps in later.values():
            assert steps["software"].source in {first.vm_id, *later}
            assert steps["workdir"].source in {first.vm_id, *later}
            assert steps["packages"].source == "bucket"
        assert index.downloads() == []
        assert len(list((tmp_path / "published").iterdir())) == 1
        assert provider.start_agent(first.vm_id, NOBODY) == (), "it runs already"


def test_an_archive_that_no_vm_can_give_is_sent(cloud: AwsVms) -> None:
    provider = cloud.provider()
    (first,) = provider.launch(wish(provider)).vms
    start_all(provider, [first])
    (archives,) = cloud.home(first).glob(".spottrain/archives")
    for archive in archives.iterdir():
        archive.write_bytes(b"not what it was")
    (later,) = provider.launch(wish(provider)).vms
    steps = start_all(provider, [later])[later.vm_id]
    assert steps["software"].source == steps["workdir"].source == "manager"
    assert cloud.processes(later)
