"""From a host that was taken to an agent that runs; every step may be repeated."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.port.provider import AgentBootstrap
from spottrain.cloud.ssh.on_vm.package import carries_obstore, package
from spottrain.cloud.ssh.transport.connection import HostConnection
from spottrain.cloud.ssh.transport.hosts import (
    Host,
    Payload,
    SetupError,
    UnfitHostError,
    UnreachableHostError,
)
from spottrain.cloud.ssh.transport.session import CALL_S, Session
from spottrain.errors import CapacityError

logger = logging.getLogger(__name__)

_CHECK_THREADS = 32
_SLOWEST_BYTES_PER_S = 250_000
_DATA_POLL_S = 5.0
"""From one look at data that arrives to the next."""
_NEEDED = ("torch", "numpy", "safetensors")
_MUST_MATCH = ("machine", "python", "torch", "cuda", "nccl")


def bring_up(
    connection: HostConnection,
    vm_id: str,
    bootstrap: AgentBootstrap,
    announce: Callable[[], None],
    payload: Payload,
    fleet_software: Callable[[dict[str, str]], dict[str, str]],
    report: Callable[[str], None] = lambda doing: None,
) -> None:
    """Bring our software, the user's code and the agent to a host.

    Args:
        connection: To the host.
        vm_id: The VM that the host is.
        bootstrap: What the agent is given.
        announce: Has the agent know where its calls are taken; called before it is started.
        payload: What the host is given.
        fleet_software: Given a host's software, returns what all hosts must have.
        report: Told what is under way, when it is the job's own.

    Raises:
        VmNotFoundError: the VM is gone.
        SetupError: the user's setup failed, or data is not what the job file says.
        UnfitHostError: the host lacks something, or differs from the others.
        CloudError: it cannot be reached.
    """
    host, session = connection.host, connection.session()
    claim, state = connection.status()
    if claim is None or claim["vm_id"] != vm_id or state == "over":
        raise VmNotFoundError(f"VM {vm_id} is not on {host.place} any more")
    if state == "running":
        announce()
        return
    folder, payload = _prepare(session, vm_id, payload, report)
    check_software(host.place, session.call("probe"), fleet_software, payload.buckets)
    announce()
    session.call(
        "start",
        vm_id=vm_id,
        package=folder,
        agent={
            "vm_id": vm_id,
            "manager_url": bootstrap.manager_url,
            "ca_pem": bootstrap.ca_pem,
            "token": bootstrap.token,
            "private_address": session.private_address,
            "num_slots": host.slots,
            "notices": dict(payload.notices),
        },
        environment=dict(payload.environment),
    )
    logger.info("%s: agent of %s started", host.place, vm_id)


def _prepare(
    session: Session, vm_id: str, payload: Payload, report: Callable[[str], None]
) -> tuple[str, Payload]:
    """Have on the host all that agents and workers need.

    Returns:
        Our software's folder, and the payload with the variables that lead to data.
    """
    folder = _deliver(session, vm_id, payload)
    if payload.data:
        found = _bring_data(session, vm_id, folder, payload, report)
        payload = replace(payload, environment={**payload.environment, **found})
    if payload.setup:
        report("setup")
        _set_up(session, vm_id, payload)
    return folder, payload


def _deliver(session: Session, vm_id: str, payload: Payload) -> str:
    """Bring our software and the workdir; return the software's folder."""
    ours = package(payload.buckets and carries_obstore(session.call("probe")))
    folder, workdir = f"package-{ours.sha256[:12]}", f"{vm_id}/workdir"
    has_package, has_workdir = session.call("has", names=[folder, workdir])
    if not has_package:
        _send(session, vm_id, folder, ours.archive)
    if not has_workdir:
        _send(session, vm_id, workdir, payload.workdir.read_bytes())
    return folder


def _send(session: Session, vm_id: str, name: str, archive: bytes) -> None:
    place, size = session.host.place, len(archive)
    logger.info("%s: sending %s, %d bytes", place, name, size)
    session.unpack(vm_id, name, archive, CALL_S + size / _SLOWEST_BYTES_PER_S)


def _bring_data(
    session: Session,
    vm_id: str,
    folder: str,
    payload: Payload,
    report: Callable[[str], None],
) -> dict[str, str]:
    """Have the job's data on a host; return the variables that lead to it."""
    place, last_line = session.host.place, ""
    while True:
        seen = session.call(
            "data",
            _DATA_POLL_S + CALL_S,
            vm_id=vm_id,
            package=folder,
            environment=dict(payload.environment),
            requests=payload.data,
            limit_s=payload.data_limit_s,
            wait_s=_DATA_POLL_S,
        )
        code, line = seen["code"], seen["line"]
        if code == 0:
            found: dict[str, str] = json.loads(line)
            logger.info("%s: data is there: %s", place, ", ".join(found))
            return found
        if code == SetupError.exit_code:
            raise SetupError(f"{place}: {line}")
        if code is not None:
            raise CloudError(f"{place}: data is not there yet: {line or code}")
        if line != last_line:
            logger.info("%s: data %s", place, line)
            report(f"data {line}")
            last_line = line


def _set_up(session: Session, vm_id: str, payload: Payload) -> None:
    place, limit_s = session.host.place, payload.setup_limit_s
    logger.info("%s: setup begins", place)
    done = session.call(
        "setup",
        limit_s + CALL_S,
        vm_id=vm_id,
        script=payload.setup,
        environment=dict(payload.environment),
        limit_s=limit_s,
    )
    if done["code"] == 0:
        logger.info("%s: setup is done", place)
        return
    last = (done["output"].strip().splitlines() or ["no output"])[-1]
    how = f"ended with {done['code']}"
    if done["code"] is None:
        how = f"took longer than {limit_s:g} s"
    raise SetupError(
        f"{place}: setup {how}: {last}; mend setup: in the job file", done["output"]
    )


def check_software(
    place: str,
    found: dict[str, str],
    fleet_software: Callable[[dict[str, str]], Mapping[str, str]],
    buckets: bool = False,
) -> None:
    """Check that a host has what workers need, in the versions that the fleet has.

    Args:
        place: The host, for errors.
        found: What ``probe`` found there.
        fleet_software: Given that, returns what all hosts must have.
        buckets: Whether it needs obstore, its own or ours.

    Raises:
        UnfitHostError: it has not.
    """
    needed: tuple[str, ...] = _NEEDED
    if buckets and not carries_obstore(found):
        needed = (*_NEEDED, "obstore")
    missing = [name for name in needed if not found[name]]
    if missing:
        raise UnfitHostError(
            f"{place}: its Python has no {', '.join(missing)}; install it there, in "
            "setup:, or name another Python with python:"
        )
    wanted = fleet_software(found)
    for name in _MUST_MATCH:
        if found[name] != wanted[name]:
            raise UnfitHostError(
                f"{place}: has {name} {found[name] or 'none'}, the other hosts have "
                f"{wanted[name] or 'none'}; all must have the same"
            )


def check_hosts(
    hosts: Sequence[Host],
    *,
    min_hosts: int,
    needs_software: bool,
    buckets: bool = False,
) -> list[str]:
    """Try all hosts at the same time; return what to tell the user, a line each.

    One that does not answer may do so later; one that answers wrongly never will.

    Args:
        hosts: To try.
        min_hosts: How many must answer.
        needs_software: Whether they must have what workers need already.
        buckets: Whether that includes what talks to a bucket.

    Raises:
        CloudError: the first host that is not what it should be.
        CapacityError: too few answer.
    """
    with ThreadPoolExecutor(_CHECK_THREADS, "ssh-check") as threads:
        answers = list(threads.map(_probe, hosts))
    away = [str(x) for x in answers if isinstance(x, UnreachableHostError)]
    ready = [(h, x) for h, x in zip(hosts, answers, strict=True) if isinstance(x, dict)]
    if len(ready) < min_hosts:
        raise CapacityError(
            f"{len(ready)} of {len(hosts)} hosts answer, resources.min_vms is {min_hosts}: "
            f"{away[0] if away else 'list more in ssh.hosts'}"
        )
    fleet_software = ready[0][1]
    for host, software in ready if needs_software else ():
        check_software(host.place, software, lambda _: fleet_software, buckets)
    what = f": {fleet_software['machine']}, Python {fleet_software['python']}"
    if needs_software:
        what += f", torch {fleet_software['torch']}"
    return [*away, f"{len(ready)} of {len(hosts)} hosts answer{what}"]


def _probe(host: Host) -> dict[str, str] | UnreachableHostError:
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
