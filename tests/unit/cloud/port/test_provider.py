"""What a provider can that overrides only what is required, and what wrappers pass on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate

import pytest

from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.port.provider import CloudProvider, LaunchRequest, LaunchResult, Offer, Vm
from spottrain.cloud.port.wrapper import P, R, Wrapper

METHODS = [method for method in vars(CloudProvider).values() if callable(method)]
REQUIRED = {"offers", "launch", "list_vms", "terminate"}
OF_THE_MANAGER = {"can", "parts", "close", "serve", "unreachable_vms", "clear", "take"}
"""They belong to the process that has the connections to VMs."""


class Least(CloudProvider):
    """Only what is required."""

    name = "least"

    def offers(self) -> Sequence[Offer]:
        return ()

    def launch(self, request: LaunchRequest) -> LaunchResult:
        return LaunchResult(vms=())

    def list_vms(self, job: str) -> Sequence[Vm]:
        return ()

    def terminate(self, vm_ids: Collection[str]) -> None:
        assert not vm_ids


class Mover(Least):
    """It can also tell the time."""

    def time_s(self) -> float | None:
        return 7.0


class Around(Wrapper):
    """It starts agents itself."""

    name = "around"

    def __init__(self, inner: CloudProvider) -> None:
        self.inner = inner
        self.passed: list[str] = []

    def pass_on(
        self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self.passed.append(method.__name__)
        answer: R = getattr(self.inner, method.__name__)(*args, **kwargs)
        return answer

    def start_agent(self, vm_id: str, bootstrap: Any) -> tuple[()]:
        return ()


def able(provider: CloudProvider) -> set[str]:
    return {method.__name__ for method in METHODS if provider.can(method)}


def test_an_ability_is_a_method_that_is_overridden() -> None:
    assert able(Least()) == REQUIRED
    assert able(Mover()) == {*REQUIRED, "time_s"}


def test_a_provider_without_abilities_knows_nothing_or_refuses() -> None:
    least = Least()
    assert least.parts() == {"": least}
    assert (least.quotas(), least.spot_pools(1), least.unreachable_vms()) == ((), (), ())
    assert (least.principal(), least.time_s()) == ("", None)
    (offers,) = least.check()
    assert (offers.what, offers.ok) == ("offers", True)
    least.release("job")
    least.serve("https://manager")
    least.close()
    for refused in (
        lambda: least.ssh_target("vm"),
        lambda: least.admit("job", ()),
        lambda: least.clear("vm", 1.0),
        least.list_all,
    ):
        with pytest.raises(CloudError, match="least"):
            refused()
    with pytest.raises(VmNotFoundError):
        least.move("vm", "giver", "job", "intent", 1.0)


def test_a_wrapper_can_what_the_other_can_and_what_it_does_itself() -> None:
    around = Around(Mover())
    assert able(around) == {*REQUIRED, "time_s", "start_agent"}
    assert around.time_s() == 7.0
    assert around.list_vms(job="job") == ()


def test_a_wrapper_passes_everything_on_but_what_the_manager_keeps() -> None:
    passed = {name for name in vars(Wrapper) if not name.startswith("_")} - {"pass_on"}
    assert passed | OF_THE_MANAGER == {method.__name__ for method in METHODS}
