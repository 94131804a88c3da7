"""Idempotent bootstrap of a claimed host: software, code, data, setup, agent."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from spottrain.cloud.port import lease
from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.port.provider import AgentBootstrap
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.cloud.ssh.hosts.start_log import StartLog
from spottrain.cloud.ssh.on_vm.package import Package, carries_obstore, package
from spottrain.cloud.ssh.transport.conversation import CALL_S
from spottrain.cloud.ssh.transport.hosts import (
    Calls,
    Host,
    MissingSoftwareError,
    Payload,
    SetupError,
    UnfitHostError,
    UnreachableHostError,
)
from spottrain.cloud.ssh.transport.session import Session
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


class Connection(Protocol):
    """What is known of a host, and how it is asked."""

    @property
    def host(self) -> Host:
        """The host."""

    def session(self) -> Calls:
        """Return the connection to its host agent, opened if needed."""

    def status(self) -> tuple[dict[str, Any] | None, str]:
        """Return the claim on the host and its state; see ``HostAgent.status``."""


def bring_up(
    connection: Connection,
    vm_id: str,
    bootstrap: AgentBootstrap,
    announce: Callable[[], None],
    payload: Payload,
    memory: HostMemory,
    log: StartLog,
    deliver: Deliver | None = None,
    *,
    has_lease: bool = False,
) -> bool:
    """Send our software and the user's code to a host and start the agent.

    An agent that runs there already stays, unless its software is not ours.

    Args:
        connection: The host's.
        bootstrap: How the agent reaches the manager.
        announce: Sets the address for the agent's calls; called before it is started.
        payload: The job's files and settings.
        memory: Of the job's hosts; the first one's versions are required of all.
        log: Its steps are added there.
        deliver: Brings archives to the host; None: they are sent.
        has_lease: It must end itself without a manager (``cloud.port.lease``).

    Returns:
        False if the agent runs already.

    Raises:
        VmNotFoundError: the VM has ended.
        SetupError, UnfitHostError: setup or data failed, or software or the lease is
            missing.
    """
    host, session = connection.host, connection.session()
    claim, state = connection.status()
    if claim is None or claim["vm_id"] != vm_id or state == "over":
        raise VmNotFoundError(f"VM {vm_id} is no longer on {host.place}")
    ours = package(payload.buckets and carries_obstore(session.call("probe")))
    folder = f"package-{ours.sha256[:12]}"
    if state == "running" and claim.get("package") == folder:
        announce()
        return False
    preparation = _Preparation(session, vm_id, folder, payload, log)
    preparation.deliver(ours, deliver or _send)
    if payload.data:
        payload = preparation.bring_data()
    if payload.setup:
        preparation.set_up(pins_of(memory.known_software()))
    with log.step("agent", session):
        software = session.call("probe")
        check_software(host.place, software, memory.same_software, payload.buckets)
        if has_lease:
            _check_lease(session, log)
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
    return True


def _check_lease(session: Calls, log: StartLog) -> None:
    """Check that a VM would end itself without a manager.

    Raises:
        UnfitHostError: it would not: its boot script failed, or was never run.
    """
    if session.call("await_lease", wait_s=0.0):
        log.doing = "its boot script has not finished"
        limit_s = lease.WAIT_S
        if wrong := session.call("await_lease", limit_s + CALL_S, wait_s=limit_s):
            raise UnfitHostError(f"{session.host.place}: {wrong}")


Deliver = Callable[[Calls, str, str, bytes], str]
"""Brings an archive to a host and has it unpacked there: session, VM id, name of the
folder, archive; returns where the host has it from."""


def _send(session: Calls, vm_id: str, name: str, archive: bytes) -> str:
    send(session, vm_id, name, archive)
    return "manager"


def send(session: Calls, vm_id: str, name: str, archive: bytes, keep: str = "") -> None:
    """Send an archive to a host and have it unpacked there.

    Args:
        session: The connection to the host.
        name: Folder below ours.
        keep: Its SHA-256, if the host is to keep it for other VMs.
    """
    place, size = session.host.place, len(archive)
    logger.info("%s: sending %s, %d bytes", place, name, size)
    limit_s = CALL_S + size / _SLOWEST_BYTES_PER_S
    session.unpack(vm_id, name, archive, limit_s, keep)


@dataclass
class _Preparation:
    """Brings to a host everything that agents and workers need.

    Args:
        session: The connection to the host.
        folder: Of our software on the host.
        payload: The job's files and settings.
        log: Of the start.
    """

    session: Calls
    vm_id: str
    folder: str
    payload: Payload
    log: StartLog

    def deliver(self, ours: Package, deliver: Deliver) -> None:
        """Bring our software, and the workdir."""
        session, vm_id, workdir = self.session, self.vm_id, f"{self.vm_id}/workdir"
        has_package, has_workdir = session.call("has", names=[self.folder, workdir])
        if not has_package:
            with self.log.step("software", session) as source:
                source.append(deliver(session, vm_id, self.folder, ours.archive))
        if not has_workdir:
            with self.log.step("workdir", session) as source:
                archive = self.payload.workdir.read_bytes()
                source.append(deliver(session, vm_id, workdir, archive))

    def bring_data(self) -> Payload:
        """Prepare the job's data; return the payload with the variables for it."""
        with self.log.step("data", self.session):
            found = self._wait_for_data()
        given = {**self.payload.environment, **found}
        self.payload = replace(self.payload, environment=given)
        return self.payload

    def _wait_for_data(self) -> dict[str, str]:
        place, last_line, payload = self.session.host.place, "", self.payload
        while True:
            seen = self.session.call(
                "data",
                _DATA_POLL_S + CALL_S,
                vm_id=self.vm_id,
                package=self.folder,
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
                self.log.doing = f"data {line}"
                last_line = line

    def set_up(self, pins: Sequence[str]) -> None:
        """Run the user's setup, with the packages that an earlier VM downloaded.

        Args:
            pins: Requirements that bind what it installs.
        """
        payload, session = self.payload, self.session
        common: dict[str, Any] = {
            "vm_id": self.vm_id,
            "environment": dict(payload.environment),
        }
        place = payload.wheels and self._wheels_place()
        wheels = {
            "package": self.folder,
            "place": place,
            "limit_s": payload.setup_limit_s,
            **common,
        }
        is_there = False
        if place:
            with self.log.step("packages", session) as source:
                if digest := payload.published.digest(place):
                    wanted = {**wheels, "digest": digest}
                    is_there = self._fetch_wheels(wanted, source)
        with self.log.step("setup", session):
            self._run_setup(pins, common, cache=bool(place))
        if place and not is_there and payload.published.claim(place):
            self._publish_wheels(wheels)

    def _wheels_place(self) -> str:
        """Return where wheels of this setup, code and kind of Python are published."""
        found = self.session.call("probe")
        kind = [found[name] for name in ("system", "machine", "python")]
        digest = hashlib.sha256(self.payload.workdir.read_bytes())
        digest.update(json.dumps([self.payload.setup, *kind]).encode())
        place, mark, options = self.payload.wheels.partition("?")
        return f"{place.rstrip('/')}/{digest.hexdigest()[:16]}{mark}{options}"

    def _fetch_wheels(self, arguments: dict[str, Any], source: list[str]) -> bool:
        """Fetch packages; return whether they are there.

        Without them ``setup`` downloads: no failure here is one of the start.
        """
        limit_s = self.payload.setup_limit_s + CALL_S
        found = self.session.call("fetch_wheels", limit_s, **arguments)
        if "error" in found:
            place = self.session.host.place
            logger.warning("%s: packages are downloaded: %s", place, found["error"])
            return False
        if found["bytes"] is None:
            return False
        source.append("bucket")
        return True

    def _publish_wheels(self, arguments: dict[str, Any]) -> None:
        """Have the packages published, and remember which these are."""
        limit_s = self.payload.setup_limit_s + CALL_S
        found = self.session.call("publish_wheels", limit_s, **arguments)
        if "error" in found:
            place = self.session.host.place
            logger.warning("%s: packages are not kept: %s", place, found["error"])
        elif found["digest"] is not None:
            self.payload.published.note(arguments["place"], found["digest"])

    def _run_setup(self, pins: Sequence[str], common: dict[str, Any], *, cache: bool) -> None:
        place, limit_s = self.session.host.place, self.payload.setup_limit_s
        logger.info("%s: setup started", place)
        done = self.session.call(
            "setup",
            limit_s + CALL_S,
            script=self.payload.setup,
            pins=list(pins),
            limit_s=limit_s,
            cache=cache,
            **common,
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


def pins_of(software: Mapping[str, str]) -> list[str]:
    """Return requirements that give a host the fleet's versions of packages.

    A release in the middle of a job would otherwise make all later VMs unfit. They bind
    what ``check_software`` compares and pip installs: torch, whose build for a version of
    CUDA is the index's, and NCCL, which a setup may install in another version than torch
    names.

    Args:
        software: Of the fleet's first host, by ``HostAgent.probe``.
    """
    torch = software.get("torch", "").partition("+")[0]
    pins = {"torch": torch, software.get("nccl_package", ""): software.get("nccl", "")}
    return [f"{name}=={version}" for name, version in pins.items() if name and version]


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
        MissingSoftwareError: it lacks packages.
        UnfitHostError: it has other versions than the fleet.
    """
    needed: tuple[str, ...] = _NEEDED
    if buckets and not carries_obstore(found):
        needed = (*_NEEDED, "obstore")
    missing = [name for name in needed if not found[name]]
    if missing:
        raise MissingSoftwareError(
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
            f"{place}: no NVIDIA driver is loaded; install one, or set resources.device to cpu"
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
