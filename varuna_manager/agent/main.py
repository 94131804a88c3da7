"""The agent, our process on a VM: connects manager and supervisor, without torch.

``python -m spottrain.varuna_manager.agent.main agent.json [supervisor command...]``, standard
library only. The VM's folder is that of agent.json; the agent registers, fetches the job
and the user's workdir, starts the supervisor, and forwards commands and reports.
When the agent exits, the cloud ends the VM.

    manager <--HTTPS-- heartbeat thread --queue--> writer thread --stdin--> supervisor
    manager <--HTTPS-- report thread <--outbox-- reader thread <--stdout-- supervisor
                                        ^------- notice thread <-- the cloud's metadata
                                        ^------- GPU thread <-- NVML
    manager.address --> route thread, which breaks off calls to an outdated address

Exit codes: 0 retired or lease expired, 1 failed, 3 fenced, 143 terminated.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from spottrain import machine, spawn
from spottrain.activity import ActivityPage
from spottrain.cloud.notices import hear
from spottrain.cloud.port import lease
from spottrain.codec import decode, encode
from spottrain.errors import SpottrainError
from spottrain.gpus.find import VmDevices, find_devices
from spottrain.gpus.nvml import NoNvmlError, open_nvml
from spottrain.gpus.slots import device_of
from spottrain.gpus.watch import GpuWatch
from spottrain.logs import LOG_CHECK_S, log_to_stderr, rotate
from spottrain.network import interface_of, network_environment
from spottrain.varuna_manager.agent.client import (
    LOG_PUSH_S,
    AgentError,
    Backoff,
    LogSender,
    ManagerClient,
    NoManagerError,
    RefusedError,
    Route,
    VmFencedError,
    tail,
)
from spottrain.varuna_manager.agent.supervisor import (
    LOG,
    LOOK_S,
    STOPPED_LOOKS,
    Outbox,
    StoppedProcesses,
    SupervisorProcess,
)
from spottrain.version import software_version
from spottrain.wire import messages

logger = logging.getLogger(__name__)

RETIRED, FAILED, FENCED, TERMINATED = 0, 1, 3, 143
REGISTER_S = 600.0
"""How long a new agent tries to reach its manager."""
CHECKPOINT_S = 120.0
"""How long workers may take to checkpoint when the lease has expired."""
REFUSE_S = 60.0
"""How long the reason why this VM cannot train may take to be posted."""
FLUSH_S = 5.0
"""How long the last reports may take to be posted."""
LAST_WORDS = 300
"""Characters of a log's last line that are told."""
ROUTE_CHECK_S = 0.5
"""Time between checks of the manager's address."""
MANAGER_ADDRESS = "manager.address"
"""File in the VM's folder, written by the manager: its present address."""
SUPERVISOR = "spottrain.pipeline.process.supervisor"
_MAX_BATCH = 500


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The contents of agent.json, written when the VM was set up."""

    vm_id: str
    manager_url: str
    ca_pem: str
    token: str
    private_address: str
    num_slots: int
    notices: Mapping[str, Any]
    min_gpus: int = 0
    """GPUs that the VM was rented with."""
    slot_memory_bytes: int = 0
    """Declared memory of a slot, where VMs share a machine; 0: not declared."""
    place: int | None = None
    """Its number among the VMs that share a machine, as far as that is known."""

    @classmethod
    def load(cls, path: Path) -> Bootstrap:
        """Read agent.json.

        Raises:
            AgentError: It is missing or malformed.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise AgentError(f"{path}: not an agent's bootstrap: {error}") from error


class Agent:
    """One VM's agent.

    Args:
        bootstrap: The VM's identity and the manager's address.
        folder: The VM's work folder.
        argv: The supervisor's command.
        waiting: A child that can become it, see ``SupervisorProcess``.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        folder: Path,
        argv: Sequence[str],
        waiting: tuple[int, socket.socket] | None = None,
    ) -> None:
        self._bootstrap = bootstrap
        self._folder = folder
        self._argv = argv
        self._waiting = waiting
        # SimpleQueue.put may be called from a signal handler, Event.set may not.
        self._ends: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._outbox = Outbox()
        self._gpu_watch: GpuWatch | None = None
        self._closing = threading.Event()
        self._route = Route(bootstrap.manager_url, folder / MANAGER_ADDRESS)
        self._clients: list[ManagerClient] = []
        self._notice_source = hear.open_source(bootstrap.notices)
        self._is_registered = False
        self._activity = ActivityPage(os.memfd_create("activity"), bootstrap.num_slots)

    def end(self, code: int, reason: str) -> None:
        """Ask ``run`` to end; the first call counts."""
        self._ends.put((code, reason))

    def run(self) -> int:
        """Serve until something ends this VM; return the exit code."""
        self._spawn("route", self._watch_route)
        try:
            spec = self._join()
        except VmFencedError as error:
            return self._log_end(FENCED, str(error))
        except SpottrainError as error:
            return self._refuse(messages.VmFailed(reason=str(error)))
        devices = self._find_devices(spec)
        if not isinstance(devices, VmDevices):
            return self._refuse(devices)
        machine.raise_locked_memory_limit()
        supervisor = SupervisorProcess(
            self._argv,
            self._folder,
            self._bootstrap.vm_id,
            self._outbox,
            self._environment(spec),
            (self._activity.fd,),
            self._waiting,
        )
        supervisor.start(
            self._greeting(spec, devices),
            lambda: self.end(FAILED, f"its supervisor has ended{self._last_words()}"),
        )
        threads = {
            "heartbeats": lambda: self._beat(spec, supervisor),
            "reports": self._post_reports,
            "notices": self._watch_notices,
            "stopped processes": lambda: self._watch_stopped(supervisor),
            "logs": self._rotate_logs,
            "log tails": self._send_logs,
        }
        if devices.gpus:
            threads["gpus"] = lambda: self._watch_gpus(devices, supervisor)
        for name, target in threads.items():
            self._spawn(name, target)
        try:
            code, reason = self._ends.get()
            if code in (RETIRED, FAILED):
                supervisor.close()
                if code == FAILED:
                    self._outbox.add(messages.VmFailed(reason=reason))
                self._outbox.wait_empty(FLUSH_S)
        finally:
            self._closing.set()
            supervisor.kill()
        hear.acknowledge(self._notice_source)
        return self._log_end(code, reason)

    def _rotate_logs(self) -> None:
        """Bound what logs take of the disk, whatever the user's code prints."""
        while not self._closing.wait(LOG_CHECK_S):
            for name in (LOG, "agent.log"):
                rotate(self._folder / name)

    def _send_logs(self) -> None:
        """Send the ends of logs, again when they have changed."""
        sender = self._log_sender()
        sender.send()
        while not self._closing.wait(LOG_PUSH_S):
            sender.send()

    def _log_sender(self) -> LogSender:
        post = partial(self._client().call, "POST", "/v1/logs")
        return LogSender(self._folder, self._bootstrap.vm_id, post)

    def _log_end(self, code: int, reason: str) -> int:
        logger.info("agent of %s ends: %s", self._bootstrap.vm_id, reason)
        if code in (RETIRED, FAILED):
            with contextlib.suppress(AgentError):
                self._log_sender().send()
        lease.give_up()
        return code

    def _last_words(self) -> str:
        """Return the last line that the supervisor, its workers or user code printed."""
        with contextlib.suppress(OSError):
            lines = tail(self._folder / LOG).strip().splitlines()
            return f": {lines[-1].strip()[:LAST_WORDS]}" if lines else ""
        return ""

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True).start()

    def _guarded(self, target: Any) -> None:
        """Run a thread's work; an error ends the agent."""
        try:
            target()
        except VmFencedError as error:
            self.end(FENCED, str(error))
        except SpottrainError as error:
            self.end(FAILED, str(error))
        except BaseException as error:
            self.end(FAILED, f"{threading.current_thread().name} thread: {error!r}")
            raise

    def _client(self, wait_s: float = 0.0) -> ManagerClient:
        """Return a new connection whose answers may take ``wait_s``."""
        bootstrap = self._bootstrap
        client = ManagerClient(self._route, bootstrap.ca_pem, bootstrap.token, wait_s)
        self._clients.append(client)
        return client

    # --- joining the job --------------------------------------------------------------

    def _join(self) -> messages.JobSpec:
        """Register, fetch the job and its workdir; return the job."""
        client = self._client()
        registration = messages.Registration(
            vm_id=self._bootstrap.vm_id,
            software_version=software_version(),
            num_slots=self._bootstrap.num_slots,
            private_address=self._bootstrap.private_address,
        )
        deadline = time.monotonic() + REGISTER_S
        self._call(client, deadline, "POST", "/v1/register", encode(registration))
        self._is_registered = True
        spec: messages.JobSpec = decode(
            messages.JobSpec, self._call(client, deadline, "GET", "/v1/job")
        )
        if not (self._folder / "workdir").is_dir():  # else it was uploaded before
            archive = self._folder / "workdir.tar.gz"
            content = self._call(client, deadline, "GET", "/v1/workdir")
            try:
                archive.write_bytes(content)
                unpack(archive, self._folder / "workdir")
                archive.unlink()
            except OSError as error:
                raise AgentError(f"workdir cannot be unpacked: {error}") from error
        client.close()
        return spec

    def _call(
        self,
        client: ManagerClient,
        deadline: float,
        method: str,
        path: str,
        body: str = "",
    ) -> bytes:
        """Call the manager; retry until ``deadline`` while it does not answer."""
        backoff = Backoff()
        while True:
            try:
                return client.call(method, path, body)
            except NoManagerError as error:
                if time.monotonic() > deadline:
                    raise
                logger.info("%s", error)
                self._closing.wait(backoff.next_s())

    def _find_devices(
        self, spec: messages.JobSpec
    ) -> VmDevices | messages.VmUnfit | messages.GpuSick:
        """Return what this VM's slots drive, or why it must not train."""
        return find_devices(
            spec.device,
            self._bootstrap.vm_id,
            self._bootstrap.num_slots,
            job=spec.name,
            precision=spec.precision,
            min_gpus=self._bootstrap.min_gpus,
            place=self._bootstrap.place,
            slot_memory_bytes=self._bootstrap.slot_memory_bytes,
            is_own=self._is_own,
        )

    @property
    def _is_own(self) -> bool:
        """Whether this machine is the user's own: no cloud replaces it."""
        return str(self._bootstrap.notices.get("kind", "local")) == "local"

    def _refuse(self, report: messages.VmUnfit | messages.VmFailed | messages.GpuSick) -> int:
        """Report why this VM does not train, if it has a manager, and end."""
        if self._is_registered:
            self._outbox.add(report)
            self._spawn("reports", self._post_reports)
            self._outbox.wait_empty(REFUSE_S)
        self._closing.set()
        return self._log_end(FAILED, report.reason)

    def _environment(self, spec: messages.JobSpec) -> dict[str, str]:
        """Return variables for the supervisor and its workers; the VM's own win."""
        address = self._bootstrap.private_address
        cloud = str(self._bootstrap.notices.get("kind", ""))
        network = network_environment(cloud, address, interface_of(address))
        return {
            **network,
            **os.environ,
            machine.OWNER_VARIABLE: machine.owner(spec.name),
        }

    def _greeting(self, spec: messages.JobSpec, devices: VmDevices) -> str:
        return json.dumps(
            {
                "spec": json.loads(encode(spec)),
                "workdir": str(self._folder / "workdir"),
                "num_slots": self._bootstrap.num_slots,
                "private_address": self._bootstrap.private_address,
                "vm_id": self._bootstrap.vm_id,
                "activity_fd": self._activity.fd,
                **devices.greeting(),
            }
        )

    # --- threads ------------------------------------------------------------------------

    def _beat(self, spec: messages.JobSpec, supervisor: SupervisorProcess) -> None:
        """Send heartbeats and forward commands; end when the lease has expired."""
        client, backoff = self._client(spec.heartbeat_s), Backoff()
        received, sequence, heard_at = 0, 0, time.monotonic()
        while True:
            beat = messages.Heartbeat(
                vm_id=self._bootstrap.vm_id,
                sequence=sequence,
                received=received,
                gpus=self._gpu_watch.uses if self._gpu_watch else (),
            )
            sequence += 1
            try:
                text = client.call("POST", "/v1/heartbeat", encode(beat))
            except NoManagerError as error:
                logger.info("%s", error)
                if time.monotonic() - heard_at > spec.lease_s:
                    supervisor.checkpoint(CHECKPOINT_S)
                    self.end(RETIRED, f"no manager for {spec.lease_s:g} s")
                    return
                self._closing.wait(backoff.next_s())
                continue
            heard_at = time.monotonic()
            lease.renew()
            backoff.reset()
            answer = decode(messages.HeartbeatAnswer, text)
            received += len(answer.commands)
            for command in answer.commands:
                if isinstance(command, messages.Retire):
                    self.end(RETIRED, "manager retired this VM")
                elif isinstance(command, messages.InspectWorkers):
                    self._spawn("inspection", partial(self._inspect, command))
                else:
                    supervisor.send(command)

    def _inspect(self, command: messages.InspectWorkers) -> None:
        """Report what the workers of a generation do."""
        workers = self._activity.inspect(command.generation, self._closing.wait)
        self._outbox.add(
            messages.WorkersInspected(
                generation=command.generation, number=command.number, workers=workers
            )
        )

    def _post_reports(self) -> None:
        """Post reports, each until the manager has it."""
        client, backoff = self._client(), Backoff()
        while True:
            batch = encode_batch(self._outbox, self._bootstrap.vm_id)
            while trace := self._outbox.next_trace():
                self._post_trace(client, trace)
            try:
                text = client.call("POST", "/v1/reports", batch)
            except NoManagerError as error:
                logger.info("%s", error)
                self._closing.wait(backoff.next_s())
                continue
            backoff.reset()
            self._outbox.acknowledge(decode(messages.ReportAnswer, text))

    def _post_trace(self, client: ManagerClient, trace: messages.TraceWritten) -> None:
        """Post a rank's trace until the manager has it or refuses it; remove its file."""
        query = urlencode({"trace": encode(trace)})
        file, backoff = Path(trace.path) if trace.path else b"", Backoff()
        if isinstance(file, Path) and not file.exists():
            logger.warning("trace of rank %d: %s is gone", trace.rank, file)
            return
        while not self._closing.is_set():
            try:
                client.call("POST", f"/v1/traces?{query}", file)
                break
            except RefusedError as error:
                logger.warning("trace of rank %d: %s", trace.rank, error)
                break
            except NoManagerError as error:
                logger.info("%s", error)
                self._closing.wait(backoff.next_s())
        if isinstance(file, Path):
            file.unlink(missing_ok=True)

    def _watch_route(self) -> None:
        """Break off calls that wait at an outdated address of the manager."""
        while not self._closing.wait(ROUTE_CHECK_S):
            for client in tuple(self._clients):
                client.reconnect()

    def _watch_stopped(self, supervisor: SupervisorProcess) -> None:
        """End what has been stopped for long; without a supervisor this VM ends."""
        watch = StoppedProcesses(supervisor.pid)
        reason = f"has been stopped for {STOPPED_LOOKS * LOOK_S:g} s"
        while not self._closing.wait(LOOK_S):
            for pid in watch.look():
                slot = self._activity.slot_of(pid)
                if pid == supervisor.pid:
                    self.end(FAILED, f"its supervisor {reason}")
                elif slot is not None:
                    end = messages.EndWorkers(slots=(slot,), reason=f"it {reason}", hang=True)
                    supervisor.send(end)
                else:
                    logger.warning("process %d %s: it is killed", pid, reason)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _watch_gpus(self, devices: VmDevices, supervisor: SupervisorProcess) -> None:
        """Report GPUs that fail or slow down; restart the workers of one that erred."""
        driven = {
            gpu.uuid: tuple(
                slot
                for slot, device in enumerate(devices.slots.devices)
                if device == device_of(gpu)
            )
            for gpu in devices.gpus
        }

        def restart(uuid: str, reason: str) -> None:
            supervisor.send(messages.EndWorkers(slots=driven[uuid], reason=reason))

        try:
            with open_nvml() as driver:
                self._gpu_watch = GpuWatch(
                    driver,
                    devices.gpus,
                    self._outbox.add,
                    restart,
                    logger.warning,
                    is_own=self._is_own,
                )
                self._gpu_watch.run(self._closing)
        except NoNvmlError as error:
            logger.warning("GPUs are not watched: %s", error)

    def _watch_notices(self) -> None:
        hear.listen(
            self._notice_source,
            lambda news: self._outbox.add(_report(news)),
            self._closing,
        )


def _report(news: hear.NoticeChange) -> messages.Report:
    match news:
        case hear.PreemptionAnnounced(lead_s=lead_s):
            return messages.InterruptionNoticed(lead_s=lead_s)
        case hear.NoticeWithdrawn():
            return messages.InterruptionCancelled()
        case hear.AtRisk():
            return messages.InterruptionLikely()


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a workdir; nothing may be written or point outside of ``folder``.

    Raises:
        AgentError: The archive is damaged or holds what a workdir cannot.
    """
    folder = folder.resolve()
    folder.mkdir(exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                target = folder / member.name
                inside = [target.resolve()]
                if member.issym():
                    inside.append((target.parent / member.linkname).resolve())
                if not (member.isreg() or member.isdir() or member.issym()) or not all(
                    path.is_relative_to(folder) for path in inside
                ):
                    raise AgentError(f"workdir holds {member.name!r}: not a plain file")
                tar.extract(member, folder, set_attrs=member.isreg())
    except (OSError, tarfile.TarError, EOFError) as error:
        raise AgentError(f"workdir cannot be unpacked: {error}") from error


def encode_batch(outbox: Outbox, vm_id: str) -> str:
    """Wait for reports; return the oldest, as many as the manager accepts at once.

    Args:
        outbox: Keeps them until the manager has them.
    """
    limit = _MAX_BATCH
    while True:
        text = encode(outbox.batch(vm_id, limit))
        if len(text) <= messages.MAX_BATCH_BYTES or limit == 1:
            return text
        limit //= 2


def main(argv: Sequence[str]) -> int:
    """Run the agent that ``argv`` describes."""
    log_to_stderr()
    path = Path(argv[0]).resolve()
    supervisor, waiting = argv[1:], None
    child = os.environ.pop(spawn.VARIABLE, "")
    if not supervisor:
        supervisor = [sys.executable, "-m", "spottrain.start", SUPERVISOR]
        if child:
            pid, _, fd = child.partition(":")
            waiting = int(pid), socket.socket(fileno=int(fd))
    try:
        agent = Agent(Bootstrap.load(path), path.parent, supervisor, waiting)
    except SpottrainError as error:
        logger.error("%s", error)
        return FAILED
    signal.signal(signal.SIGTERM, lambda *_: agent.end(TERMINATED, "terminated by signal"))
    return agent.run()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    # Threads may be in a call to the manager; they must not keep the VM running.
    os._exit(exit_code)
