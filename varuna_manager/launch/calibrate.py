"""Measures a job's model on this machine, with supervisors but without a manager.

Two simulated VMs, so that messages and all-reduces are measured, too. On CPUs one worker
per core, at least two and at most four; on a GPU two, which share it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from spottrain import machine
from spottrain.codec import decode, encode
from spottrain.errors import SpottrainError, UserCodeError
from spottrain.gpus.find import VmDevices, find_devices
from spottrain.gpus.slots import SlotDevices
from spottrain.machine import supervisor_environment
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.wire import messages
from spottrain.wire.model import Profile
from spottrain.wire.plan import Slot

TIME_LIMIT_S = 600.0
"""Measuring is given up when nothing was heard of it for this time."""
SUPERVISOR = (
    sys.executable,
    "-P",
    "-m",
    "spottrain.start",
    "spottrain.pipeline.process.supervisor",
)
_ADDRESS = "127.0.0.1"
_ROUND = -1
_MAX_SLOTS = 2
"""Of each VM."""

OnProgress = Callable[[messages.CalibrationProgress], None]


class MeasuringError(SpottrainError):
    """Measuring on this machine failed."""


def measure_here(
    config: JobConfig,
    on_progress: OnProgress = lambda progress: None,
    supervisor: Sequence[str] = SUPERVISOR,
) -> Profile:
    """Return the profile of the job's model, measured now.

    Args:
        config: The job; nothing is rented for it.
        on_progress: Called after each step.
        supervisor: The command that starts a supervisor.

    Raises:
        UserCodeError: The user's code is missing, raised or returned the wrong thing.
        MeasuringError: A process died, it took too long, or a GPU here cannot be used.
    """
    devices = devices_here(config)
    with tempfile.TemporaryDirectory(prefix="spottrain-") as folder:
        fleet = _Fleet(config, devices, Path(folder), supervisor)
        with contextlib.closing(fleet):
            return fleet.measure(config.microbatch_sizes, on_progress)


def devices_here(config: JobConfig) -> VmDevices:
    """Return what each of the two simulated VMs measures on.

    Raises:
        MeasuringError: A GPU here cannot be used.
    """
    found = find_devices(
        config.resources.device,
        "vm-1",
        min(max(1, machine.cores() // 2), _MAX_SLOTS),
        job=config.name,
        precision=config.precision,
        is_own=True,
    )
    if not isinstance(found, VmDevices):
        raise MeasuringError(f"this machine: {found.reason}")
    if not found.gpus:
        return found
    halves = SlotDevices(
        devices=found.slots.devices[:1],
        memory_shares=(0.5,),
        threads=max(1, machine.cores() // 2),
    )
    return VmDevices(slots=halves, gpus=found.gpus[:1])


class _Fleet:
    """Supervisors on this machine; gets and sends what agents would."""

    def __init__(
        self,
        config: JobConfig,
        devices: VmDevices,
        folder: Path,
        supervisor: Sequence[str],
    ) -> None:
        self._log = folder / "log"
        self._devices = devices
        self._slots = len(devices.slots.devices)
        self._end_s = time.monotonic() + TIME_LIMIT_S
        self._selector = selectors.DefaultSelector()
        self._rest: dict[str, bytes] = {}
        self._vms: dict[str, subprocess.Popen[bytes]] = {}
        for vm_id in ("vm-1", "vm-2"):
            self._vms[vm_id] = self._start(vm_id, config, folder, supervisor)

    def _start(
        self, vm_id: str, config: JobConfig, folder: Path, supervisor: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                supervisor,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=supervisor_environment(os.environ),
                start_new_session=True,
            )
        self._selector.register(_pipe(process.stdout), selectors.EVENT_READ, vm_id)
        self._rest[vm_id] = b""
        greeting = {
            "spec": json.loads(encode(config.job_spec(str(folder / "checkpoints")))),
            "workdir": config.workdir,
            "num_slots": self._slots,
            "private_address": _ADDRESS,
            "vm_id": vm_id,
            **self._devices.greeting(),
        }
        _write(process, json.dumps(greeting))
        return process

    def measure(self, sizes: tuple[int, ...], on_progress: OnProgress) -> Profile:
        """Run one round of measuring on all slots."""
        reports = self._reports()
        first = next(iter(self._vms))
        waiting = set(self._vms)
        for vm_id, report in reports:
            match report:
                case messages.SupervisorReady():
                    waiting.discard(vm_id)
                    if not waiting:
                        _write(self._vms[first], encode(_OPEN))
                case messages.StoreOpened(host=host, port=port):
                    command = messages.Calibrate(
                        generation=_ROUND,
                        participants=tuple(
                            Slot(vm_id=vm_id, index=index)
                            for vm_id in self._vms
                            for index in range(self._slots)
                        ),
                        store_host=host,
                        store_port=port,
                        microbatch_sizes=sizes,
                    )
                    for process in self._vms.values():
                        _write(process, encode(command))
                case messages.CalibrationProgress():
                    on_progress(report)
                case messages.Calibrated(profile=profile):
                    return profile
                case messages.UserCodeFailed(message=message, traceback=traceback):
                    raise UserCodeError(message, traceback)
                case messages.VmUnfit(reason=reason):
                    raise MeasuringError(f"this machine: {reason}")
                case messages.WorkerDied(reason=reason):
                    raise MeasuringError(f"{reason}: {self._last_line()}")
                case _:
                    pass  # a worker lost a peer; that one's supervisor reports it
        raise AssertionError("reports end with an error")

    def _reports(self) -> Iterator[tuple[str, messages.Report]]:
        """Yield the supervisors' reports until nothing comes or one has ended."""
        while True:
            ready = self._selector.select(max(0.0, self._end_s - time.monotonic()))
            if not ready:
                raise MeasuringError(
                    f"measuring made no progress for {TIME_LIMIT_S:.0f} s; set a smaller "
                    "microbatch_size"
                )
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                self._end_s = time.monotonic() + TIME_LIMIT_S
                if not data:
                    raise MeasuringError(f"a supervisor exited: {self._last_line()}")
                *lines, rest = (self._rest[key.data] + data).split(b"\n")
                self._rest[key.data] = rest
                for line in lines:
                    yield key.data, decode(messages.Report, line)

    def _last_line(self) -> str:
        text = self._log.read_text(errors="replace")
        if "No module named 'torch'" in text:
            return "torch is not installed here; pip install torch safetensors"
        return (text.strip().splitlines() or ["no message"])[-1]

    def close(self) -> None:
        """End all processes."""
        self._selector.close()
        for process in self._vms.values():
            os.killpg(process.pid, signal.SIGKILL)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    _pipe(pipe).close()
            process.wait()


_OPEN = messages.OpenStore(generation=_ROUND)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    stdin: Any = _pipe(process.stdin)
    with contextlib.suppress(BrokenPipeError):  # its exit is noticed on its stdout
        stdin.write(f"{line}\n".encode())
        stdin.flush()
