"""Stories of launches: the core and its workers in virtual time, over the production
adapters and the fake clouds, which refuse what the services refuse."""

from __future__ import annotations

import getpass
import math
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from tests.builders import a_launch
from tests.contract.ssh_account import empty_workdir
from tests.fakes import aws, azure, gcp
from tests.integration.aws_vms import free_port
from tests.integration.ssh_hosts import unanswered
from tests.simulation.fake_clouds import FakeCloud, Row
from tests.simulation.market import Cloud, SimulatedVm
from tests.simulation.test_simulation import SPEC, settings
from tests.simulation.world import World

from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.port.provider import (
    CloudProvider,
    Quota,
    Vm,
    VmState,
)
from spottrain.cloud.ssh.rented.provider import ANSWER_S, RentedVmProvider
from spottrain.cloud.ssh.rented.vm import VmAccess
from spottrain.cloud.ssh.transport.hosts import Payload
from spottrain.cloud.ssh_keys import ensure_key
from spottrain.pricing.billing.money import HOUR_US, Money
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.quotas import with_quotas
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.daemon.effects import refusal_of

BUDGET_USD = 40.0
BUSY_S, IDLE_S = 120.0, 1800.0
"""Between two polls, with and without VMs."""
ATTACHED_USD = 0.027
"""Of a VM's disk and address, an hour."""
_NOBODY = unanswered()
_PATIENCE_S = ANSWER_S
"""For which a VM is called in vain, in virtual time."""
_SPOT_USD = {"aws": aws.SPOT_USD, "azure": azure.SPOT_USD, "gcp": gcp.SPOT_USD}
_DEARER_USD = {"us-east-1b": 0.01, "us-east-1c": 0.02}
"""What these zones cost more, as ``aws_cloud`` says."""
_BILLED_S = {"aws": 1, "azure": 60, "gcp": 1}
"""Billed time is rounded up to it; a VM is billed for a minute at least."""


class Clock:
    """The time of a fake cloud, which follows that of its jobs.

    Args:
        fake: The cloud.
    """

    def __init__(self, fake: FakeCloud) -> None:
        self._fake = fake
        self._passed_s = 0.0

    def catch_up(self, now_s: float) -> None:
        """Let the cloud's time be no less than a job's."""
        ahead_s = now_s - time.time() - self._passed_s
        if ahead_s > 0:
            self._fake.ask("pass_time", seconds=ahead_s)
            self._passed_s += ahead_s


class Story(World):
    """A job whose VMs are those of a fake cloud, rented by its adapter.

    Args:
        fake: The cloud.
        clock: Of the cloud, if several jobs share it.
        owner: Whose job it is.
        changes: Of the job's settings.
    """

    busy_s = BUSY_S

    def __init__(
        self,
        fake: FakeCloud,
        clock: Clock | None = None,
        *,
        owner: str = "",
        **changes: Any,
    ) -> None:
        given = settings(**{"max_usd": BUDGET_USD, "shares": True} | changes)
        self.max_usd: float = changes.get("max_usd", BUDGET_USD)
        super().__init__(1, given, Cloud(capacity={}, prices={}))
        self.fake = fake
        self.clock = clock or Clock(fake)
        self.alone = clock is None
        self.name = given.spec.name
        self.now_s = time.time()
        self.identity = {"uid": given.uid, "owner": owner}
        self.provider = self.connect()
        self.quotas_known: Sequence[Quota] | None = None

    def connect(self) -> Any:
        """Return a client, as a new manager has one."""
        return self.adapter()

    def adapter(self, **more: Any) -> CloudProvider:
        """Return the cloud's own adapter."""
        return self.fake.connect(
            lambda: self.now_s,
            **self.identity,
            **more,
            attached_usd_per_hour=ATTACHED_USD,
        )

    def sync(self) -> None:
        """Let the cloud's clock catch up with ours."""
        self.clock.catch_up(self.now_s)

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
        quotas: Sequence[Quota] = self.provider.quotas()
        return quotas

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
            self.feed_list(vms)

        def again() -> None:
            if epoch == self.epoch:
                self.poll()

        idle = not (self.vms or self.intents)
        self.after(IDLE_S if idle else self.busy_s, again)

    def feed_list(self, vms: tuple[Vm, ...]) -> None:
        """Say what the cloud lists."""
        self.listed = vms
        self.feed(e.VmsListed(at_s=self.now_s, asked_at_s=self.now_s, vms=vms))

    def perform(self, command: c.Command) -> None:
        if isinstance(command, c.ReleaseJob):
            self.soon(self.release)
        else:
            super().perform(command)

    def launch(self, command: c.LaunchVms) -> None:
        self.sync()
        request = a_launch(
            command.offer,
            command.count,
            token=command.token,
            job=self.name,
            intent=command.intent,
            lease_s=SPEC.lease_s,
            image=command.image,
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
        epoch = self.epoch

        def look() -> None:
            if epoch == self.epoch and self.manager_alive:
                self.feed_list(self.listing())

        if any(vm.state is VmState.STARTING for vm in vms):
            self.after(BUSY_S, look)  # a manager that asks each second sees it run

    def terminate(self, vm_ids: tuple[str, ...]) -> None:
        self.sync()
        self.provider.terminate(vm_ids)
        self.feed_ended(vm_ids)

    def feed_ended(self, vm_ids: tuple[str, ...] = ()) -> None:
        """Say that VMs were returned, and what the cloud knows of those that ended."""
        wanted = {*vm_ids, *self.ledger.unconfirmed}
        vms = tuple(vm for vm in self.listing() if vm.vm_id in wanted)
        self.feed(e.VmsReturned(at_s=self.now_s, vm_ids=vm_ids, vms=vms))

    def release(self) -> None:
        """Remove what the VMs shared; some clouds say only now when the last ended."""
        self.sync()
        try:
            self.provider.release(self.name)
        except CloudError as error:
            failed = e.CommandFailed(
                at_s=self.now_s, command="release_job", vm_ids=(), reason=str(error)
            )
            self.feed(failed)
            return
        self.feed_ended()
        self.feed(e.JobReleased(at_s=self.now_s))

    def resume(self) -> None:
        """Go on after the job has ended without success, as ``spottrain resume``."""
        self.finished = None
        self.start_manager()
        self.run_on()

    # --- what came of it ----------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Return what the cloud bills for the job."""
        rows = self.fake.bill()
        return [row for row in rows if self.alone or row.vm_id in self.cloud.vms]

    def most_at_once(self) -> int:
        """Return the most VMs that the cloud ever billed at the same time."""
        rows = self.rows()
        return max(
            sum(r.from_s <= row.from_s < (r.until_s or row.from_s + 1) for r in rows)
            for row in rows
        )

    def refusals(self) -> list[str]:
        """Return why launches were refused."""
        return [x.refusal for x in self.journal if isinstance(x, e.LaunchRefused)]

    def billed_usd(self) -> Fraction:
        """Return what the cloud's bill comes to, with disks and addresses."""
        name, usd = self.fake.name, Fraction(0)
        unit_us = _BILLED_S[name] * 10**6
        for row in self.rows():
            assert row.until_s is not None, f"{row.vm_id} is rented still"
            lasted_us = round(row.until_s * 10**6) - round(row.from_s * 10**6)
            lasted_us = max(60 * 10**6, -(-lasted_us // unit_us) * unit_us)
            zone = self.cloud.vms[row.vm_id].offer.zone
            parts = (_SPOT_USD[name], _DEARER_USD.get(zone, 0.0), ATTACHED_USD)
            rate = sum((Fraction(repr(part)) for part in parts), Fraction(0))
            usd += rate * lasted_us / HOUR_US
        return usd

    def lives(self) -> list[tuple[str, float, float, float, float]]:
        """Return of each VM when it began and ended, in the bill and in the ledger."""
        lines = self.ledger.closed
        return [
            (
                row.vm_id,
                row.from_s,
                row.until_s or 0.0,
                lines[row.vm_id].from_us / 1e6,
                (lines[row.vm_id].ended_us or lines[row.vm_id].gone_us or 0) / 1e6,
            )
            for row in self.rows()
        ]

    def check_end(self) -> None:
        """It trained, within its budget, and left nothing behind; its ledger is the
        cloud's bill, to the micro-dollar.
        """
        assert self.finished is not None, self.state.activity
        assert self.step == self.state.job.spec.steps
        ledger = self.ledger
        assert not ledger.open
        spent = ledger.spent(self.now_s)
        assert spent <= Money.allowed(self.max_usd)
        billed_microusd = math.ceil(self.billed_usd() * 10**6)
        assert spent.microusd == billed_microusd, self.lives()
        if self.alone:
            assert self.fake.ask("left") == []


class EnteredStory(Story):
    """A story in which the manager enters VMs by SSH before their agents call.

    Args:
        folder: Of the job and of the VMs' disks.
        fake: The cloud.
        changes: Of the job's settings.
    """

    def __init__(self, folder: Path, fake: FakeCloud, **changes: Any) -> None:
        self.folder = folder
        self.port = self.dialled = free_port()
        """Where VMs listen, and where the manager calls."""
        self.python = sys.executable
        fake.ask("rent_machines", folder=str(folder / "disks"), port=self.port)
        super().__init__(fake, **changes)

    def connect(self) -> RentedVmProvider:
        key_file, public_key = ensure_key(self.folder / "cloud")
        inner = self.adapter(public_key=public_key, user=getpass.getuser(), ssh_port=self.dialled)
        return RentedVmProvider(
            inner,
            self.folder / "cloud",
            self.name,
            Payload(workdir=empty_workdir(self.folder)),
            VmAccess(key_file=key_file, python=self.python),
        )

    def start_manager(self) -> None:
        self.provider.close()
        super().start_manager()

    def boot(self, vm_id: str) -> None:
        try:
            while not self.provider.ssh_target(vm_id):  # known soon to its cloud
                time.sleep(0.02)
            self.provider.start_agent(vm_id, _NOBODY)
        except VmNotFoundError as error:
            self.feed(e.VmLost(at_s=self.now_s, vm_id=vm_id, reason=str(error)))
        except CloudError as error:
            self.given_up(vm_id, str(error))
        else:
            super().boot(vm_id)

    def given_up(self, vm_id: str, reason: str) -> None:
        """The manager learns that a start failed once it has tried for long enough."""
        epoch = self.epoch

        def fail() -> None:
            if epoch == self.epoch and self.manager_alive:
                failed = e.CommandFailed(
                    at_s=self.now_s,
                    command="start_agent",
                    vm_ids=(vm_id,),
                    reason=reason,
                )
                self.feed(failed)

        self.after(_PATIENCE_S, fail)
