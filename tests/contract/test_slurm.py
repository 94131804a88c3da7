"""What Slurm does beyond the contract of all providers: queues, lost answers, notices."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.account import Account
from tests.contract.slurm_account import account_on, slurm
from tests.fakes.slurm import NODES, WHY_NO_ACCOUNTS, WHY_NO_SLURM, Slurm, a_slurm
from tests.integration.ssh_hosts import unanswered

from spottrain.cloud.notices.file import VARIABLE, FileSource
from spottrain.cloud.port.errors import (
    CloudError,
    MisconfiguredError,
    NoCapacityError,
    QueuedError,
    QuotaExceededError,
)
from spottrain.cloud.port.provider import CloudProvider, Vm, VmState
from spottrain.cloud.slurm.login import Login
from spottrain.cloud.slurm.provider import SlurmProvider
from spottrain.cloud.slurm.settings import SlurmSettings

pytestmark = [
    pytest.mark.rotated(parts=[4]),
    pytest.mark.skipif(bool(WHY_NO_SLURM), reason=WHY_NO_SLURM),
]


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[Account]:
    yield from slurm(request)


def impatient(account: Account) -> SlurmProvider:
    """Return a client that says at once what waits in the queue."""
    provider = account.connect()
    assert isinstance(provider, SlurmProvider)
    provider.start_s = 1.0
    return provider


def states(provider: CloudProvider) -> dict[str, VmState]:
    return {vm.vm_id: vm.state for vm in provider.list_vms("job")}


def until_refused(account: Account, provider: CloudProvider) -> None:
    """Launch until the scheduler has looked at a batch job, and says why it waits."""
    request = account.launch_request(provider.offers()[0])
    while True:
        try:
            provider.launch(request)
        except QueuedError as error:
            if "not considered" not in str(error):
                raise


def until_listed(provider: CloudProvider, state: VmState, count: int) -> list[Vm]:
    """Return the VMs in a state once they are so many."""
    while True:
        found = [vm for vm in provider.list_vms("job") if vm.state is state]
        if len(found) == count:
            return found
        time.sleep(0.2)


def test_what_finds_no_free_node_waits_and_starts_by_itself(here: Account, cluster: Slurm) -> None:
    other = cluster.occupy("urgent", NODES - 1)
    provider = here.connect()
    request = here.launch_request(provider.offers()[0], 2)
    with pytest.raises(
        QueuedError, match="partition preempt: 1 batch job in the queue: "
    ) as refusal:
        provider.launch(request)
    assert refusal.value.retry_after_s > 0
    until_listed(provider, VmState.RUNNING, 1)
    (waiting,) = until_listed(provider, VmState.QUEUED, 1)
    assert waiting.intent == request.intent
    assert waiting.why
    cluster.ask("scancel", other)
    until_listed(provider, VmState.RUNNING, 2)
    ids = {vm.vm_id for vm in provider.launch(request).vms}
    assert ids == states(provider).keys()


def test_what_waits_can_be_withdrawn(here: Account, cluster: Slurm) -> None:
    cluster.occupy("urgent", NODES)
    provider = impatient(here)
    with pytest.raises(QueuedError):
        provider.launch(here.launch_request(provider.offers()[0]))
    provider.terminate(states(provider))
    assert states(provider) == {}, "it never was a VM"


def test_a_manager_that_dies_after_sbatch_leaves_no_double(
    here: Account, cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of ``sbatch`` is lost: Slurm has the job, its caller does not know."""
    provider = here.connect()
    request = here.launch_request(provider.offers()[0], 2)
    programs = tmp_path / "programs"
    programs.mkdir()
    lossy = programs / "sbatch"
    lossy.write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]} sbatch "$@" && exit 1\n')
    lossy.chmod(0o700)
    with monkeypatch.context() as cut:
        cut.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        with pytest.raises(CloudError):
            provider.launch(request)
    assert len(cluster.jobs()) == 1
    second = here.connect()
    ids = {vm.vm_id for vm in second.launch(request).vms}
    assert len(ids) == len(cluster.jobs()) == 2
    assert states(second).keys() == ids


@pytest.mark.nightly
def test_a_launch_whose_batch_job_slurm_has_forgotten_is_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a manager dies before it has noted its answer, and is away for long."""
    with a_slurm(tmp_path / "cluster", "MinJobAge=2") as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        for account in account_on(cluster, tmp_path):
            first = account.connect()
            request = account.launch_request(first.offers()[0])
            (vm,) = first.launch(request).vms
            cluster.ask("scancel", vm.vm_id.removeprefix("slurm."))
            while first.list_vms("job"):
                time.sleep(1.0)
            with pytest.raises(NoCapacityError):
                account.connect().launch(request)
            assert cluster.jobs() == []


@pytest.mark.nightly
@pytest.mark.skipif(bool(WHY_NO_ACCOUNTS), reason=WHY_NO_ACCOUNTS)
def test_how_and_when_a_forgotten_batch_job_ended_is_known_where_accounts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_slurm(tmp_path / "cluster", "MinJobAge=2", keeps_accounts=True) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        for account in account_on(cluster, tmp_path):
            first = account.connect()
            (vm,) = first.launch(account.launch_request(first.offers()[0])).vms
            number = vm.vm_id.removeprefix("slurm.")
            cluster.ask("scancel", number)
            while cluster.ask("squeue", "-h", "--states=all", f"--user={getpass.getuser()}"):
                time.sleep(1.0)
            for provider in (first, account.connect()):
                (ended,) = provider.list_vms("job")
                assert ended.state is VmState.TERMINATED
                assert ended.vm_id == vm.vm_id
                assert ended.why == "cancelled with scancel, by its owner or an administrator"
                assert ended.ended_at_s is not None
                assert vm.launched_at_s <= ended.ended_at_s <= time.time() - 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("set_up", "told"),
    [
        (
            (
                *("create", "reservation", "ReservationName=works", "StartTime=now"),
                *("Duration=60", "Nodes=ALL", "Users=root", "Flags=MAINT,IGNORE_JOBS"),
            ),
            "Reserved for maintenance",
        ),
        (("update", "NodeName=n[1-4]", "State=DRAIN", "Reason=works"), "UnavailableNodes|DRAINED"),
    ],
    ids=["maintenance", "drained nodes"],
)
def test_where_no_node_may_be_used_it_is_said_why(
    here: Account, cluster: Slurm, set_up: tuple[str, ...], told: str
) -> None:
    provider = impatient(here)
    (vm,) = here.connect().launch(here.launch_request(provider.offers()[0])).vms
    cluster.ask("scontrol", *set_up)
    try:
        with pytest.raises(QueuedError, match=told):
            until_refused(here, provider)
        assert states(provider)[vm.vm_id] is VmState.RUNNING, "what runs is left alone"
    finally:
        if set_up[0] == "create":
            cluster.ask("scontrol", "delete", "ReservationName=works")
        else:
            cluster.ask("scontrol", "update", "NodeName=n[1-4]", "State=RESUME")


@pytest.mark.nightly
def test_a_full_queue_is_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_slurm(tmp_path / "cluster", "MaxJobCount=2") as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        for account in account_on(cluster, tmp_path):
            cluster.occupy("urgent")
            provider = account.connect()
            with pytest.raises(QuotaExceededError, match="temporarily unable to accept job"):
                provider.launch(account.launch_request(provider.offers()[0], 3))
            assert len(cluster.jobs()) < 3


@pytest.mark.nightly
def test_a_vm_that_uses_too_much_memory_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cgroups Slurm calls it FAILED, and says why in the output alone."""
    lines = (
        *("JobAcctGatherType=jobacct_gather/linux", "JobAcctGatherFrequency=1"),
        *("JobAcctGatherParams=OverMemoryKill", "SelectTypeParameters=CR_Core_Memory"),
    )
    with a_slurm(tmp_path / "cluster", *lines) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        for account in account_on(cluster, tmp_path, options=("--mem=10",)):
            provider = account.connect()
            provider.launch(account.launch_request(provider.offers()[0]))
            (ended,) = until_listed(provider, VmState.TERMINATED, 1)
            assert ended.why == "killed: it used more memory than was asked for"


def test_a_time_limit_is_announced_before_it_ends_the_vm(
    here: Account, cluster: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    provider = here.connect()
    (vm,) = provider.launch(here.launch_request(provider.offers()[0])).vms
    number = vm.vm_id.removeprefix("slurm.")
    cluster.ask("scancel", "--batch", "--signal=USR1", number)
    (own,) = tmp_path.glob(f"node's own/spottrain-*/{number}/{vm.vm_id}")
    monkeypatch.setenv(VARIABLE, str(own / "notice.json"))
    source = FileSource()
    while (found := source.ask().notice) is None:
        time.sleep(0.1)
    assert found.lead_s > 3600, "its limit is two hours"


def test_nothing_is_left_on_a_node_that_is_given_back(here: Account, tmp_path: Path) -> None:
    provider = here.connect()
    (vm,) = provider.launch(here.launch_request(provider.offers()[0])).vms
    provider.start_agent(vm.vm_id, unanswered())
    places = f"node's own/spottrain-*/{vm.vm_id.removeprefix('slurm.')}"
    assert list(tmp_path.glob(places))
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert not list(tmp_path.glob(places))
    assert list(tmp_path.glob(f"cloud/vms/{vm.vm_id}/agent.log"))


def test_everything_of_this_user_can_be_found(here: Account) -> None:
    provider = here.connect()
    (vm,) = provider.launch(here.launch_request(provider.offers()[0])).vms
    found = {one.vm_id: one for one in here.connect().list_all()}[vm.vm_id]
    assert (found.job, found.uid, found.owner) == ("job", vm.uid, provider.principal())


def test_a_wrong_partition_is_refused_before_anything_is_launched(
    here: Account, tmp_path: Path
) -> None:
    login = Login(SlurmSettings(partitions=("none",), folder=str(tmp_path)))
    with pytest.raises(MisconfiguredError, match="partition"):
        login.would_take("none")
    assert here.connect().offers()
    assert login.would_take("preempt").startswith("would start a job at ")
