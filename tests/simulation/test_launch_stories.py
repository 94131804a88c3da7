"""First launches: the core and its workers in virtual time, over the
production adapters and the fake clouds, which refuse what the services refuse."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
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

    def __init__(self, fake: FakeCloud, **changes: Any) -> None:
        given = settings(max_usd=BUDGET_USD, **changes)
        super().__init__(1, given, Cloud(capacity={}, prices={}))
        self.fake = fake
        self.name = given.spec.name
        self.now_s = time.time()
        self._passed_s = 0.0
        self.provider = fake.connect(lambda: self.now_s)
        self.quotas_known: Sequence[Quota] | None = None

    def sync(self) -> None:
        """Let the cloud's clock catch up with ours."""
        ahead_s = self.now_s - time.time() - self._passed_s
        if ahead_s > 0:
            self.fake.ask("pass_time", seconds=ahead_s)
            self._passed_s += ahead_s

    def start_manager(self) -> None:
        # A new process has a new client, which knows nothing.
        self.provider = self.fake.connect(lambda: self.now_s)
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
        self.after(IDLE_S if idle else BUSY_S, again)

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

    def check_end(self) -> None:
        """It trained, within its budget to the micro-dollar, and left nothing behind."""
        assert self.finished is not None, self.state.activity
        assert self.state.progress.step == self.state.job.spec.steps
        ledger = self.state.ledger
        assert not ledger.open
        assert ledger.spent(self.now_s) <= Money.allowed(BUDGET_USD)


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


def released(fake: FakeCloud, *stories: Story) -> None:
    """Remove what jobs shared, as the manager does at the end; nothing is left."""
    fake.ask("pass_time", seconds=600.0)  # deletions take a while
    for story in stories:
        assert isinstance(story.provider, ReleasesJob)
        story.provider.release(story.name)
    assert fake.ask("left") == []
    assert all(row.until_s for row in fake.bill())


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
    released(fake, story)
