"""Machines that a fake cloud rents out: real OpenSSH servers, one loopback address each.

All of 127.0.0.0/8 is this machine, so every machine has an address of its own and all
listen on one port; no right is needed for that. Each has a home of its own, and when it
ends every process that was started on it is killed and its disk is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.sshd import Sshd

_END_S = 600.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Machines:
    """All machines of one fake cloud.

    Args:
        folder: Where their disks lie.
        port: Where their SSH servers listen.
        metadata_url: Of a fake metadata service; the path below it names the machine.
    """

    def __init__(self, folder: Path, port: int, metadata_url: str = "") -> None:
        self._folder = folder
        self._port = port
        self._metadata_url = metadata_url
        self._numbers = itertools.count(2)
        self._running: dict[str, _Machine] = {}

    def boot(self, name: str, authorized_key: str, host_key: tuple[str, str] | None = None) -> str:
        """Switch a machine on; return its address at once, before it answers.

        Args:
            name: Unique.
            authorized_key: Of who may log in, ``type base64``.
            host_key: (private, public) that it is told to have; else it makes its own.
        """
        number = next(self._numbers)
        disk = self._folder / name
        disk.mkdir(parents=True)
        (disk / "key.pub").write_text(authorized_key.strip() + "\n")
        address = f"127.77.{number // 256}.{number % 256}"
        machine = _Machine(Sshd(disk, disk / "key", port=self._port, address=address))
        machine.sshd.environment = _run_boot_script(disk)
        if self._metadata_url:
            machine.sshd.metadata_url = f"{self._metadata_url}/{name}"
        if host_key is not None:
            (disk / "host_key").touch(mode=0o600)
            (disk / "host_key").write_text(host_key[0])
            machine.sshd.host_key = host_key[1]
        self._running[name] = machine
        threading.Thread(target=machine.boot, daemon=True).start()
        return address

    def host_key(self, name: str) -> str | None:
        """Return a machine's host key once it answers."""
        machine = self._running.get(name)
        return machine.sshd.host_key if machine is not None and machine.on else None

    def kill(self, name: str) -> None:
        """Switch a machine off for good; an unknown one is off already."""
        machine = self._running.pop(name, None)
        if machine is not None:
            machine.kill()

    def kill_all(self) -> None:
        """Switch all machines off."""
        for name in tuple(self._running):
            self.kill(name)

    def names(self) -> list[str]:
        """Return which machines are on."""
        return sorted(self._running)


@dataclass(eq=False)
class _Machine:
    """One machine."""

    sshd: Sshd
    on: bool = False
    dead: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def boot(self) -> None:
        """Come up, unless it was switched off before that."""
        with self.lock:
            if not self.dead:
                self.sshd.start()
                self.on = True

    def kill(self) -> None:
        """Go down, with all that was started here and all that it wrote."""
        with self.lock:
            self.on, self.dead = False, True
            self.sshd.stop()
        _kill_all(self.sshd.home)
        shutil.rmtree(self.sshd.home, ignore_errors=True)


def _run_boot_script(disk: Path) -> dict[str, str]:
    """Leave what the boot script of ``cloud.port.lease`` does; return what finds it."""
    lease_file(disk).touch()
    systemctl(disk).parent.mkdir()
    systemctl(disk).write_text("#!/bin/sh\necho active\n")
    systemctl(disk).chmod(0o755)
    return {
        "SPOTTRAIN_LEASE_FILE": str(lease_file(disk)),
        "PATH": f"{systemctl(disk).parent}:{_PATH}",
    }


def lease_file(disk: Path) -> Path:
    """Return the file of a machine's lease."""
    return disk / "lease"


def systemctl(disk: Path) -> Path:
    """Return what a machine has instead of systemd."""
    return disk / "bin" / "systemctl"


def processes_of(home: Path) -> list[int]:
    """Return the pids of all processes that were started on a machine."""
    wanted = f"HOME={home}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def is_dead(pid: int, within_s: float = 0.0) -> bool:
    """Whether a process has ended, or does soon: who is killed may take a moment."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], within_s)[0])
    finally:
        os.close(process)


def connections_to(port: int) -> list[str]:
    """Return the addresses of machines that somebody is connected to, at their port."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        remote, state = line.split()[2:4]
        address, _, there = remote.partition(":")
        if int(there, 16) == port and state == "01":
            found.append(socket.inet_ntoa(bytes.fromhex(address)[::-1]))
    return found


def _kill_all(home: Path) -> None:
    deadline_s = time.monotonic() + _END_S
    while pids := processes_of(home):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise AssertionError(f"still running on {home}: {pids}")
        time.sleep(0.01)
