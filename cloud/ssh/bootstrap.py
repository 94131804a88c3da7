"""From a host that was taken to an agent that runs; every step may be repeated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from spottrain.cloud.errors import VmNotFoundError
from spottrain.cloud.provider import AgentBootstrap
from spottrain.cloud.ssh.hosts import Payload, SetupError, UnfitHostError
from spottrain.cloud.ssh.line import Line
from spottrain.cloud.ssh.package import package
from spottrain.cloud.ssh.session import CALL_S, Session

logger = logging.getLogger(__name__)

_SLOWEST_BYTES_PER_S = 250_000
_NEEDED = ("torch", "numpy", "safetensors")
_ALIKE = ("machine", "python", "torch", "cuda", "nccl")


def bring_up(
    line: Line,
    vm_id: str,
    bootstrap: AgentBootstrap,
    manager: tuple[str, int],
    payload: Payload,
    fleet: Callable[[dict[str, str]], dict[str, str]],
) -> None:
    """Bring our software, the user's code and the agent to a host.

    Args:
        line: To the host.
        vm_id: The VM that the host is.
        bootstrap: What the agent is given; it calls through a tunnel.
        manager: Address and port to which the tunnel leads.
        payload: What the host is given.
        fleet: Given a host's software, returns what all hosts must have.

    Raises:
        VmNotFoundError: the VM is gone.
        SetupError: the user's setup failed.
        UnfitHostError: the host lacks something, or differs from the others.
        CloudError: it cannot be reached.
    """
    host, session = line.host, line.session()
    claim, state = line.look()
    if claim is None or claim["vm_id"] != vm_id or state == "over":
        raise VmNotFoundError(f"VM {vm_id} is not on {host.place} any more")
    if state == "running":
        line.carry(vm_id, manager, claim["port"])
        return
    folder = _deliver(session, vm_id, payload)
    if payload.setup:
        _set_up(session, vm_id, payload)
    check_software(host.place, session.call("probe"), fleet)
    port = line.carry(vm_id, manager, 0)
    session.call(
        "start",
        vm_id=vm_id,
        package=folder,
        agent={
            "vm_id": vm_id,
            "manager_url": f"https://127.0.0.1:{port}",
            "ca_pem": bootstrap.ca_pem,
            "token": bootstrap.token,
            "private_address": session.private_address,
            "num_slots": host.slots,
            "notices": dict(payload.notices),
        },
        environment=dict(payload.environment),
    )
    logger.info("%s: agent of %s started", host.place, vm_id)


def _deliver(session: Session, vm_id: str, payload: Payload) -> str:
    """Bring our software and the workdir; return the software's folder."""
    ours = package()
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
    fleet: Callable[[dict[str, str]], Mapping[str, str]],
) -> None:
    """Check that a host has what workers need, in the versions that the fleet has.

    Raises:
        UnfitHostError: it has not.
    """
    missing = [name for name in _NEEDED if not found[name]]
    if missing:
        raise UnfitHostError(
            f"{place}: its Python has no {', '.join(missing)}; install it there, in "
            "setup:, or name another Python with python:"
        )
    wanted = fleet(found)
    for name in _ALIKE:
        if found[name] != wanted[name]:
            raise UnfitHostError(
                f"{place}: has {name} {found[name] or 'none'}, the other hosts have "
                f"{wanted[name] or 'none'}; all must have the same"
            )
