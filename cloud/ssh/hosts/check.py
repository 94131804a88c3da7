"""Are the user's hosts what the job file says, before anything is begun?"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from spottrain.cloud.ssh.hosts.bootstrap import check_software
from spottrain.cloud.ssh.transport.hosts import Host, UnreachableHostError
from spottrain.cloud.ssh.transport.session import Session
from spottrain.errors import CapacityError

_THREADS = 32


def check(
    hosts: Sequence[Host], *, least: int, needs_software: bool, buckets: bool = False
) -> list[str]:
    """Try all hosts at the same time; return what to tell the user, a line each.

    One that does not answer may do so later; one that answers wrongly never will.

    Args:
        hosts: To try.
        least: How many must answer.
        needs_software: Whether they must have what workers need already.
        buckets: Whether that includes what talks to a bucket.

    Raises:
        CloudError: the first host that is not what it should be.
        CapacityError: too few answer.
    """
    with ThreadPoolExecutor(_THREADS, "ssh-check") as threads:
        answers = list(threads.map(_try, hosts))
    away = [str(x) for x in answers if isinstance(x, UnreachableHostError)]
    ready = [(h, x) for h, x in zip(hosts, answers, strict=True) if isinstance(x, dict)]
    if len(ready) < least:
        raise CapacityError(
            f"{len(ready)} of {len(hosts)} hosts answer, resources.min_vms is {least}: "
            f"{away[0] if away else 'list more in ssh.hosts'}"
        )
    fleet = ready[0][1]
    for host, software in ready if needs_software else ():
        check_software(host.place, software, lambda _: fleet, buckets)
    what = f": {fleet['machine']}, Python {fleet['python']}"
    if needs_software:
        what += f", torch {fleet['torch']}"
    return [*away, f"{len(ready)} of {len(hosts)} hosts answer{what}"]


def _try(host: Host) -> dict[str, str] | UnreachableHostError:
    """Return a host's software, or why it does not answer."""
    try:
        session = Session(host)
    except UnreachableHostError as error:
        return error
    try:
        software: dict[str, str] = session.call("probe")
    except UnreachableHostError as error:
        return error
    finally:
        session.close()
    return software
