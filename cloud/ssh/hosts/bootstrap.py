"""Idempotent bootstrap of a claimed host: software, code, data, setup, agent."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.port.provider import AgentBootstrap
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.cloud.ssh.on_vm.package import Package, carries_obstore, package
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
from spottrain.gpus.builds import UnfitBuildError, build_of, check_driver
from spottrain.wire.messages import DeviceChoice

logger = logging.getLogger(__name__)

_CHECK_THREADS = 32
_SLOWEST_BYTES_PER_S = 250_000
_DATA_POLL_S = 5.0
"""Time between two polls of data preparation."""
_NEEDED = ("torch", "numpy", "safetensors")
_MUST_MATCH = ("machine", "python", "torch", "cuda", "nccl")


def bring_up(
    connection: HostConnection,
    vm_id: str,
    bootstrap: AgentBootstrap,
    announce: Callable[[], None],
    payload: Payload,
    memory: HostMemory,
    report: Callable[[str], None] = lambda doing: None,
) -> None:
    """Send our software and the user's code to a host and start the agent.

    An agent that runs there already stays, unless its software is not ours.

    Args:
        connection: The host's.
        vm_id: The VM on that host.
        bootstrap: How the agent reaches the manager.
        announce: Sets the address for the agent's calls; called before it is started.
        payload: The job's files and settings.
        memory: Of the job's hosts; the first one's versions are required of all.
        report: Called with the current step.

    Raises:
        VmNotFoundError: the VM has ended.
        SetupError, UnfitHostError: setup or data failed, or software is missing.
    """
    host, session = connection.host, connection.session()
    claim, state = connection.status()
    if claim is None or claim["vm_id"] != vm_id or state == "over":
        raise VmNotFoundError(f"VM {vm_id} is no longer on {host.place}")
    ours = package(payload.buckets and carries_obstore(session.call("probe")))
    folder = f"package-{ours.sha256[:12]}"
    if state == "running" and claim.get("package") == folder:
        announce()
        return
    pins = pins_of(memory.known_software())
    payload = _prepare(session, vm_id, folder, ours, payload, pins, report)
    software = session.call("probe")
    check_software(host.place, software, memory.same_software, payload.buckets)
    announce()
    session.call(
        "start",
        vm_id=vm_id,
        package=folder,
        agent={
            **asdict(bootstrap),
            "vm_id": vm_id,
            "private_address": session.private_address,
            "num_slots": host.slots,
            "min_gpus": host.gpus,
            "notices": dict(payload.notices),
        },
        environment=dict(payload.environment),
    )
    logger.info("%s: agent of %s started", host.place, vm_id)


def _prepare(
    session: Session,
    vm_id: str,
    folder: str,
    ours: Package,
    payload: Payload,
    pins: Sequence[str],
    report: Callable[[str], None],
) -> Payload:
    """Send to the host everything that agents and workers need.

    Args:
        session: The connection to the host.
        vm_id: The VM on that host.
        folder: Of our software on the host.
        ours: Our software.
        payload: The job's files and settings.
        pins: Requirements that bind what ``setup`` installs.
        report: Called with the current step.

    Returns:
        The payload with the variables for data.
    """
    _deliver(session, vm_id, folder, ours, payload)
    if payload.data:
        found = _bring_data(session, vm_id, folder, payload, report)
        payload = replace(payload, environment={**payload.environment, **found})
    if payload.setup:
        report("setup")
        _set_up(session, vm_id, payload, pins)
    return payload


def _deliver(
    session: Session, vm_id: str, folder: str, ours: Package, payload: Payload
) -> None:
    """Send our software, to be in ``folder``, and the workdir."""
    workdir = f"{vm_id}/workdir"
    has_package, has_workdir = session.call("has", names=[folder, workdir])
    if not has_package:
        _send(session, vm_id, folder, ours.archive)
    if not has_workdir:
        _send(session, vm_id, workdir, payload.workdir.read_bytes())


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
    """Prepare the job's data on a host; return the environment variables for it."""
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
            logger.info("%s: data is ready: %s", place, ", ".join(found))
            return found
        if code == SetupError.exit_code:
            raise SetupError(f"{place}: {line}")
        if code is not None:
            raise CloudError(f"{place}: data is not ready yet: {line or code}")
        if line != last_line:
            logger.info("%s: data %s", place, line)
            report(f"data {line}")
            last_line = line


def pins_of(software: Mapping[str, str]) -> list[str]:
    """Return requirements that give a host the fleet's versions of packages.

    A release of torch in the middle of a job would otherwise make all later VMs unfit.
    NCCL and CUDA come with torch, which names their versions.

    Args:
        software: Of the fleet's first host, by ``HostAgent.probe``.
    """
    torch = software.get("torch", "").partition("+")[0]  # the build is the index's
    return [f"torch=={torch}"] if torch else []


def _set_up(
    session: Session, vm_id: str, payload: Payload, pins: Sequence[str]
) -> None:
    place, limit_s = session.host.place, payload.setup_limit_s
    logger.info("%s: setup started", place)
    done = session.call(
        "setup",
        limit_s + CALL_S,
        vm_id=vm_id,
        script=payload.setup,
        pins=list(pins),
        environment=dict(payload.environment),
        limit_s=limit_s,
    )
    if done["code"] == 0:
        logger.info("%s: setup finished", place)
        return
    last = (done["output"].strip().splitlines() or ["no output"])[-1]
    how = f"ended with {done['code']}"
    if done["code"] is None:
        how = f"took longer than {limit_s:g} s"
    raise SetupError(
        f"{place}: setup {how}: {last}; fix setup: in the job file", done["output"]
    )


def check_software(
    place: str,
    found: dict[str, str],
    fleet_software: Callable[[dict[str, str]], Mapping[str, str]],
    buckets: bool = False,
) -> None:
    """Check that a host has the software that workers need, in the fleet's versions.

    Args:
        place: Name of the host in errors.
        found: Its software, by ``HostAgent.probe``.
        fleet_software: Given that, returns the versions that all hosts must have.
        buckets: The job needs obstore, the host's own or ours.

    Raises:
        UnfitHostError: it lacks software or has other versions.
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
                f"{wanted[name] or 'none'}; all hosts must have the same"
            )


def check_hosts(
    hosts: Sequence[Host],
    *,
    min_hosts: int,
    needs_software: bool,
    buckets: bool = False,
    device: DeviceChoice = "auto",
) -> list[str]:
    """Check all hosts in parallel; return lines for the user.

    A host that does not answer may do so later; an unsuitable one is an error.

    Args:
        hosts: To check.
        min_hosts: Minimum number that must answer.
        needs_software: They must already have the software that workers need.
        buckets: That includes obstore.
        device: What their slots are to compute on.

    Raises:
        CloudError: a host is unsuitable; the first one's error.
        CapacityError: too few hosts answer.
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
    for host, software in ready:
        check_gpus(host.place, software, device, host.gpu)
    what = f": {fleet_software['machine']}, Python {fleet_software['python']}"
    if needs_software:
        what += f", torch {fleet_software['torch']}"
    if fleet_software["driver"] and device != "cpu":
        what += f", NVIDIA driver {fleet_software['driver']}"
        what += f", {fleet_software['gpu']}" if fleet_software["gpu"] else ""
    return [*away, f"{len(ready)} of {len(hosts)} hosts answer{what}"]


def check_gpus(
    place: str, found: Mapping[str, str], device: DeviceChoice, declared: str = ""
) -> None:
    """Check that a host has a driver, and one that its torch runs on, and its GPUs.

    The rest, such as how many GPUs it has, its agent finds out.

    Args:
        place: Name of the host in errors.
        found: Its software, by ``HostAgent.probe``.
        device: What its slots are to compute on.
        declared: Name of its GPUs in the job file; empty: none.

    Raises:
        UnfitHostError: it has none, or one that is too old, or other GPUs.
    """
    if device == "cpu":
        return
    driver = found["driver"]
    if not driver and device == "gpu":
        raise UnfitHostError(
            f"{place}: no NVIDIA driver is loaded; install one, or set resources.device "
            "to cpu"
        )
    have, asked = map(_words, (found["gpu"], declared))
    if have and not asked <= have:
        raise UnfitHostError(
            f"{place}: its GPUs are {found['gpu']}, ssh.hosts.gpu says {declared}; change "
            "it, or leave it out"
        )
    if not driver or not found["torch"]:
        return
    try:
        check_driver(build_of(found["cuda"]), driver)
    except UnfitBuildError as error:
        raise UnfitHostError(f"{place}: {error}") from error


def _words(name: str) -> set[str]:
    """Return the parts of a GPU's name: ``A100-80GB`` is an ``NVIDIA A100-SXM4-80GB``."""
    return set(re.findall("[a-z0-9]+", name.lower()))


def _probe(host: Host) -> dict[str, str] | UnreachableHostError:
    """Return a host's software, or the error if it does not answer."""
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
