"""VMs' networks on one machine: a namespace a VM, joined by a switch (``switch.py``)."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Self

from tests.bench.processes import ROOT
from tests.bench.switch import Links, mac_of

_MTU = 65000


class Network:
    """Namespaces ``0``…``count - 1`` with an address each; needs root.

    Args:
        count: Number of VMs.
    """

    def __init__(self, count: int) -> None:
        self._names = [f"st{os.getpid()}-{n}" for n in range(count)]
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.switch", *self._names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._switch.stdout is not None
        if not self._switch.stdout.readline():
            raise SystemExit("no TAP devices here: run as root, with /dev/net/tun")
        for n, name in enumerate(self._names):
            self._move(n, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.close()
        self._switch.wait()
        _ip("-batch", "-", lines=[f"netns del {name}" for name in self._names])

    @property
    def pid(self) -> int:
        """Of the switch."""
        return self._switch.pid

    def namespace(self, n: int) -> str:
        """Return the path of a VM's network namespace."""
        return f"/run/netns/{self._names[n]}"

    def address(self, n: int) -> str:
        """Return a VM's address in its network."""
        return f"10.77.{n // 200}.{1 + n % 200}"

    def set_version(self, links: Links) -> None:
        """Change what all links are like."""
        assert self._switch.stdin is not None
        line = json.dumps(dataclasses.asdict(links))
        self._switch.stdin.write(line.encode())
        self._switch.stdin.flush()

    def _move(self, n: int, name: str) -> None:
        """Put a port into its namespace, as eth0."""
        mac = mac_of(n).hex(":")
        _ip("netns", "add", name)
        _ip("link", "set", name, "netns", name)
        _ip(
            *("-n", name, "-batch", "-"),
            lines=[
                f"link set {name} name eth0 address {mac} mtu {_MTU}",
                f"addr add {self.address(n)}/16 dev eth0",
                "link set eth0 up",
                "link set lo up",
            ],
        )


def _ip(*arguments: str, lines: list[str] | None = None) -> None:
    text = None if lines is None else "\n".join(lines)
    subprocess.run(["ip", *arguments], input=text, text=True, check=True)
