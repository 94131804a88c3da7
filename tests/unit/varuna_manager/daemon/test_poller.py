"""Looking at several clouds, each by itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from tests.builders import a_launch
from tests.unit.cloud.toy_cloud import ToyCloud
from tests.unit.varuna_manager.story import SETTINGS

from spottrain.cloud.multi import open_clouds
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import CloudProvider
from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.daemon.market_watch import MarketWatch
from spottrain.varuna_manager.daemon.poller import CloudPoller


class Sink:
    """Keeps events, and lets a test wait for what they come to."""

    def __init__(self) -> None:
        self.state, _ = step.step(State(), e.JobSubmitted(at_s=1.0, settings=SETTINGS))
        self.events: list[e.Event] = []
        self.fed = asyncio.Event()

    def now_s(self) -> float:
        return 2.0

    def feed(self, event: e.Event) -> asyncio.Future[None]:
        self.events.append(event)
        self.fed.set()
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def of(self, cls: type[e.Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, cls)]

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self.fed.clear()
                await self.fed.wait()


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await asyncio.to_thread(function, *args, **kwargs)


def opened(cloud: ToyCloud) -> CloudProvider:
    return cloud


def looking(
    clouds: list[ToyCloud],
    story: Callable[[Sink, CloudPoller], Awaitable[None]],
    ask: Callable[..., Coroutine[Any, Any, Any]] = call,
) -> None:
    """Let a story happen while all clouds are looked at."""

    async def run() -> None:
        sink = Sink()
        openers = {cloud.name: functools.partial(opened, cloud) for cloud in clouds}
        parts = open_clouds(openers).parts()
        poller = CloudPoller(sink, parts, ask, MarketWatch(sink))
        watching = asyncio.create_task(poller.run())
        await story(sink, poller)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

    asyncio.run(run())


def test_first_offers_are_fed_together_and_vms_cloud_by_cloud() -> None:
    async def story(sink: Sink, _: CloudPoller) -> None:
        await sink.until(lambda: len(sink.of(e.VmsListed)) == 2)
        await sink.until(lambda: sink.of(e.OffersSeen))
        assert {event.cloud for event in sink.of(e.VmsListed)} == {"aws", "gcp"}
        (seen,) = sink.of(e.OffersSeen)
        assert [offer.cloud for offer in seen.offers] == ["aws", "gcp"]

    looking([ToyCloud("aws"), ToyCloud("gcp")], story)


def test_a_cloud_that_fails_does_not_delay_the_others() -> None:
    aws, gcp = ToyCloud("aws"), ToyCloud("gcp")
    aws.down = True

    async def story(sink: Sink, poller: CloudPoller) -> None:
        await sink.until(lambda: sink.of(e.OffersSeen))
        assert {event.cloud for event in sink.of(e.VmsListed)} == {"gcp"}
        (offer,) = sink.of(e.OffersSeen)[0].offers
        gcp.launch(a_launch(offer, token="t", intent="i", lease_s=60.0))
        poller.poll_now()
        await sink.until(lambda: len(sink.of(e.VmsListed)) == 2)
        assert [vm.vm_id for vm in sink.of(e.VmsListed)[1].vms] == ["gcp.v.0"]
        aws.down = False
        await sink.until(lambda: len(sink.of(e.OffersSeen)) == 2)
        assert [one.cloud for one in sink.of(e.OffersSeen)[1].offers] == ["aws"]

    looking([aws, gcp], story)


def test_a_cloud_that_hangs_delays_the_first_offers_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aws, gcp = ToyCloud("aws"), ToyCloud("gcp")
    asked = asyncio.Event()

    async def ask(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function.__self__.name == "aws":  # type: ignore[attr-defined]
            asked.set()
            await asyncio.get_running_loop().create_future()
        return await call(function, *args, **kwargs)

    async def story(sink: Sink, poller: CloudPoller) -> None:
        await asked.wait()
        await sink.until(lambda: sink.of(e.VmsListed))
        assert sink.of(e.OffersSeen) == []
        monkeypatch.setattr("spottrain.varuna_manager.daemon.poller.FIRST_OFFERS_WAIT_S", 0.0)
        poller.poll_now()
        await sink.until(lambda: sink.of(e.OffersSeen))
        assert [o.cloud for o in sink.of(e.OffersSeen)[0].offers] == ["gcp"]

    looking([aws, gcp], story, ask)


def test_a_single_poll_raises_its_clouds_error() -> None:
    cloud = ToyCloud("aws")
    cloud.down = True

    async def look() -> None:
        sink = Sink()
        poller = CloudPoller(sink, {"": cloud}, call, MarketWatch(sink))
        with pytest.raises(CloudError):
            await poller.poll_vms()
        cloud.down = False
        await poller.poll_vms()
        (listed,) = sink.of(e.VmsListed)
        assert (listed.vms, listed.cloud) == ((), "")

    asyncio.run(look())
