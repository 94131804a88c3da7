"""A provider in front of another one: the one way in which calls are passed on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from spottrain.cloud.port.provider import CloudProvider

P = ParamSpec("P")
R = TypeVar("R")


def _passed_on(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Wrapper, P], R]:
    def call(self: Wrapper, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.pass_on(method, *args, **kwargs)

    return call


class Wrapper(CloudProvider):
    """Passes calls on to another provider; a subclass overrides those that it answers itself.

    Connections to VMs and what goes over them are never passed on: they belong to the
    manager's own process.
    """

    @abstractmethod
    def pass_on(
        self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return the other's answer to a method, given as ``CloudProvider.move``."""

    def can(self, ability: Callable[..., object]) -> bool:
        """Return whether this provider has an ability of its own, or the other has it."""
        name = ability.__name__
        own = getattr(type(self), name) is not getattr(Wrapper, name)
        return own or self.pass_on(CloudProvider.can, ability)

    offers = _passed_on(CloudProvider.offers)
    launch = _passed_on(CloudProvider.launch)
    list_vms = _passed_on(CloudProvider.list_vms)
    terminate = _passed_on(CloudProvider.terminate)
    start_agent = _passed_on(CloudProvider.start_agent)
    ssh_target = _passed_on(CloudProvider.ssh_target)
    admit = _passed_on(CloudProvider.admit)
    move = _passed_on(CloudProvider.move)
    quotas = _passed_on(CloudProvider.quotas)
    spot_pools = _passed_on(CloudProvider.spot_pools)
    check = _passed_on(CloudProvider.check)
    principal = _passed_on(CloudProvider.principal)
    list_all = _passed_on(CloudProvider.list_all)
    release = _passed_on(CloudProvider.release)
    time_s = _passed_on(CloudProvider.time_s)
