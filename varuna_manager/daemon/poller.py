"""Looks at the VMs and the offers of every cloud, and tells the core what has changed.

Each cloud is looked at by itself: one that is down or slow keeps the news of no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, Protocol, TypeVar

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import CloudProvider, Offer, Vm, VmState
from spottrain.varuna_manager.core.model.events import VmsListed
from spottrain.varuna_manager.daemon.market_watch import MarketWatch
from spottrain.varuna_manager.daemon.ports import EventSink

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""From one look at offers and VMs to the next."""
PATIENCE_S = 30.0
"""How long the first offers wait for those of other clouds: the best may be among them."""

P = ParamSpec("P")
R = TypeVar("R")


class Caller(Protocol):
    """Calls a cloud beside everything else, with a deadline."""

    async def __call__(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return what ``function`` returns.

        Raises:
            CloudError: the cloud said no, or nothing in time.
        """


class CloudPoller:
    """All looks of one job's manager.

    Args:
        sink: Where events go.
        clouds: By ``Offer.cloud``; a cloud that is the only one may have the empty name.
        call: Calls them.
        market: Is told of the offers.
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
        self._telling = asyncio.Lock()
        self._hurries = {cloud: asyncio.Event() for cloud in clouds}
        self._vms: dict[str, tuple[Vm, ...]] = {}
        self._offers: dict[str, tuple[Offer, ...]] = {}
        self._began_s = time.monotonic()
        self._told_s = -math.inf

    async def run(self) -> None:
        """Look at offers and VMs for ever."""
        await asyncio.gather(*map(self._watch, self._clouds))

    def hurry(self) -> None:
        """Look at once: something in the fleet has broken."""
        for hurry in self._hurries.values():
            hurry.set()

    async def _watch(self, cloud: str) -> None:
        told, hurry = "", self._hurries[cloud]
        while True:
            trouble = ""
            try:
                await self.at_vms(cloud)
                await self._at_offers(cloud)
            except CloudError as error:
                trouble = str(error)
                self._offers.setdefault(cloud, ())
            if trouble and trouble != told:
                logger.warning("%s", trouble)
            told = trouble
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await hurry.wait()
            hurry.clear()

    async def at_vms(self, cloud: str = "") -> None:
        """Look at the VMs of one cloud once, and tell what has changed.

        Raises:
            CloudError: they cannot be listed.
        """
        asked_at_s = self._sink.now_s()
        job = self._sink.state.job.spec.name
        listed = await self._call(self._clouds[cloud].list_vms, job)
        state = self._sink.state
        unconfirmed = state.ledger.unconfirmed
        vms = tuple(
            vm
            for vm in listed
            if vm.state is not VmState.TERMINATED
            or vm.vm_id in state.vms
            or vm.intent in state.intents
            or vm.intent in state.given_up
            or vm.vm_id in unconfirmed
        )
        ours = {k for k, vm in state.vms.items() if cloud in ("", vm.offer.cloud)}
        if vms != self._vms.get(cloud) or ours - {vm.vm_id for vm in vms}:
            self._vms[cloud] = vms
            self._sink.feed(
                VmsListed(
                    at_s=self._sink.now_s(),
                    asked_at_s=asked_at_s,
                    vms=vms,
                    cloud=cloud,
                )
            )

    async def _at_offers(self, cloud: str) -> None:
        """Look at what one cloud offers, and tell it with what the others do.

        A cloud that fails now and then keeps the offers that it had: what is asked of it
        then is refused, and closes it for a while.
        """
        before = self._offers.get(cloud)
        self._offers[cloud] = tuple(await self._call(self._clouds[cloud].offers))
        now_s = time.monotonic()
        waits = now_s - self._began_s < PATIENCE_S
        if waits and self._offers.keys() < self._clouds.keys():
            return
        if self._offers[cloud] == before and now_s - self._told_s < POLL_S:
            return  # another cloud's look has just told all
        async with self._telling:
            self._told_s = time.monotonic()
            known = [self._offers.get(name, ()) for name in self._clouds]
            await self._market.seen([offer for some in known for offer in some])
