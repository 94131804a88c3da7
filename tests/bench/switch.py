"""A switch between VMs, in user space: every VM's port is a TAP device.

    python -m tests.bench.switch NAME...

creates the devices, says so on stdout with an empty line, and takes links' properties as
lines of JSON on stdin: see ``Links``. A port sends at the links' rate, a frame after the
other; what it has sent arrives after the delay, in order. Frames are as large as TCP's
largest segments, so that a message is one or a few of them.
"""

from __future__ import annotations

import collections
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 2, 0x1000
_FRAME_BYTES = 1 << 16
_MULTICAST = 1


@dataclass(frozen=True)
class Links:
    """What links are like from now on."""

    bytes_per_s: float
    """Of each port; 0 for as fast as it goes."""
    delay_s: float
    jitter_s: float
    """Each frame's delay is drawn evenly from ``delay_s`` plus or minus this."""
    seed: int = 0


def mac_of(port: int) -> bytes:
    """Return the hardware address that a port's device must have."""
    return struct.pack(">HI", 0x0277, port)


class Switch:
    """Carries frames between TAP devices."""

    def __init__(self, names: list[str]) -> None:
        self._devices = [_open_tap(name) for name in names]
        self._port_of = {fd: port for port, fd in enumerate(self._devices)}
        self._waiting: collections.deque[bytes] | None = None
        self._due: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._free_at = [0.0] * len(names)
        self._last_at = [0.0] * len(names)
        self.set_version(Links(0.0, 0.0, 0.0))

    def set_version(self, links: Links) -> None:
        """Change what links are like."""
        self._links = links
        self._random = random.Random(links.seed)

    def run(self) -> None:
        """Carry frames until stdin ends."""
        control = sys.stdin.fileno()
        poll = select.epoll()
        poll.register(control, select.EPOLLIN)
        for fd in self._devices:
            poll.register(fd, select.EPOLLIN)
        while True:
            left_s = self._due[0][0] - time.monotonic() if self._due else None
            # epoll counts in whole milliseconds, select in microseconds.
            select.select([poll.fileno()], [], [], left_s and max(left_s, 0.0))
            for fd, _ in poll.poll(0):
                if fd != control:
                    self._take(fd)
                elif line := os.read(control, 1 << 12):
                    self.set_version(Links(**json.loads(line)))
                else:
                    return
            self._deliver()

    def _take(self, fd: int) -> None:
        port, links = self._port_of[fd], self._links
        while True:
            try:
                frame = os.read(fd, _FRAME_BYTES + 64)
            except BlockingIOError:
                return
            now = time.monotonic()
            if frame[0] & _MULTICAST:
                targets = [p for p in range(len(self._devices)) if p != port]
            else:
                targets = [int.from_bytes(frame[2:6], "big")]
            sent_at = now
            if links.bytes_per_s:
                sent_at = max(now, self._free_at[port])
                sent_at += len(frame) / links.bytes_per_s
                self._free_at[port] = sent_at
            at = sent_at + links.delay_s
            if links.jitter_s:
                at += self._random.uniform(-links.jitter_s, links.jitter_s)
            at = self._last_at[port] = max(at, self._last_at[port])
            for target in targets:
                if target < len(self._devices):
                    self._count += 1
                    heapq.heappush(self._due, (at, self._count, target, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._due)
            try:
                os.write(self._devices[target], frame)
            except OSError:
                continue  # the device is not up yet, or not any more


def _open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(fd, _TUNSETIFF, request)
    return fd


def main() -> None:
    """Be a switch until stdin ends."""
    switch = Switch(sys.argv[1:])
    sys.stdout.write("\n")
    sys.stdout.flush()
    switch.run()


if __name__ == "__main__":
    main()
