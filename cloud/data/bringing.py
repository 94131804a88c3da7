"""Brings all data that a job wants to this machine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spottrain.cloud.data.cache import Cache, Tell
from spottrain.cloud.data.mounts import mount
from spottrain.cloud.data.sources import look
from spottrain.cloud.data.wish import DataError, DataRequest

_LOOKS = 8


def bring(
    wishes: Sequence[DataRequest], cache: Cache, tell: Tell = lambda line: None
) -> dict[str, str]:
    """Have everything on this machine.

    Args:
        wishes: What is wanted.
        cache: Where it is kept.
        tell: Told how far it is.

    Returns:
        The environment variables by which the user's code finds it.

    Raises:
        DataError: something cannot be had as the job file says it.
        DataAwayError: something cannot be had now.
    """
    remote = [wish for wish in wishes if wish.url]
    with ThreadPoolExecutor(_LOOKS, "look") as threads:
        sources = dict(zip(remote, threads.map(look, remote), strict=True))
    found = {}
    for wish in wishes:
        if wish.url:
            path = cache.bring(wish, sources[wish], tell)
        elif wish.mount:
            # Not in the cache: what makes room there must never reach what is mounted.
            path = mount(wish, cache.folder.with_name(f"{cache.folder.name}-mounts"))
        else:
            path = _there(wish)
        found[wish.variable] = str(path)
    return found


def _there(wish: DataRequest) -> Path:
    """Return what a machine is said to have.

    Raises:
        DataError: it has not.
    """
    path = Path(wish.path).expanduser()
    if not path.exists():
        raise DataError(f"{wish.what}: is not there; check the path")
    return path
