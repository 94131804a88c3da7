"""A simulated world of two clouds that fail by themselves: each is asked by itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.simulation.market import Cloud
from tests.simulation.world import World

from spottrain.cloud.port.provider import Offer, Vm
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.settings import JobSettings


@dataclass
class Sky(Cloud):
    """Zones of several clouds, each a region of its own."""

    clouds: dict[str, str] = field(default_factory=dict)
    """Of each zone."""
    down: set[str] = field(default_factory=set)
    """Clouds that give no answer now."""

    def offers(self) -> tuple[Offer, ...]:
        return tuple(
            replace(offer, cloud=self.clouds[offer.zone], region=offer.zone)
            for offer in super().offers()
        )


class TwoClouds(World):
    """One job on two clouds.

    Args:
        seed: Of all that is drawn.
        settings: The job.
        sky: The clouds.
    """

    def __init__(self, seed: int, settings: JobSettings, sky: Sky) -> None:
        super().__init__(seed, settings, sky)
        self.sky = sky
        self.names = sorted(set(sky.clouds.values()))
        self.known: dict[str, tuple[Vm, ...]] = {}

    def start_manager(self) -> None:
        self.known = {}
        super().start_manager()

    def poll(self, *, force: bool = False) -> None:
        """Look at each cloud; one that is down keeps the offers that it had."""
        epoch = self.epoch
        if not self.manager_alive:
            return
        fresh = tuple(o for o in self.sky.offers() if o.cloud not in self.sky.down)
        kept = tuple(o for o in self.offers if o.cloud in self.sky.down)
        offers = (*fresh, *kept)
        if offers != self.offered:
            self.offered = offers
            self.feed(e.OffersSeen(at_s=self.now_s, offers=offers))
        for name in self.names:
            vms = tuple(vm for vm in self.listing() if vm.offer.cloud == name)
            if name not in self.sky.down and vms != self.known.get(name):
                self.known[name] = vms
                now_s = self.now_s
                self.feed(e.VmsListed(at_s=now_s, asked_at_s=now_s, vms=vms, cloud=name))

        def again() -> None:
            if epoch == self.epoch:
                self.poll()

        self.after(2.0, again)

    def launch(self, command: c.LaunchVms) -> None:
        """Without an answer, the outcome is unknown."""
        if command.offer.cloud not in self.sky.down:
            super().launch(command)
            return
        self.later(
            lambda: e.LaunchRefused(
                at_s=self.now_s,
                intent=command.intent,
                reason="no answer",
                refusal="unknown",
                retry_after_s=5.0,
            )
        )

    def perform(self, command: c.Command) -> None:
        """A question about a VM of a cloud that is down fails."""
        match command:
            case c.AskProvider(vm_id=vm_id) if self._is_down(vm_id):
                self._fail("ask_provider", vm_id)
            case c.TerminateVms(vm_ids=vm_ids):
                for name in self.names:
                    own = tuple(i for i in vm_ids if self._cloud(i) == name)
                    if own and name in self.sky.down:
                        self._fail("terminate_vms", *own)
                    elif own:
                        super().perform(c.TerminateVms(vm_ids=own))
            case _:
                super().perform(command)

    def _cloud(self, vm_id: str) -> str:
        return self.sky.vms[vm_id].offer.cloud

    def _is_down(self, vm_id: str) -> bool:
        return self._cloud(vm_id) in self.sky.down

    def _fail(self, command: e.FailedCommand, *vm_ids: str) -> None:
        self.later(
            lambda: e.CommandFailed(
                at_s=self.now_s, command=command, vm_ids=vm_ids, reason="no answer"
            )
        )
