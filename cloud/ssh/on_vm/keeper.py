"""The agent's parent process on a VM, which cleans up after it.

``python -m spottrain.cloud.ssh.on_vm.keeper FOLDER``, standard library only. It holds
the lock of the VM's folder for the life of the VM. When the agent ends, it kills every
process of the VM and removes everything but the logs.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from spottrain.cloud.process import tree

LOCK = "vm.lock"


def main(folder: Path) -> None:
    """Start the agent, signal that on stdout, and wait until it ends."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    die = str(Path(tree.__file__).with_name("die_with_parent.py"))
    shim = [sys.executable, "-I", "-S", die, str(os.getpid())]
    agent = [sys.executable, "-P", "-m", "spottrain.varuna_manager.agent.main"]
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
