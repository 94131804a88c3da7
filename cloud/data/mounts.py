"""File systems that a job wants mounted, by the machine's own ``mount``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from spottrain.cloud.data.request import (
    DataAwayError,
    DataError,
    DataRequest,
    short_hash,
)

_MOUNT_S = 120.0
_NOT_ANSWERED = (
    "timed out",
    "timeout",
    "unreachable",
    "refused",
    "temporar",
    "resolve",
)
"""What ``mount`` says when the other side may answer later."""


def mount(request: DataRequest, folder: Path) -> Path:
    """Mount a file system below ``folder`` unless it is; return where.

    Raises:
        DataError: it cannot be mounted here.
        DataAwayError: its server does not answer now.
    """
    target = folder / short_hash(request.mount, request.type, request.options)
    if os.path.ismount(target):
        return target
    target.mkdir(mode=0o755, parents=True, exist_ok=True)
    command = ["mount", "-t", request.type]
    command += ["-o", request.options] if request.options else []
    command += [request.mount, str(target)]
    if os.geteuid() != 0:
        command = ["sudo", "-n", *command]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MOUNT_S,
        )
    except FileNotFoundError:
        raise DataError(
            f"{request.what}: this machine has no {command[0]}; install it on the image, "
            "or log in as root"
        ) from None
    except subprocess.TimeoutExpired:
        raise DataAwayError(
            f"{request.what}: mount took longer than {_MOUNT_S:g} s; is its server reached "
            "from here?"
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"mount ended with {done.returncode}"
        away = any(sign in said.lower() for sign in _NOT_ANSWERED)
        raise (DataAwayError if away else DataError)(f"{request.what}: {said}")
    return target
