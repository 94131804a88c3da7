"""Prepares all data of a job on this machine: fetched, mounted, or found."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spottrain.cloud.data.cache import Cache, ReportProgress
from spottrain.cloud.data.request import (
    DataError,
    DataMissingError,
    DataRequest,
    DataUnavailableError,
    short_hash,
)
from spottrain.cloud.data.sources import open_source
from spottrain.errors import one_line

_SOURCE_THREADS = 8
_MOUNT_S = 120.0
_NOT_ANSWERED = (
    "timed out",
    "timeout",
    "unreachable",
    "refused",
    "temporar",
    "resolve",
)
"""Parts of messages of ``mount`` after which a retry may succeed."""


def fetch_data(
    requests: Sequence[DataRequest],
    cache: Cache,
    report: ReportProgress = lambda line: None,
) -> dict[str, str]:
    """Fetch, mount or find each dataset.

    Args:
        cache: Where fetched data is kept.
        report: Called with progress.

    Returns:
        The environment variables by which user code finds the data.

    Raises:
        DataError: some data cannot be provided as the job file specifies.
        DataUnavailableError: some data is unavailable now.
    """
    remote = [request for request in requests if request.url]
    with ThreadPoolExecutor(_SOURCE_THREADS, "data-source") as threads:
        sources = dict(zip(remote, threads.map(open_source, remote), strict=True))
    found = {}
    for request in requests:
        if request.url:
            path = cache.ensure(request, sources[request], report)
        elif request.mount:
            # Outside the cache, whose eviction must never delete mounted files.
            path = mount(request, cache.folder.with_name(f"{cache.folder.name}-mounts"))
        else:
            path = _existing_path(request)
        found[request.variable] = str(path)
    return found


def _existing_path(request: DataRequest) -> Path:
    """Return the path of data that the machine already has.

    Raises:
        DataMissingError: it does not exist.
    """
    path = Path(request.path).expanduser()
    if not path.exists():
        raise DataMissingError(f"{request.what}: does not exist; check the path")
    return path


def mount(request: DataRequest, folder: Path) -> Path:
    """Mount a file system below ``folder`` unless it is mounted; return its path.

    Raises:
        DataError: it cannot be mounted here.
        DataUnavailableError: its server does not answer now.
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
    except FileNotFoundError as error:
        raise DataError(
            f"{request.what}: this machine has no {command[0]}; install it on the image, "
            "or log in as root"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DataUnavailableError(
            f"{request.what}: mount took longer than {_MOUNT_S:g} s; check that "
            "this machine can reach its server"
        ) from error
    if done.returncode:
        said = one_line(done.stderr) or f"mount ended with {done.returncode}"
        away = any(sign in said.lower() for sign in _NOT_ANSWERED)
        raise (DataUnavailableError if away else DataError)(f"{request.what}: {said}")
    return target
