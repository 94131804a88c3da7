"""Renting from the fake clouds, as the manager would."""

from __future__ import annotations

from typing import Any

from tests.builders import a_launch
from tests.fakes.azure import FakeAzure
from tests.fakes.gcp import FakeGcp

from spottrain.cloud.port.provider import CloudProvider, LaunchRequest, Offer, Vm


def offer_in(provider: CloudProvider, zone: str = "", *, spot: bool = True) -> Offer:
    return next(o for o in provider.offers() if o.spot is spot and zone in ("", o.zone))


def launch_request(
    offer: Offer, count: int = 1, intent: str = "intent-1", job: str = "job"
) -> LaunchRequest:
    return a_launch(offer, count, token=f"uid-{intent}", job=job, intent=intent)


def rent(
    provider: CloudProvider, count: int = 1, intent: str = "intent-1", job: str = "job"
) -> list[Vm]:
    return list(provider.launch(launch_request(offer_in(provider), count, intent, job)).vms)


def settle(fake: Any) -> None:
    """Let what the cloud has under way come to its end."""
    if isinstance(fake, FakeAzure):
        fake.ask("pass_time", seconds=1.0)
    if isinstance(fake, FakeGcp):
        fake.ask("finish_all")


def alive(fake: Any) -> int:
    """Return how many VMs are billed on, once what is under way has come to its end."""
    settle(fake)
    return sum(vm["ended_at"] is None for vm in fake.ask("bill"))


def sent(fake: Any) -> list[str]:
    return [request["operation"] for request in fake.ask("requests")]
