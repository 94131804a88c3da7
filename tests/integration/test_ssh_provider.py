"""Own hosts as a provider, on real sshd: who gets a host, and what goes wrong on the way."""

from __future__ import annotations

import hashlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_launch
from tests.contract.ssh_account import empty_workdir
from tests.fakes.sshd import WHY_NOT, Sshd
from tests.fakes.web import serve_web
from tests.integration.jobs import until
from tests.integration.ssh_hosts import (
    kill_vms,
    ssh_hosts,
    unanswered,
    vm_processes,
)

from spottrain.cloud.data.request import DataRequest, to_json
from spottrain.cloud.port.errors import CloudError, NoCapacityError, VmNotFoundError
from spottrain.cloud.port.provider import LaunchRequest, Vm, VmState
from spottrain.cloud.ssh.hosts.provider import SshProvider
from spottrain.cloud.ssh.transport.hosts import (
    Payload,
    SetupError,
    UnreachableHostError,
)

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

NOBODY = unanswered()


@dataclass
class Site:
    """Two hosts, and the jobs that want them."""

    folder: Path
    hosts: list[Sshd]
    providers: list[SshProvider] = field(default_factory=list)

    def provider(self, job: str = "job", **payload: Any) -> SshProvider:
        fleet = [host.host(f"h{n}") for n, host in enumerate(self.hosts)]
        what = Payload(workdir=empty_workdir(self.folder), **payload)
        made = SshProvider(self.folder / f"{job}-cloud", job, fleet, what)
        self.providers.append(made)
        return made


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ssh_hosts(tmp_path / "hosts", 2) as hosts:
        site = Site(tmp_path, hosts)
        yield site
        for provider in site.providers:
            provider.close()


def wish(provider: SshProvider, job: str = "job", count: int = 1) -> LaunchRequest:
    return a_launch(
        provider.offers()[0],
        count,
        token=uuid.uuid4().hex,
        job=job,
        intent=f"intent-{uuid.uuid4().hex[:8]}",
        lease_s=60.0,
    )


def state_of(provider: SshProvider, vm: Vm) -> VmState:
    listed = {x.vm_id: x.state for x in provider.list_vms("job")}
    return listed[vm.vm_id]


def test_two_jobs_never_share_a_host(site: Site) -> None:
    ours, theirs = site.provider(), site.provider("other")
    ours.launch(wish(ours, count=2))
    with pytest.raises(NoCapacityError, match="taken by job job"):
        theirs.launch(wish(theirs, "other"))
    assert theirs.list_vms("other") == ()


@pytest.mark.rotated
def test_the_same_name_on_another_machine_is_another_job(site: Site) -> None:
    ours = site.provider()
    (vm,) = ours.launch(wish(ours)).vms
    fleet = [host.host(f"h{n}") for n, host in enumerate(site.hosts)]
    payload = Payload(workdir=empty_workdir(site.folder))
    elsewhere = SshProvider(site.folder / "elsewhere", "job", fleet, payload)
    site.providers.append(elsewhere)
    assert elsewhere.list_vms("job") == ()
    assert sum(offer.available or 0 for offer in elsewhere.offers()) == 1
    assert state_of(ours, vm) is VmState.RUNNING


def test_a_claim_whose_answer_was_lost_is_found_by_its_intent(site: Site) -> None:
    before = site.provider()
    request = wish(before)
    (vm,) = before.launch(request).vms
    memory = site.folder / "job-cloud" / "ssh.json"
    text = memory.read_text().replace(request.token, "never-answered")
    memory.write_text(text)
    before.close()
    assert site.provider().launch(request).vms == (vm,)


def test_an_agent_that_dies_frees_its_host(site: Site) -> None:
    provider = site.provider()
    (vm,) = provider.launch(wish(provider)).vms
    provider.start_agent(vm.vm_id, NOBODY)
    assert vm_processes(site.hosts)
    kill_vms(site.hosts)
    until("it is seen", lambda: state_of(provider, vm) is VmState.TERMINATED)
    assert [host.left() for host in site.hosts] == [[], []]
    assert (site.folder / "job-cloud" / "vms" / vm.vm_id / "agent.log").exists()


@pytest.mark.rotated
def test_an_agent_ended_by_a_signal_leaves_no_process_even_with_nobody_there(
    site: Site,
) -> None:
    provider = site.provider()
    (vm,) = provider.launch(wish(provider)).vms
    provider.start_agent(vm.vm_id, NOBODY)
    provider.close()
    for pid in vm_processes(site.hosts):
        if b"varuna_manager.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    until("all have ended", lambda: not vm_processes(site.hosts))
    again = site.provider()
    until("it is seen", lambda: state_of(again, vm) is VmState.TERMINATED)
    assert [host.left() for host in site.hosts] == [[], []]


def test_a_host_that_is_away_keeps_its_vm_until_it_is_back(site: Site) -> None:
    provider = site.provider()
    (vm,) = provider.launch(wish(provider)).vms
    provider.start_agent(vm.vm_id, NOBODY)
    host = next(h for h in site.hosts if h.left())
    host.stop()
    assert state_of(provider, vm) is VmState.RUNNING
    with pytest.raises(UnreachableHostError, match=r"refused|connection lost"):
        provider.terminate([vm.vm_id])
    assert vm_processes([host])
    host.start()

    def ended() -> bool:
        try:
            provider.terminate([vm.vm_id])
        except CloudError:
            return False
        return state_of(provider, vm) is VmState.TERMINATED

    until("it can be ended", ended)
    assert vm_processes([host]) == []
    assert host.left() == []


@pytest.mark.rotated
def test_a_memory_of_a_host_that_is_away_outlives_its_manager(site: Site) -> None:
    before = site.provider()
    (vm,) = before.launch(wish(before)).vms
    before.close()
    for host in site.hosts:
        host.stop()
    assert site.provider().list_vms("job") == (vm,)


def test_a_claim_left_over_by_a_job_is_taken_when_it_expires(site: Site) -> None:
    theirs = site.provider("other")
    theirs.launch(wish(theirs, "other", count=2))
    for host in site.hosts:
        claim = host.home / ".spottrain" / "claim.json"
        text = claim.read_text()
        expires = text.split('"expires_at": ')[1].split(",")[0]
        claim.write_text(text.replace(expires, str(time.time() - 1)))
    ours = site.provider()
    assert len(ours.launch(replace(wish(ours), count=2)).vms) == 2


def test_setup_that_fails_is_the_users_and_says_so(site: Site) -> None:
    provider = site.provider(setup="echo before\necho no such wheel >&2\nfalse\necho no")
    (vm,) = provider.launch(wish(provider)).vms
    with pytest.raises(
        SetupError, match="setup ended with 1: no such wheel; fix setup: in the job"
    ) as failed:
        provider.start_agent(vm.vm_id, NOBODY)
    assert failed.value.exit_code == 3
    assert failed.value.traceback == "before\nno such wheel\n"
    provider.terminate([vm.vm_id])
    log = site.folder / "job-cloud" / "vms" / vm.vm_id / "setup.log"
    assert log.read_text() == "before\nno such wheel\n"


@pytest.mark.rotated
def test_setup_that_hangs_is_ended(site: Site) -> None:
    provider = site.provider(setup="sleep 1000", setup_limit_s=0.3)
    (vm,) = provider.launch(wish(provider)).vms
    with pytest.raises(SetupError, match=r"setup took longer than 0\.3 s"):
        provider.start_agent(vm.vm_id, NOBODY)
    until("it dies of its signal", lambda: not vm_processes(site.hosts))


def test_data_is_fetched_once_a_host_and_stays_there(site: Site) -> None:
    with serve_web() as web:
        web.files["/words"] = b"hello"
        sha256 = hashlib.sha256(b"hello").hexdigest()
        words = DataRequest(name="words", url=f"{web.url}/words", sha256=sha256)
        own = DataRequest(name="own", path=str(site.folder))
        provider = site.provider(
            data=to_json([words, own]),
            setup="cat $SPOTTRAIN_DATA_WORDS; ls $SPOTTRAIN_DATA_OWN",
        )
        logs = []
        for _ in range(2):
            (vm,) = provider.launch(wish(provider)).vms
            provider.start_agent(vm.vm_id, NOBODY)
            provider.terminate([vm.vm_id])
            logs.append(site.folder / "job-cloud" / "vms" / vm.vm_id)
        assert [log.joinpath("setup.log").read_text()[:5] for log in logs] == [
            "hello",
            "hello",
        ]
        assert "words: is cached" in (logs[1] / "data.log").read_text()
        assert web.gets() == [""]
        assert sorted(host.left() for host in site.hosts) == [[], [".spottrain-data"]]


@pytest.mark.rotated
def test_data_that_is_not_there_is_the_users_and_what_is_away_may_come(
    site: Site,
) -> None:
    with serve_web() as web:
        web.files["/words"] = b"hello"
        sha256 = hashlib.sha256(b"hello").hexdigest()
        words = DataRequest(name="words", url=f"{web.url}/words", sha256=sha256)
        provider = site.provider(data=to_json([words]))
        (vm,) = provider.launch(wish(provider)).vms
        web.says = 503
        with pytest.raises(CloudError, match=r"data is not ready yet: .* answered 503"):
            provider.start_agent(vm.vm_id, NOBODY)
        web.says = 403
        with pytest.raises(SetupError, match=r"^host h\d .*: data words .* answered 403"):
            provider.start_agent(vm.vm_id, NOBODY)
        web.says = None
        provider.start_agent(vm.vm_id, NOBODY)


@pytest.mark.rotated
def test_a_vm_that_is_ended_during_its_setup_is_gone(site: Site) -> None:
    provider = site.provider(setup="touch ../begun; sleep 1000")
    (vm,) = provider.launch(wish(provider)).vms
    host = next(h for h in site.hosts if h.left())
    begun = host.home / ".spottrain" / vm.vm_id / "begun"
    second = site.provider(setup="touch ../begun; sleep 1000")
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(provider.start_agent, vm.vm_id, NOBODY)
        until("setup begins", begun.exists)
        second.terminate([vm.vm_id])
        with pytest.raises(VmNotFoundError):
            start.result(60)
    assert host.left() == []


def test_a_host_that_forwards_no_ports_says_so(tmp_path: Path) -> None:
    with ssh_hosts(tmp_path / "hosts", 1, "AllowTcpForwarding no") as hosts:
        site = Site(tmp_path, hosts)
        provider = site.provider()
        (vm,) = provider.launch(wish(provider)).vms
        with pytest.raises(VmNotFoundError, match="set AllowTcpForwarding yes"):
            provider.start_agent(vm.vm_id, NOBODY)
        assert hosts[0].left() == []
        with pytest.raises(NoCapacityError, match="refuses to forward ports"):
            provider.launch(wish(provider))
        provider.close()
