"""Hosts reached over SSH: real OpenSSH servers on loopback, each with a home of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spottrain.cloud.ssh.transport.hosts import Host

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
WHY_NOT = "" if SSHD else "needs an OpenSSH server: apt-get install openssh-server"
"""Why there can be no such hosts here, if there cannot."""
_SSH = shutil.which("ssh")
_START_S = 600.0


def keygen(path: Path) -> str:
    """Make a key pair; return its public half as ``type base64``."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path.with_suffix(".pub").read_text().strip()


@dataclass
class Sshd:
    """One host: ``start`` it, and ``stop`` it in the end.

    Args:
        folder: Of its own; home and keys lie in it.
        key_file: Private key of the user who may log in.
        options: Further lines of its sshd_config.
        port: Where it listens; any that is free if 0.
        address: Where it listens; all of 127.0.0.0/8 is this machine.
        metadata_url: Where a cloud's agents find its metadata service; else nobody
            answers, least of all that of the machine that the tests run on.
    """

    folder: Path
    key_file: Path
    options: tuple[str, ...] = ()
    port: int = 0
    address: str = "127.0.0.1"
    host_key: str = ""
    metadata_url: str = "http://127.0.0.1:9"
    environment: dict[str, str] = field(default_factory=dict)
    """Of sessions, besides home and metadata service."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def home(self) -> Path:
        """Home of the user who logs in."""
        return self.folder / "home"

    def start(self) -> None:
        """Begin to listen; the port and the key are the same each time."""
        self.home.mkdir(parents=True, exist_ok=True)
        if not self.host_key:
            self.host_key = keygen(self.folder / "host_key")
        if not self.port:
            with socket.socket() as probe:
                probe.bind((self.address, 0))
                self.port = probe.getsockname()[1]
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        given = {
            "HOME": self.home,
            "SPOTTRAIN_METADATA_URL": self.metadata_url,
            **self.environment,
        }
        lines = (
            f"ListenAddress {self.address}",
            f"Port {self.port}",
            f"HostKey {self.folder / 'host_key'}",
            f"AuthorizedKeysFile {self.key_file}.pub",
            "SetEnv " + " ".join(f"{name}={value}" for name, value in given.items()),
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "PidFile none",
            "MaxStartups 200",
            *self.options,
        )
        config = self.folder / "sshd_config"
        config.write_text("\n".join(lines) + "\n")
        assert SSHD is not None
        self._process = subprocess.Popen(
            [SSHD, "-D", "-f", str(config), "-E", str(self.folder / "sshd.log")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((self.folder / "sshd.log").read_text())
            time.sleep(0.01)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.address, self.port)) == 0

    def stop(self) -> None:
        """Listen no more and drop all connections; what was started goes on."""
        if self._process is None:
            return
        for pid in [*_children(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def host(self, name: str, **what: Any) -> Host:
        """Return how a manager knows it."""
        known: dict[str, Any] = {
            "host_key": self.host_key,
            "known_hosts": self.folder / "no_known_hosts",
            "key_file": self.key_file,
            "python": sys.executable,
        }
        return Host(
            name=name,
            address=self.address,
            port=self.port,
            user=getpass.getuser(),
            **{**known, **what},
        )

    def known_to_ssh(
        self, name: str, *lines: str, is_trusted: bool = True, key_file: Path | None = None
    ) -> Path:
        """Return a folder for PATH with an ``ssh`` that knows this host by a name, and no
        configuration of this machine's user.

        Args:
            lines: Further ones of its configuration.
            is_trusted: Its host key is known.
            key_file: Of the user; by default one that may log in.
        """
        known, config = self.folder / "known", self.folder / "ssh_config"
        known.write_text(f"[{self.address}]:{self.port} {self.host_key}\n" * is_trusted)
        said = (
            f"Host {name}",
            f"HostName {self.address}",
            f"Port {self.port}",
            f"User {getpass.getuser()}",
            f"IdentityFile {key_file or self.key_file}",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {known}",
            f"GlobalKnownHostsFile {os.devnull}",
            *lines,
        )
        config.write_text("\n".join(said) + "\n")
        tool = self.folder / "bin" / "ssh"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f'#!/bin/sh\nexec "{_SSH}" -F "{config}" "$@"\n')
        tool.chmod(0o755)
        return tool.parent

    def left(self) -> list[str]:
        """Return what lies in the home."""
        return sorted(path.name for path in self.home.iterdir())


def _children(parent: int) -> list[int]:
    """Return the pids of all sshd processes below one."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            stat = (folder / "stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) == parent and "(sshd" in stat:
                found += [*_children(pid), pid]
    return found
