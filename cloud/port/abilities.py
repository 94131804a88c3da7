"""The optional abilities of the cloud port by name, and how wrappers forward them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from spottrain.cloud.port import provider as port

P = ParamSpec("P")
R = TypeVar("R")

ABILITIES: Mapping[str, type] = {
    ability.__name__: ability
    for ability in (
        port.AdmitsNetworks,
        port.ChecksAccount,
        port.FindsOrphans,
        port.MovesVms,
        port.NamesPrincipal,
        port.ReachedBySsh,
        port.ReleasesJob,
        port.ReportsQuota,
        port.ReportsSpotPools,
        port.StartsAgents,
        port.TellsTime,
    )
}
"""The abilities that wrappers forward. Not ``ForwardsCalls`` and
``ReportsUnreachableVms``: connections to VMs belong to the manager's own process."""


class Forward(Protocol):
    """Makes the forwarding method for a method of an ability's protocol."""

    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        """Return a callable with the arguments and result of ``method``."""


class ForwardsAbilities:
    """A provider with the optional abilities of those that it wraps.

    A method is None where no wrapped provider has the ability. Then ``isinstance`` with
    the ability's protocol is false, by the rule of ``typing.runtime_checkable``.
    """

    admit: Callable[[str, Sequence[str]], None] | None = None
    check: Callable[[], Sequence[port.Finding]] | None = None
    list_all: Callable[[], Sequence[port.Vm]] | None = None
    move: Callable[..., port.Vm] | None = None
    principal: Callable[[], str] | None = None
    ssh_target: Callable[[str], port.SshTarget | None] | None = None
    release: Callable[[str], None] | None = None
    quotas: Callable[[], Sequence[port.Quota]] | None = None
    spot_pools: Callable[[int], Sequence[port.SpotPool]] | None = None
    interrupt: Callable[[str], None] | None = None
    start_agent: Callable[[str, port.AgentBootstrap], Sequence[port.StartStep]] | None = None
    time_s: Callable[[], float | None] | None = None

    def _forward_abilities(self, has: Callable[[type], bool], forward: Forward) -> None:
        """Set the methods of the abilities for which ``has`` is true."""
        if has(port.AdmitsNetworks):
            self.admit = forward(port.AdmitsNetworks.admit)
        if has(port.ChecksAccount):
            self.check = forward(port.ChecksAccount.check)
        if has(port.FindsOrphans):
            self.list_all = forward(port.FindsOrphans.list_all)
        if has(port.MovesVms):
            self.move = forward(port.MovesVms.move)
        if has(port.NamesPrincipal):
            self.principal = forward(port.NamesPrincipal.principal)
        if has(port.ReachedBySsh):
            self.ssh_target = forward(port.ReachedBySsh.ssh_target)
        if has(port.ReleasesJob):
            self.release = forward(port.ReleasesJob.release)
        if has(port.ReportsQuota):
            self.quotas = forward(port.ReportsQuota.quotas)
        if has(port.ReportsSpotPools):
            self.spot_pools = forward(port.ReportsSpotPools.spot_pools)
        if has(port.StartsAgents):
            self.start_agent = forward(port.StartsAgents.start_agent)
        if has(port.TellsTime):
            self.time_s = forward(port.TellsTime.time_s)


def arguments_by_name(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of a protocol's method by name, ``self`` aside."""
    given = dict(inspect.signature(method).bind(None, *args, **kwargs).arguments)
    given.pop("self")
    return given
