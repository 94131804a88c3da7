"""Brings all data that a job wants to this machine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spottrain.cloud.data.cache import Cache, Tell
from spottrain.cloud.data.mounts import mount
from spottrain.cloud.data.request import DataError, DataRequest
from spottrain.cloud.data.sources import look

_LOOKS = 8


def bring(
    requests: Sequence[DataRequest], cache: Cache, tell: Tell = lambda line: None
) -> dict[str, str]:
    """Have everything on this machine.

    Args:
        requests: What is wanted.
        cache: Where it is kept.
        tell: Told how far it is.

    Returns:
        The environment variables by which the user's code finds it.

    Raises:
        DataError: something cannot be had as the job file says it.
        DataAwayError: something cannot be had now.
    """
    remote = [request for request in requests if request.url]
    with ThreadPoolExecutor(_LOOKS, "look") as threads:
        sources = dict(zip(remote, threads.map(look, remote), strict=True))
    found = {}
    for request in requests:
        if request.url:
            path = cache.bring(request, sources[request], tell)
        elif request.mount:
            # Not in the cache: what makes room there must never reach what is mounted.
            path = mount(request, cache.folder.with_name(f"{cache.folder.name}-mounts"))
        else:
            path = _there(request)
        found[request.variable] = str(path)
    return found


def _there(request: DataRequest) -> Path:
    """Return what a machine is said to have.

    Raises:
        DataError: it has not.
    """
    path = Path(request.path).expanduser()
    if not path.exists():
        raise DataError(f"{request.what}: is not there; check the path")
    return path
