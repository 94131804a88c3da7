"""The account of each provider for the contract suite."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from tests.builders import a_launch

from spottrain.cloud.port.provider import CloudProvider, LaunchRequest, Offer


class Wire(Protocol):
    """The line between a provider and its (fake) cloud."""

    def cut(self, after: int, *, carried_out: bool) -> None:
        """Let so many changing requests pass, then none; heal() ends it.

        Args:
            after: Requests that pass. The one after them is the first to fail.
            carried_out: Whether the cloud still does what that one asks, with only
                the reply lost.
        """

    def heal(self) -> int:
        """Let everything pass again; return how many changing requests have passed."""


class FakeWire:
    """The line to a fake.

    Args:
        ask: Calls a method of the fake's world.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def cut(self, after: int, *, carried_out: bool) -> None:
        self._ask("cut", after=after, carried_out=carried_out)

    def heal(self) -> int:
        return int(self._ask("heal"))


def on_fake(name: str) -> Callable[[pytest.FixtureRequest], Iterator[Account]]:
    """Return what sets up an account of a fake cloud, asked by way of the cloud's own SDK."""

    def account(request: pytest.FixtureRequest) -> Iterator[Account]:
        fake = request.getfixturevalue(name)
        fake.reset()
        yield Account(
            fake.provider,
            "job",
            3,
            wire=FakeWire(fake.ask),
            left=lambda: list(fake.ask("left")),
        )
        assert fake.ask("drifts") == []

    return account


@dataclass(frozen=True)
class Account:
    """A cloud account under test, in which one job has nothing yet."""

    connect: Callable[[], CloudProvider]
    """Makes one more client of the same account."""
    job: str
    capacity: int
    """Machines of the first offer that can be had."""
    wire: Wire | None = None
    left: Callable[[], list[str]] | None = None
    """Names what costs money or lies about in the cloud, of whatever kind."""
    markets: frozenset[bool] = frozenset({True, False})
    """Markets of the offers: spot (True) and on demand (False)."""
    clouds: frozenset[str] = frozenset()
    """Names of the clouds of offers; empty: the provider's own."""

    def launch_request(self, offer: Offer, count: int = 1) -> LaunchRequest:
        token, intent = uuid.uuid4().hex, f"intent-{uuid.uuid4().hex[:8]}"
        return a_launch(offer, count, token=token, job=self.job, intent=intent, lease_s=60)
