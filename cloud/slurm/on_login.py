"""What is done where Slurm's commands and the folder shared with the nodes are: on a login
node. Standard library only.

The manager calls it there, or over SSH from elsewhere (``login``), where the connection's end
ends it.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from spottrain.cloud.ssh.on_vm.host_agent import serve
from spottrain.cloud.ssh.on_vm.relay import Relay
from spottrain.files import PRIVATE, write_whole
from spottrain.network import address_towards

_ANSWER_S = 50.0
"""Time limit of a command; Slurm's own for one message is MessageTimeout, 10 s."""
_LOOK_S = 0.05
_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LD_LIBRARY_PATH", "SLURM_CONF")
"""Variables that batch jobs get from this process: ``sbatch`` hands all on that it has."""
NO_PROGRAM = 127


class OnLogin:
    """Operations; arguments and results are plain values, files are named by whole paths."""

    def run(self, argv: Sequence[str], given: str = "") -> tuple[int, str, str]:
        """Return exit code, stdout and stderr of one of Slurm's commands.

        Args:
            given: Its input.
        """
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        try:
            done = subprocess.run(
                argv,
                input=given,
                env={**environment, "SLURM_TIME_FORMAT": "%s"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWER_S,
                check=False,
            )
        except FileNotFoundError as error:
            return NO_PROGRAM, "", str(error)
        except subprocess.TimeoutExpired as error:
            said = (error.stderr or b"").decode(errors="replace")
            return 1, "", f"no end in {_ANSWER_S:g} s\n{said}"
        except OSError as error:
            return 1, "", str(error)
        return done.returncode, done.stdout, done.stderr

    def user(self) -> str:
        """Return the user's name."""
        return getpass.getuser()

    def own_address(self) -> str:
        """Return this machine's address in the network of the controller; empty: unknown."""
        _, said, _ = self.run(["scontrol", "show", "config"])
        host = re.search(r"^SlurmctldHost\[0\]\s*=\s*([^\s(]+)(?:\(([^)]+)\))?", said, re.MULTILINE)
        return "" if host is None else address_towards(host[2] or host[1])

    def relay(self, address: str, target: int) -> str:
        """Forward calls of agents to a port of this machine's loopback; return where to call.

        Raises:
            ValueError, OSError: as ``Relay``.
        """
        return f"{address}:{Relay(address, target).port}"

    # --- The shared folder --------------------------------------------------------------

    def folder(self, path: str) -> str:
        """Make a folder that only this user may enter; return its whole path.

        Args:
            path: May be relative to the home folder.
        """
        folder = Path.home() / Path(path).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(folder)

    def read(self, path: str) -> str | None:
        """Return what a file holds; None: it is not there."""
        try:
            return Path(path).read_text()
        except FileNotFoundError:
            return None

    def write(self, path: str, text: str) -> None:
        """Write a file; readers find all of it, or none."""
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(Path(path), text, mode=PRIVATE)

    def has(self, path: str) -> bool:
        """Return whether there is such a file or folder."""
        return Path(path).exists()

    def put(self, path: str, archive: str, *, unpacks: bool) -> None:
        """Copy an archive (tar.gz) into the shared folder, or what it holds.

        Args:
            archive: Where it is on this machine; it is removed.
        """
        folder = Path(path).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = folder / f".{uuid.uuid4().hex}.draft"
        if unpacks:
            with tarfile.open(archive) as tar:
                tar.extractall(draft, filter="data")
            Path(archive).unlink()
        else:
            shutil.move(archive, draft)
        try:
            draft.rename(path)
        except OSError:  # another thread was faster
            shutil.rmtree(draft)

    def ask(self, requests: str, line: str) -> bool:
        """Append a request to those of a node; return False if its folder is gone."""
        try:
            with open(requests, "a") as file:
                file.write(f"{line}\n")
        except FileNotFoundError:
            return False
        return True

    def answers(self, path: str, known: int, wait_s: float) -> list[str]:
        """Return a node's answers but the first ``known``, once there are any, or none."""
        end_s = time.monotonic() + wait_s
        while True:
            found = (self.read(path) or "").split("\n")[known:-1]  # the last may not be whole
            if found or time.monotonic() > end_s:
                return found
            time.sleep(_LOOK_S)

    def ran(self, folder: str) -> list[str]:
        """Return the tokens of the batch jobs of a folder that have run."""
        return [json.loads(one.read_text())["token"] for one in Path(folder).glob("*/node.json")]

    def logs(self, folder: str) -> list[tuple[str, str, str]]:
        """Return the logs that batch jobs have left: number, name and text."""
        found = Path(folder).glob("*/*.log")
        return [(one.parent.name, one.name, one.read_text(errors="replace")) for one in found]

    def remove(self, folder: str) -> None:
        """Remove a folder."""
        shutil.rmtree(folder, ignore_errors=True)


def main(root: Path) -> None:
    """Serve a manager elsewhere until its connection ends.

    Args:
        root: Folder for what arrives.
    """
    serve(sys.stdin.buffer, sys.stdout.buffer, root, OnLogin())
