"""VMs from one job to another on AWS's fake, whose VMs are real SSH servers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.builders import a_launch
from tests.contract.ssh_account import empty_workdir
from tests.fakes.aws import REGION, FakeAws, running
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import AwsVms, aws_vms
from tests.integration.jobs import until
from tests.integration.ssh_hosts import unanswered

from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.port.provider import (
    Vm,
    VmState,
)
from spottrain.cloud.process import tree
from spottrain.cloud.ssh.rented.provider import RentedVmProvider
from spottrain.cloud.ssh.rented.reserved import ReservedVms
from spottrain.cloud.ssh.rented.vm import VmAccess
from spottrain.cloud.ssh.transport.hosts import Payload
from spottrain.cloud.ssh_keys import ensure_key
from spottrain.pricing.billing.ledger import Ledger
from spottrain.varuna_manager.launch.providers import moves_at

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

NOBODY = unanswered("secret-token-of-the-first-job")
LEASE_S = 60.0


@dataclass
class Client:
    """One job's provider, opened anew by whoever says so."""

    cloud: AwsVms
    name: str

    @property
    def folder(self) -> Path:
        return self.cloud.folder / self.name

    def open(self, **settings: object) -> RentedVmProvider:
        """Return one more provider of the job, as after a death of its manager."""
        key, public_key = ensure_key(self.folder)
        known = {**self.cloud.settings(), "public_key": public_key}
        made = RentedVmProvider(
            self.cloud.fake.provider(uid=f"uid-{self.name}", **known, **settings),
            self.folder,
            self.name,
            Payload(workdir=empty_workdir(self.cloud.folder)),
            VmAccess(key_file=key, python=sys.executable),
            moves_at=moves_at,
        )
        self.cloud.providers.append(made)
        return made

    def rent(self, provider: RentedVmProvider) -> Vm:
        request = a_launch(
            provider.offers()[0],
            token=uuid.uuid4().hex,
            job=self.name,
            intent=f"intent-{uuid.uuid4().hex[:8]}",
            lease_s=LEASE_S,
        )
        (vm,) = provider.launch(request).vms
        return vm

    def vms(self, provider: RentedVmProvider) -> dict[str, Vm]:
        return {vm.vm_id: vm for vm in provider.list_vms(self.name)}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeAws]:
    with running() as fake:
        yield fake


@pytest.fixture
def cloud(tmp_path: Path, fake: FakeAws) -> Iterator[AwsVms]:
    with aws_vms(tmp_path, fake) as cloud:
        yield cloud
        assert fake.ask("drifts") == []


@dataclass
class Kept:
    """A VM that one job keeps, and another one that may take it."""

    first: Client
    second: Client
    giver: RentedVmProvider
    taker: RentedVmProvider
    vm: Vm

    def take(
        self,
        order: str = "1-a",
        until_s: float = 30.0,
        taker: RentedVmProvider | None = None,
    ) -> Vm:
        taker = taker or self.taker
        until_s += time.time()
        return taker.take(self.vm.vm_id, self.first.folder, order, until_s)


@pytest.fixture
def kept(cloud: AwsVms) -> Kept:
    first, second = Client(cloud, "first"), Client(cloud, "second")
    giver, taker = first.open(), second.open()
    vm = first.rent(giver)
    until("it answers", lambda: cloud.fake.ask("shown_keys", instance_id=id_of(vm)))
    clear(giver, vm)
    return Kept(first, second, giver, taker, vm)


def id_of(vm: Vm) -> str:
    return vm.vm_id.split(".")[1]


def clear(provider: RentedVmProvider, vm: Vm) -> None:
    provider.clear(vm.vm_id, LEASE_S)


def release(provider: RentedVmProvider, job: str) -> None:
    provider.release(job)


def is_billed_once(fake: FakeAws, *sides: Vm) -> None:
    """The ledgers of all jobs together have what the cloud bills, to the micro-dollar."""
    (line,) = fake.ask("bill")
    billed_us = max(60.0, line["ended_at"] - line["launched_at"]) * 1e6
    ledger = Ledger()
    for vm in sides:
        assert vm.ended_at_s is not None
        ledger = ledger.opened(
            vm.vm_id,
            vm.offer,
            on_demand_usd_per_hour=1.0,
            launched_at_s=vm.launched_at_s,
            seen_at_s=vm.launched_at_s,
            is_part=bool(tags.order_of(vm.intent)),
        ).ended(vm.vm_id, vm.ended_at_s)
    spent = ledger.spending(0)
    assert spent.billed_us == billed_us
    dollars = sides[0].offer.usd_per_hour * billed_us / 3600
    assert spent.total.microusd == pytest.approx(dollars, abs=1.0)


def test_a_cleared_vm_has_nothing_of_its_job_and_starts_the_others_agent(
    cloud: AwsVms,
) -> None:
    first, second = Client(cloud, "first"), Client(cloud, "second")
    giver, taker = first.open(), second.open()
    vm = first.rent(giver)
    giver.start_agent(vm.vm_id, NOBODY)
    (cloud.home(vm) / ".spottrain-data").mkdir()
    assert groups_of(vm)
    clear(giver, vm)
    clear(giver, vm)  # again: nothing is left to do
    assert list(cloud.home(vm).iterdir()) == []
    assert not groups_of(vm)
    taken = Kept(first, second, giver, taker, vm).take()
    assert taken.vm_id == f"{vm.vm_id}.1"
    assert (taken.job, taken.uid) == ("second", "uid-second")
    assert tags.order_of(taken.intent) == "1-a"
    steps = taker.start_agent(taken.vm_id, NOBODY)
    assert {"software", "agent"} <= {step.name for step in steps}
    assert groups_of(taken)
    taker.terminate([taken.vm_id])
    before, after = first.vms(giver)[vm.vm_id], second.vms(taker)[taken.vm_id]
    assert before.state is after.state is VmState.TERMINATED
    assert before.ended_at_s == after.launched_at_s
    is_billed_once(cloud.fake, before, after)


def groups_of(vm: Vm) -> frozenset[int]:
    """Return what runs for a job on a VM."""
    return tree.groups([vm.vm_id])


def test_one_order_gets_it_once_and_no_other(kept: Kept) -> None:
    taken = kept.take()
    assert kept.take() == taken
    assert kept.take(until_s=-3600.0) == taken, "it came: whenever that is asked"
    third = Client(kept.first.cloud, "third").open()
    for taker in (third, kept.taker):
        with pytest.raises(VmNotFoundError):
            kept.take("2-b", taker=taker)
    assert taken.vm_id in kept.second.vms(kept.taker)


def test_who_gave_it_cannot_end_it_and_both_know_after_a_restart(kept: Kept, cloud: AwsVms) -> None:
    taken = kept.take()
    for giver in (kept.giver, kept.first.open()):
        giver.terminate([kept.vm.vm_id])
        seen = kept.first.vms(giver)[kept.vm.vm_id]
        assert (seen.state, seen.ended_at_s) == (
            VmState.TERMINATED,
            taken.launched_at_s,
        )
    release(kept.giver, "first")
    taker = kept.second.open()
    assert kept.second.vms(taker)[taken.vm_id] == replace(taken, image="")
    taker.start_agent(taken.vm_id, NOBODY)
    taker.terminate([taken.vm_id])
    release(taker, "second")
    assert cloud.fake.ask("left") == []


@pytest.mark.rotated
def test_it_goes_on_from_job_to_job(kept: Kept, cloud: AwsVms) -> None:
    taken = kept.take()
    clear(kept.taker, taken)
    back = Kept(kept.second, kept.first, kept.taker, kept.giver, taken).take("3-c")
    assert back.vm_id == f"{kept.vm.vm_id}.2"
    kept.giver.start_agent(back.vm_id, NOBODY)
    first = kept.first.vms(kept.giver)
    assert first[kept.vm.vm_id].state is VmState.TERMINATED
    assert first[back.vm_id].state is VmState.RUNNING
    kept.giver.terminate([back.vm_id])
    first, second = kept.first.vms(kept.giver), kept.second.vms(kept.taker)
    is_billed_once(cloud.fake, first[kept.vm.vm_id], second[taken.vm_id], first[back.vm_id])


@pytest.mark.rotated
@pytest.mark.parametrize("kind", ["drop", "lost"])
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_an_answer_that_is_lost_leaves_one_owner_and_one_bill(
    kept: Kept, cloud: AwsVms, kind: str, passes: int
) -> None:
    """Of three requests, each in turn is not carried out, or not answered."""
    cloud.fake.ask("cut", after=passes, carried_out=kind == "lost")
    with pytest.raises(CloudError) as lost:
        kept.take()
    assert not isinstance(lost.value, VmNotFoundError)
    cloud.fake.ask("heal")
    first, second = kept.first.vms(kept.first.open()), kept.second.vms(kept.taker)
    ours = first.get(kept.vm.vm_id)
    assert (ours is not None and ours.state.is_alive) != bool(second), "one owner"
    known = ReservedVms(kept.first.folder).find(kept.vm.vm_id)
    taken = kept.take()
    assert known is None or known.moves_at_s in (0.0, taken.launched_at_s)
    kept.taker.terminate([taken.vm_id])
    before = kept.first.vms(kept.first.open())[kept.vm.vm_id]
    is_billed_once(cloud.fake, before, kept.second.vms(kept.taker)[taken.vm_id])


def test_what_was_returned_or_is_late_is_not_given(kept: Kept, cloud: AwsVms) -> None:
    with pytest.raises(VmNotFoundError):
        kept.take(until_s=-1.0)
    kept.giver.terminate([kept.vm.vm_id])
    with pytest.raises(VmNotFoundError):
        kept.take()
    assert kept.second.vms(kept.taker) == {}
    ended = kept.first.vms(kept.giver)[kept.vm.vm_id]
    assert ended.state is VmState.TERMINATED
    is_billed_once(cloud.fake, ended)


@pytest.mark.rotated
def test_an_order_that_failed_leaves_it_to_the_one_that_keeps_it(kept: Kept, cloud: AwsVms) -> None:
    cloud.fake.ask("cut", after=0, carried_out=False)
    with pytest.raises(CloudError):
        kept.take(until_s=0.5)
    cloud.fake.ask("heal")
    with pytest.raises(VmNotFoundError):
        kept.take(until_s=-3600.0)
    giver = kept.first.open()
    assert kept.first.vms(giver)[kept.vm.vm_id].state is VmState.RUNNING
    giver.terminate([kept.vm.vm_id])
    is_billed_once(cloud.fake, kept.first.vms(giver)[kept.vm.vm_id])
    assert cloud.fake.ask("switched_on") == []


@pytest.mark.rotated
def test_a_vm_of_another_image_or_network_is_not_taken(kept: Kept, cloud: AwsVms) -> None:
    backend = cloud.fake.ask("users_own_network", region=REGION, zone="us-east-1a")
    subnet, group = backend
    apart = kept.second.open(subnets={"us-east-1a": subnet}, security_groups=(group,))
    with pytest.raises(VmNotFoundError, match="network"):
        kept.take(taker=apart)
    other = kept.second.open(image="ami-00000901")
    with pytest.raises(VmNotFoundError, match="image"):
        kept.take(taker=other)
    assert kept.first.vms(kept.giver)[kept.vm.vm_id].state is VmState.RUNNING


@pytest.mark.rotated
@pytest.mark.parametrize("denied", ["ModifyInstanceAttribute", "CreateTags"])
def test_without_permission_it_is_returned_and_rented(
    kept: Kept, cloud: AwsVms, denied: str
) -> None:
    cloud.fake.ask("deny", operation=denied)
    with pytest.raises(VmNotFoundError, match=r"permissions\.md"):
        kept.take()
    kept.giver.terminate([kept.vm.vm_id])
    is_billed_once(cloud.fake, kept.first.vms(kept.giver)[kept.vm.vm_id])


@pytest.mark.rotated
@pytest.mark.parametrize("moved", [False, True])
def test_whoever_dies_while_it_moves_lets_go_of_it(kept: Kept, cloud: AwsVms, moved: bool) -> None:
    """The taker's process is killed right before or after the VM becomes its own."""
    victim = cloud.folder / "victim.json"
    cloud.fake.ask(
        "fail",
        operation="CreateTags",
        kind="late kill",
        after=int(moved),  # the tags of its disk come first
        victim=str(victim),
    )
    program = TAKE.format(
        folder=str(cloud.folder),
        server=cloud.fake.url.rpartition(":")[2],
        port=cloud.port,
        victim=str(victim),
        vm_id=kept.vm.vm_id,
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL
    giver = kept.first.open()
    giver.terminate([kept.vm.vm_id])
    assert bool(cloud.fake.ask("switched_on")) == moved
    sides = [kept.first.vms(giver)[kept.vm.vm_id]]
    if moved:
        (seen,) = kept.second.vms(kept.taker).values()
        assert replace(kept.take(), image="") == seen
        kept.taker.terminate([seen.vm_id])
        sides.append(kept.second.vms(kept.taker)[seen.vm_id])
    is_billed_once(cloud.fake, *sides)


TAKE = """
import json, os, time
from pathlib import Path
from tests.fakes.aws import FakeAws
from tests.integration.aws_vms import AwsVms
from tests.integration.test_rented_hand_over import Client

cloud = AwsVms(Path({folder!r}), FakeAws({server}), {port})
Path({victim!r}).write_text(json.dumps({{"pid": os.getpid()}}))
taker = Client(cloud, "second").open()
giver = Path({folder!r}) / "first"
taker.take({vm_id!r}, giver, "1-a", time.time() + 30, "")
"""
"""What a manager does that takes a VM over."""
