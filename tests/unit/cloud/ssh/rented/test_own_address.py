"""A laptop that changes networks."""

from __future__ import annotations

from collections.abc import Sequence

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.ssh.rented.own_address import CHECK_S, OwnAddressWatch
from spottrain.errors import ConfigError

HOME, CAFE = ("192.0.2.1/32",), ("198.51.100.7/32",)


class Laptop:
    """Where it is, what VMs let in, and what goes wrong."""

    def __init__(self) -> None:
        self.at, self.now_s = HOME, 100.0
        self.offline = self.cloud_down = False
        self.admitted: list[tuple[str, ...]] = []
        self.looks = 0
        self.watch = OwnAddressWatch(self.own, self.admit, lambda: self.now_s)

    def own(self) -> tuple[str, ...]:
        self.looks += 1
        if self.offline:
            raise ConfigError("ssh_from: cannot determine this machine's address")
        return self.at

    def admit(self, networks: Sequence[str]) -> None:
        if self.cloud_down:
            raise CloudError("no answer")
        self.admitted.append(tuple(networks))

    def later(self) -> None:
        self.now_s += CHECK_S
        self.watch.unreachable()


def test_vms_let_a_laptop_in_wherever_it_is() -> None:
    laptop = Laptop()
    laptop.watch.unreachable()
    laptop.later()
    assert laptop.admitted == [HOME]  # known, and not said twice
    laptop.at = CAFE
    laptop.later()
    laptop.at = HOME
    laptop.later()
    assert laptop.admitted == [HOME, CAFE, HOME]


def test_the_own_address_is_not_asked_for_at_each_failure() -> None:
    laptop = Laptop()
    for _ in range(100):
        laptop.watch.unreachable()
    assert laptop.looks == 1


def test_it_is_tried_again_until_the_laptop_is_online_and_the_cloud_answers() -> None:
    laptop = Laptop()
    laptop.offline = True
    laptop.later()
    laptop.offline, laptop.cloud_down = False, True
    laptop.later()
    laptop.cloud_down = False
    laptop.later()
    assert laptop.admitted == [HOME]
    assert laptop.looks == 3
