"""Polls the VMs and the offers of every cloud, and feeds the core what has changed.

Each cloud is polled by itself: one that is down or slow does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, Protocol, TypeVar

from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import CloudProvider, Offer, Quota, Vm, VmState
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.quotas import with_quotas
from spottrain.varuna_manager.core.model.events import VmsListed
from spottrain.varuna_manager.daemon.market_watch import MarketWatch
from spottrain.varuna_manager.daemon.ports import EventSink

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Between two polls of a cloud."""
QUOTAS_KEEP_S = 3600.0
"""Quotas grow when a person asks for more, which takes hours."""
POOLS_KEEP_S = 3600.0
"""Published interruption rates and placement scores change within hours."""
FIRST_OFFERS_WAIT_S = 30.0
"""How long the first offers wait for those of other clouds, which may be better."""

P = ParamSpec("P")
R = TypeVar("R")


class Caller(Protocol):
    """Calls a cloud in a thread, with a timeout."""

    async def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what ``function`` returns.

        Raises:
            CloudError: the cloud refused, or did not answer in time.
        """


class CloudPoller:
    """Polls the clouds of one job.

    Args:
        sink: Where events go.
        clouds: By ``Offer.cloud``; a single cloud may have the empty name.
        call: Calls them.
        market: Receives the offers.
    """

    def __init__(
        self,
        sink: EventSink,
        clouds: Mapping[str, CloudProvider],
        call: Caller,
        market: MarketWatch,
    ) -> None:
        self._sink = sink
        self._clouds = clouds
        self._call = call
        self._market = market
        self._reporting = asyncio.Lock()
        self._wakes = {cloud: asyncio.Event() for cloud in clouds}
        self._vms: dict[str, tuple[Vm, ...]] = {}
        self._offers: dict[str, tuple[Offer, ...]] = {}
        self._quotas: dict[str, tuple[float, Sequence[Quota]]] = {}
        self._pools_asked_s: dict[str, float] = {}
        self._began_s = time.monotonic()
        self._reported_at_s = -math.inf

    async def run(self) -> None:
        """Poll offers and VMs until cancelled."""
        await asyncio.gather(*map(self._watch, self._clouds))

    def poll_now(self) -> None:
        """Poll at once, as something in the fleet has failed."""
        for wake in self._wakes.values():
            wake.set()

    async def _watch(self, cloud: str) -> None:
        reported, wake = "", self._wakes[cloud]
        while True:
            trouble = ""
            try:
                await self.poll_vms(cloud)
                await self._poll_offers(cloud)
            except CloudError as error:
                trouble = str(error)
                self._offers.setdefault(cloud, ())
            if trouble and trouble != reported:
                logger.warning("%s", trouble)
            reported = trouble
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await wake.wait()
            wake.clear()

    async def poll_vms(self, cloud: str = "") -> None:
        """List the VMs of one cloud, and feed them if they have changed.

        Raises:
            CloudError: they cannot be listed.
        """
        asked_at_s = self._sink.now_s()
        job = self._sink.state.job.spec.name
        listed = await self._call(self._clouds[cloud].list_vms, job)
        state = self._sink.state
        unconfirmed = state.history.ledger.unconfirmed
        vms = tuple(
            vm
            for vm in listed
            if vm.state is not VmState.TERMINATED
            or vm.vm_id in state.fleet.vms
            or vm.intent in state.launches.intents
            or vm.intent in state.launches.given_up
            or tags.order_of(vm.intent) in state.fleet.orders
            or vm.vm_id in unconfirmed
        )
        ours = {k for k, vm in state.fleet.vms.items() if cloud in ("", vm.offer.cloud)}
        if vms != self._vms.get(cloud) or ours - {vm.vm_id for vm in vms}:
            self._vms[cloud] = vms
            self._sink.feed(
                VmsListed(at_s=self._sink.now_s(), asked_at_s=asked_at_s, vms=vms, cloud=cloud)
            )

    async def _quotas_of(self, cloud: str) -> Sequence[Quota]:
        """Return the quotas of an account, asked once an hour; none if it does not say."""
        provider, now_s = self._clouds[cloud], time.monotonic()
        asked_s, known = self._quotas.get(cloud, (-QUOTAS_KEEP_S, ()))
        if now_s - asked_s >= QUOTAS_KEEP_S:
            try:
                known = await self._call(provider.quotas)
            except CloudError as error:
                # Launches are then halved until the cloud accepts them.
                logger.info("quotas are unknown: %s", error)
            self._quotas[cloud] = now_s, known
        return known

    async def _ask_pools(self, cloud: str) -> None:
        """Ask once an hour what a cloud says of its spot VMs."""
        provider, now_s = self._clouds[cloud], time.monotonic()
        asked_s = self._pools_asked_s.get(cloud, -math.inf)
        if now_s - asked_s < POOLS_KEEP_S:
            return
        self._pools_asked_s[cloud] = now_s
        try:
            count = self._sink.state.job.resources.max_vms
            await self._market.pools(await self._call(provider.spot_pools, count))
        except CloudError as error:
            # Offers are then ranked by what is known without.
            logger.info("interruption rates are unknown: %s", error)

    async def _poll_offers(self, cloud: str) -> None:
        """List the offers of one cloud, and report them with those of the others.

        A cloud that fails for a moment keeps its last offers: launches that it refuses
        then put it in cooldown.
        """
        before = self._offers.get(cloud)
        offers = await self._call(self._clouds[cloud].offers)
        quotas = await self._quotas_of(cloud)
        await self._ask_pools(cloud)
        self._offers[cloud] = tuple(with_quotas(offers, quotas, catalogue()))
        now_s = time.monotonic()
        waits = now_s - self._began_s < FIRST_OFFERS_WAIT_S
        if waits and self._offers.keys() < self._clouds.keys():
            return
        if self._offers[cloud] == before and now_s - self._reported_at_s < POLL_S:
            return  # another cloud's poll has just reported all
        async with self._reporting:
            self._reported_at_s = time.monotonic()
            known = [self._offers.get(name, ()) for name in self._clouds]
            await self._market.seen([offer for some in known for offer in some])
