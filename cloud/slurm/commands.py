"""Runs Slurm's commands on this machine."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from spottrain.cloud.port.errors import CloudError, MisconfiguredError
from spottrain.cloud.slurm import queue
from spottrain.cloud.slurm.settings import SlurmSettings

_ANSWER_S = 60.0
"""Time limit of a command; Slurm's own for one message is MessageTimeout, 10 s."""
_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LD_LIBRARY_PATH", "SLURM_CONF")
"""Variables that batch jobs get from this process: ``sbatch`` hands all on that it has."""


def run(argv: Sequence[str], data: str = "") -> str:
    """Return what a command of Slurm's prints.

    Args:
        data: Its input.

    Raises:
        CloudError: it failed; see ``queue.refusal``.
    """
    return _run(argv, data).stdout


def _run(argv: Sequence[str], data: str) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    try:
        done = subprocess.run(
            argv,
            input=data,
            env={**environment, "SLURM_TIME_FORMAT": "%s"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise MisconfiguredError(
            f"slurm: this machine has no {argv[0]}; start the job on a login node of the cluster"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CloudError(f"slurm: {argv[0]}: {error}") from error
    if done.returncode:
        raise queue.refusal(argv[0], done.stderr)
    return done


def would_take(settings: SlurmSettings, partition: str) -> str:
    """Return when a batch job would begin, if it were submitted now.

    Raises:
        CloudError: it would be refused.
    """
    make_folder(settings.folder)
    argv = queue.launch_argv(settings, settings.folder, partition, "spottrain", {})
    said = _run([*argv, "--test-only"], "#!/bin/sh\n").stderr
    found = re.search(r"to start at (\d+)", said)
    return f"would start a job at {queue.clock(float(found[1]))}" if found else "takes jobs"


def check_address(settings: SlurmSettings) -> None:
    """Check that agents can be served at this machine's address.

    Raises:
        CloudError: the address is not known, or one of the whole world.
    """
    address = settings.address or own_address()
    try:
        is_public = ipaddress.ip_address(address).is_global
    except ValueError as error:
        raise MisconfiguredError(f"slurm.address: {error}; give an IP address") from error
    if is_public:
        raise MisconfiguredError(
            f"slurm.address: {address} is public; give this machine's address in the nodes' network"
        )


def make_folder(folder: Path) -> None:
    """Make a folder that only this user may enter, on the shared file system.

    Raises:
        MisconfiguredError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise MisconfiguredError(f"slurm.folder: {error}; name another folder") from error


def own_address() -> str:
    """Return this machine's address in the network of the controller.

    Raises:
        CloudError: it is not known.
    """
    said = run(["scontrol", "show", "config"])
    host = re.search(r"^SlurmctldHost\[0\]\s*=\s*([^\s(]+)(?:\(([^)]+)\))?", said, re.MULTILINE)
    if host is None:
        raise CloudError("slurm: its controller is not known; give slurm.address")
    controller = host[2] or host[1]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((controller, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CloudError(f"slurm: {controller}: {error}; give slurm.address") from error
