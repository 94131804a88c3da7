"""First launches: the core and its workers in virtual time, over the
production adapters and the fake clouds, which refuse what the services refuse."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import aws, azure, gcp
from tests.simulation.fake_clouds import CLOUDS, FakeCloud
from tests.simulation.market import Cloud, SimulatedVm
from tests.simulation.test_simulation import SPEC, settings
from tests.simulation.world import World

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import (
    LaunchRequest,
    Quota,
    ReleasesJob,
    ReportsQuota,
    Vm,
    VmState,
)
from spottrain.pricing.billing.money import Money
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.quotas import with_quotas
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.daemon.effects import refusal_of

BUDGET_USD = 40.0
BUSY_S, IDLE_S = 120.0, 1800.0
"""Between two polls, with and without VMs."""
QUOTA_VMS = 4
STEPS = 40
ATTACHED_USD = 0.027
"""Of a VM's disk and address, an hour."""
DELETION_S = {"aws": 0.0, "azure": 60.0, "gcp": 5.0}
"""How far the ledger may be off for a VM: Azure and GCP delete for a moment, and say
when that was only after the lists have forgotten the VM, when the job may be over."""
DAY_S = 86400.0
_SPOT_USD = {"aws": aws.SPOT_USD, "azure": azure.SPOT_USD, "gcp": gcp.SPOT_USD}
_DEARER_USD = {"us-east-1b": 0.01, "us-east-1c": 0.02}
"""What these zones cost more, as ``aws_cloud`` says."""
_BILLED_S = {"aws": 1, "azure": 60, "gcp": 1}
"""Billed time is rounded up to it; a VM is billed for a minute at least."""
_STOCK = {
    "aws": [
        {"zone": zone, "instance_type": aws.KIND}
        for zone in ("us-east-1a", "us-east-1b", "us-east-1c")
    ],
    "azure": [
        {"zone": zone, "instance_type": azure.KIND} for zone in ("eastus-1", "eastus-2")
    ],
    "gcp": [{"zone": gcp.ZONE, "kind": gcp.KIND}],
}
_PER_VM = {
    name: catalogue().types[name, kind].vcpus
    for name, kind in (("aws", aws.KIND), ("azure", azure.KIND))
}
_QUOTA: dict[str, dict[str, Any]] = {
    "aws": {"code": "L-3819A6DF", "vcpus": QUOTA_VMS * _PER_VM["aws"]},
    "azure": {
        "region": azure.REGION,
        "family": "lowPriorityCores",
        "vcpus": QUOTA_VMS * _PER_VM["azure"],
    },
    "gcp": {"metric": "PREEMPTIBLE_NVIDIA_A100_GPUS", "limit": QUOTA_VMS},
}


class Story(World):
    """A job whose VMs are those of a fake cloud, rented by its adapter.

    Args:
        fake: The cloud.
        changes: Of the job's settings.
    """

    busy_s = BUSY_S

    def __init__(self, fake: FakeCloud, **changes: Any) -> None:
        given = settings(**{"max_usd": BUDGET_USD} | changes)
        self.max_usd: float = changes.get("max_usd", BUDGET_USD)
        super().__init__(1, given, Cloud(capacity={}, prices={}))
        self.fake = fake
        self.name = given.spec.name
        self.now_s = time.time()
        self._passed_s = 0.0
        self.uid = given.uid
        self.provider = self.connect()
        self.quotas_known: Sequence[Quota] | None = None

    def connect(self) -> Any:
        """Return a client, as a new manager has one."""
        return self.fake.connect(
            lambda: self.now_s, uid=self.uid, attached_usd_per_hour=ATTACHED_USD
        )

    def sync(self) -> None:
        """Let the cloud's clock catch up with ours."""
        ahead_s = self.now_s - time.time() - self._passed_s
        if ahead_s > 0:
            self.fake.ask("pass_time", seconds=ahead_s)
            self._passed_s += ahead_s

    def start_manager(self) -> None:
        # A new process has a new client, which knows nothing.
        self.provider = self.connect()
        super().start_manager()

    def listing(self) -> tuple[Vm, ...]:
        self.sync()
        vms = tuple(self.provider.list_vms(self.name))
        for vm in vms:
            known = self.cloud.vms.get(vm.vm_id)
            if known is None:
                known = SimulatedVm(vm.vm_id, vm.intent, vm.offer, vm.launched_at_s)
                self.cloud.vms[vm.vm_id] = known
            if vm.state is VmState.TERMINATED:
                self.end_vm(vm.vm_id)
        for vm_id in self.cloud.vms.keys() - {vm.vm_id for vm in vms}:
            self.end_vm(vm_id)
        return vms

    def quotas(self) -> Sequence[Quota]:
        """Return the quotas of the account."""
        assert isinstance(self.provider, ReportsQuota)
        return self.provider.quotas()

    def poll(self, *, force: bool = False) -> None:
        epoch = self.epoch
        if not self.manager_alive:
            return
        vms = self.listing()
        if self.quotas_known is None:
            self.quotas_known = self.quotas()
        offers = with_quotas(self.provider.offers(), self.quotas_known, catalogue())
        self.feed(e.OffersSeen(at_s=self.now_s, offers=tuple(offers)))
        if vms != self.listed or force:
            self.listed = vms
            self.feed(e.VmsListed(at_s=self.now_s, asked_at_s=self.now_s, vms=vms))

        def again() -> None:
            if epoch == self.epoch:
                self.poll()

        idle = not (self.state.vms or self.state.intents)
        self.after(IDLE_S if idle else self.busy_s, again)

    def launch(self, command: c.LaunchVms) -> None:
        self.sync()
        request = LaunchRequest(
            token=command.token,
            job=self.name,
            intent=command.intent,
            offer=command.offer,
            count=command.count,
            lease_s=SPEC.lease_s,
        )
        try:
            vms = self.provider.launch(request).vms
        except CloudError as error:
            refused = e.LaunchRefused(
                at_s=self.now_s,
                intent=command.intent,
                reason=str(error),
                refusal=refusal_of(error),
            )
            self.feed(refused)
            return
        self.listing()
        self.feed(e.VmsLaunched(at_s=self.now_s, intent=command.intent, vms=vms))

    def terminate(self, vm_ids: tuple[str, ...]) -> None:
        self.sync()
        self.provider.terminate(vm_ids)
        vms = tuple(vm for vm in self.listing() if vm.vm_id in vm_ids)
        self.feed(e.VmsReturned(at_s=self.now_s, vm_ids=vm_ids, vms=vms))

    def release(self) -> None:
        """Remove what the VMs shared, as the manager does at the end; some clouds say
        only now when the last VMs ended.
        """
        self.fake.ask("pass_time", seconds=1.0)  # deletions take a moment
        self.now_s += 1.0
        assert isinstance(self.provider, ReleasesJob)
        for _ in range(2):
            vms = self.listing()
            self.feed(e.VmsReturned(at_s=self.now_s, vm_ids=(), vms=vms))
            self.provider.release(self.name)
        assert self.fake.ask("left") == []

    def most_at_once(self) -> int:
        """Return the most VMs that the cloud ever billed at the same time."""
        rows = self.fake.bill()
        return max(
            sum(r.from_s <= row.from_s < (r.until_s or row.from_s + 1) for r in rows)
            for row in rows
        )

    def refusals(self) -> list[str]:
        """Return why launches were refused."""
        return [x.refusal for x in self.journal if isinstance(x, e.LaunchRefused)]

    def billed_usd(self) -> Decimal:
        """Return what the cloud's bill comes to, with disks and addresses."""
        name, usd = self.fake.name, Decimal(0)
        unit_s = _BILLED_S[name]
        for row in self.fake.bill():
            assert row.until_s is not None, f"{row.vm_id} is rented still"
            lasted_s = max(60, math.ceil((row.until_s - row.from_s) / unit_s) * unit_s)
            zone = self.cloud.vms[row.vm_id].offer.zone
            parts = (_SPOT_USD[name], _DEARER_USD.get(zone, 0.0), ATTACHED_USD)
            rate = sum((Decimal(repr(part)) for part in parts), Decimal(0))
            usd += rate * lasted_s / 3600
        return usd

    def check_end(self) -> None:
        """It trained, within its budget, and left nothing behind; its ledger is the
        cloud's bill: on AWS to the micro-dollar, elsewhere within ``DELETION_S``.
        """
        assert self.finished is not None, self.state.activity
        assert self.state.progress.step == self.state.job.spec.steps
        self.release()
        ledger = self.state.ledger
        assert not ledger.open
        spent = ledger.spent(self.now_s)
        assert spent <= Money.allowed(self.max_usd)
        apart = math.ceil(self.billed_usd() * 10**6) - spent.microusd
        last = len(self.fake.bill()) if self.fake.name != "aws" else 0
        dearest = max(vm.offer.usd_per_hour for vm in self.cloud.vms.values())
        assert abs(apart) <= last * dearest * 1e6 / 3600 * DELETION_S[self.fake.name]


def limited(fake: FakeCloud) -> None:
    """Give the account the quotas of a new one, enough for a few VMs."""
    fake.ask("quota", **_QUOTA[fake.name])
    if fake.name == "gcp":
        fake.ask("quota", metric="GPUS_ALL_REGIONS", limit=QUOTA_VMS)


def stocked(fake: FakeCloud, count: int) -> None:
    for zone in _STOCK[fake.name]:
        fake.ask("stock", **zone, count=count)


@pytest.fixture(params=CLOUDS)
def fake(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCloud]:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path))
    with CLOUDS[request.param]() as fake:
        stocked(fake, 20)
        yield fake


@pytest.mark.timeout(300)
def test_a_new_account_with_a_quota_of_4_trains_on_4_though_16_are_wanted(
    fake: FakeCloud,
) -> None:
    limited(fake)
    story = Story(fake, max_vms=16, spec=replace(SPEC, steps=STEPS))
    story.run()
    story.check_end()
    assert story.most_at_once() == QUOTA_VMS
    assert "quota" not in story.refusals(), "nothing was asked for in vain"


class Week(Story):
    """A job that takes a week, looked at every half an hour."""

    busy_s = 7200.0


@pytest.mark.timeout(300)
def test_a_week_with_a_restart_and_an_eviction_every_day(fake: FakeCloud) -> None:
    if fake.name == "aws":
        pytest.skip("moto takes a minute for a week; the other clouds take seconds")
    story = Week(
        fake,
        max_vms=2,
        max_usd=500.0,
        spec=replace(SPEC, steps=100, minibatch_size=1536, checkpoint_every_steps=2),
    )

    def strike() -> None:
        if story.finished is not None:
            return
        alive = [vm for vm in story.cloud.vms.values() if vm.alive]
        if alive:
            story.sync()
            fake.evict(alive[0].vm_id)
            story.end_vm(alive[0].vm_id)
        story.kill_manager(down_s=600.0)
        story.after(DAY_S, strike)

    story.after(DAY_S / 2, strike)
    story.run(until_s=14 * DAY_S)
    story.check_end()
