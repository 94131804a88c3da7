"""The agent's parent process on a VM, which cleans up after it.

``python -m spottrain.cloud.ssh.on_vm.keeper FOLDER``, standard library only. It holds
the lock of the VM's folder for the life of the VM. When the agent ends, it kills every
process of the VM and removes everything but the logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

from spottrain.cloud.process import tree

LOCK = "vm.lock"
_SIOCGIFADDR = 0x8915


def main(folder: Path) -> None:
    """Start the agent, signal that on stdout, and wait until it ends."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    die = str(Path(tree.__file__).with_name("die_with_parent.py"))
    shim = [sys.executable, "-I", "-S", die, str(os.getpid())]
    agent = [sys.executable, "-P", "-m", "spottrain.varuna_manager.agent.main"]
    address = json.loads((folder / "agent.json").read_text())["private_address"]
    if interface := interface_of(address):
        # A host's own name often resolves to its loopback, which others cannot reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    with (folder / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            [*shim, *agent, str(folder / "agent.json")],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.write(sys.stdout.fileno(), b"1")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    process.wait()
    tree.kill_all([os.environ[tree.VARIABLE]], [process.pid])
    tree.clear_folder(folder)


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address, or ''."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            query = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, query)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
