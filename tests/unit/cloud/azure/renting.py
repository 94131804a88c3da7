"""Renting from the fake Azure, as the manager would."""

from __future__ import annotations

from tests.builders import a_launch
from tests.fakes.azure import ZONE, FakeAzure

from spottrain.cloud.azure.provider import AzureProvider
from spottrain.cloud.port.provider import LaunchRequest, Offer, Vm


def offer_in(provider: AzureProvider, zone: str = ZONE, *, spot: bool = True) -> Offer:
    offers = provider.offers()
    return next(offer for offer in offers if (offer.zone, offer.spot) == (zone, spot))


def launch_request(
    offer: Offer, count: int = 1, intent: str = "intent-1", job: str = "job"
) -> LaunchRequest:
    return a_launch(offer, count, token=f"uid-{intent}", job=job, intent=intent)


def rent(
    provider: AzureProvider, count: int = 1, intent: str = "intent-1", job: str = "job"
) -> list[Vm]:
    return list(provider.launch(launch_request(offer_in(provider), count, intent, job)).vms)


def alive(azure: FakeAzure) -> int:
    """Return how many VMs are billed on, once what is under way has come to its end."""
    azure.ask("pass_time", seconds=1.0)
    return sum(vm["ended_at"] is None for vm in azure.ask("bill"))


def sent(azure: FakeAzure) -> list[str]:
    return [request["operation"] for request in azure.ask("requests")]
