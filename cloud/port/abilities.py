"""The optional abilities of the cloud port by name, and how wrappers forward them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from spottrain.cloud.port.provider import (
    AgentBootstrap,
    ChecksAccount,
    Finding,
    FindsOrphans,
    Offer,
    PlacementScore,
    Quota,
    ReachedBySsh,
    ReleasesJob,
    ReportsPlacementScore,
    ReportsPriceHistory,
    ReportsQuota,
    SimulatesInterruption,
    SshTarget,
    StartsAgents,
    Vm,
)

P = ParamSpec("P")
R = TypeVar("R")

ABILITIES: Mapping[str, type] = {
    ability.__name__: ability
    for ability in (
        ChecksAccount,
        FindsOrphans,
        ReachedBySsh,
        ReleasesJob,
        ReportsPlacementScore,
        ReportsPriceHistory,
        ReportsQuota,
        SimulatesInterruption,
        StartsAgents,
    )
}
"""The abilities that wrappers forward. Not ``ForwardsCalls`` and ``ReportsUnreachableVms``:
connections to VMs belong to the manager's own process."""


class Forward(Protocol):
    """Makes the forwarding method for a method of an ability's protocol."""

    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        """Return a callable with the arguments and result of ``method``."""


class ForwardsAbilities:
    """A provider with the optional abilities of those that it wraps.

    A method is None where no wrapped provider has the ability. Then ``isinstance`` with
    the ability's protocol is false, by the rule of ``typing.runtime_checkable``.
    """

    check: Callable[[], Sequence[Finding]] | None = None
    list_all: Callable[[], Sequence[Vm]] | None = None
    ssh_target: Callable[[str], SshTarget | None] | None = None
    release: Callable[[str], None] | None = None
    placement_scores: Callable[[str, int], Sequence[PlacementScore]] | None = None
    price_history: Callable[[float], Sequence[Offer]] | None = None
    quotas: Callable[[], Sequence[Quota]] | None = None
    interrupt: Callable[[str], None] | None = None
    start_agent: Callable[[str, AgentBootstrap], None] | None = None

    def _forward_abilities(self, has: Callable[[type], bool], forward: Forward) -> None:
        """Set the methods of the abilities for which ``has`` is true."""
        if has(ChecksAccount):
            self.check = forward(ChecksAccount.check)
        if has(FindsOrphans):
            self.list_all = forward(FindsOrphans.list_all)
        if has(ReachedBySsh):
            self.ssh_target = forward(ReachedBySsh.ssh_target)
        if has(ReleasesJob):
            self.release = forward(ReleasesJob.release)
        if has(ReportsPlacementScore):
            self.placement_scores = forward(ReportsPlacementScore.placement_scores)
        if has(ReportsPriceHistory):
            self.price_history = forward(ReportsPriceHistory.price_history)
        if has(ReportsQuota):
            self.quotas = forward(ReportsQuota.quotas)
        if has(SimulatesInterruption):
            self.interrupt = forward(SimulatesInterruption.interrupt)
        if has(StartsAgents):
            self.start_agent = forward(StartsAgents.start_agent)


def arguments_by_name(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of a protocol's method by name, ``self`` aside."""
    given = dict(inspect.signature(method).bind(None, *args, **kwargs).arguments)
    given.pop("self")
    return given
