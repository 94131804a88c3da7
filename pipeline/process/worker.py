"""A worker: drives one slot through generations, in a process the supervisor forked."""

from __future__ import annotations

import gc
import json
import os
import re
import select
import socket
import sys
import threading
import traceback
from collections import deque
from functools import partial

from spottrain.activity import Activity
from spottrain.codec import decode, encode
from spottrain.errors import UserCodeError
from spottrain.pipeline.base.faults import open_faults
from spottrain.pipeline.base.output import label_output
from spottrain.pipeline.comm.device_group import NetworkRefusedError
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.loader.prefetch import Prefetcher
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.state.context import StopRequest, WorkerContext
from spottrain.pipeline.state.evacuation import Guard, end_worker
from spottrain.pipeline.state.handover import UnreadableCheckpointError
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.train.generation import run_generation
from spottrain.redaction import redacted
from spottrain.storage.open import open_store
from spottrain.wire import messages

_GLOO_MESSAGE = re.compile(r"\[[^]]*gloo[^]]*\] (.+)")
"""In brackets is the place in gloo's source."""
MAX_MESSAGE_BYTES = 1 << 17
_WorkerCommand = (
    messages.RunGeneration
    | messages.StopGeneration
    | messages.ShareMinibatch
    | messages.TraceMinibatches
)
_MAX_REASON_CHARACTERS, _MAX_TRACEBACK_CHARACTERS = 1_000, 8_000
"""A character may take 14 bytes; together they must fit into a message."""
_MAX_PIECE_CHARACTERS = 32_000
"""Two bytes and more each, where quotes are escaped."""


class SupervisorLink:
    """The worker's end of the socket to its supervisor; also a ``MemoryHolder``.

    Args:
        connection: A connected ``SOCK_SEQPACKET`` socket, a message per packet.
        held: Names of the pieces of memory that a predecessor left.
    """

    def __init__(self, connection: socket.socket, held: frozenset[str]) -> None:
        self._connection = connection
        self._held = set(held)
        self._commands: deque[messages.RunGeneration] = deque()
        self._stops: dict[int, int] = {}
        self._shares: dict[int, messages.ShareMinibatch] = {}
        self._traces: dict[int, messages.TraceMinibatches] = {}
        self._generation = 0
        self._lock = threading.RLock()
        """Threads take turns, but for ``next_command``: between generations there is
        one."""

    def next_command(self) -> messages.RunGeneration:
        """Wait for the next generation; the worker ends when the supervisor does."""
        while not self._commands:
            self._receive()
        command = self._commands.popleft()
        self._generation = command.generation
        return command

    def stop_request(self) -> int:
        """Return the strongest request to stop this generation received so far."""
        with self._lock:
            while select.select([self._connection], [], [], 0)[0]:
                self._receive()
        return self._stops.get(self._generation, StopRequest.NONE)

    def newest_share(self) -> messages.ShareMinibatch | None:
        """Return the newest share of this generation that ``stop_request`` has seen."""
        return self._shares.get(self._generation)

    def newest_trace(self) -> messages.TraceMinibatches | None:
        """Return the newest trace asked of this generation, as ``newest_share``."""
        return self._traces.get(self._generation)

    def report(self, report: messages.SupervisorReport) -> None:
        """Send a report to the manager; in pieces if it is too long for a message."""
        text = encode(report)
        with self._lock:
            while len(text) > _MAX_PIECE_CHARACTERS:
                self._send({"piece": text[:_MAX_PIECE_CHARACTERS]})
                text = text[_MAX_PIECE_CHARACTERS:]
            self._send({"report": text})

    def ending(self, reason: str) -> None:
        """Say that this worker ends itself, and is not to be killed before."""
        self._send({"ending": redacted(reason)[:_MAX_REASON_CHARACTERS]})

    def open(self, name: str, num_bytes: int) -> int:
        """Return a file descriptor of a piece of memory, at least ``num_bytes`` long."""
        fd = self._request({"open": name, "bytes": num_bytes})
        self._held.add(name)
        return fd

    def open_loader(self, number: int) -> socket.socket:
        """Have a loader process started in place of any with the same number."""
        return socket.socket(fileno=self._request({"loader": number}))

    def names(self) -> frozenset[str]:
        """Return the pieces of memory that the supervisor holds for this slot."""
        return frozenset(self._held)

    def release(self, name: str) -> None:
        """Let the supervisor release a piece."""
        self._held.discard(name)
        self._send({"release": name})

    def _request(self, message: dict[str, object]) -> int:
        """Send what is answered by a file descriptor, and return that."""
        with self._lock:
            self._send(message)
            while not (fds := self._receive()):
                pass
        return fds[0]

    def _send(self, message: dict[str, object]) -> None:
        self._connection.sendall(json.dumps(message).encode())

    def _receive(self) -> list[int]:
        """Receive one message; return the file descriptors that came with it."""
        data, fds, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, 1)
        if not data:
            os._exit(0)  # the supervisor is gone, and with it this VM's memory
        if fds:
            return list(fds)
        command = decode(_WorkerCommand, data)
        # All but the first may be for a generation that has not begun here yet.
        match command:
            case messages.RunGeneration():
                self._commands.append(command)
            case messages.StopGeneration(generation=generation):
                stop = StopRequest.STOP
                if command.checkpoint:
                    stop = StopRequest.STOP_AND_CHECKPOINT
                before = self._stops.get(generation, StopRequest.NONE)
                self._stops[generation] = max(before, stop)
            case messages.ShareMinibatch(generation=generation):
                known = self._shares.get(generation)
                if known is None or known.number < command.number:
                    self._shares[generation] = command
            case messages.TraceMinibatches(generation=generation):
                asked = self._traces.get(generation)
                if asked is None or asked.number < command.number:
                    self._traces[generation] = command
        return []


def run_worker(
    link: SupervisorLink,
    loaded: LoadedJob,
    vm_id: str,
    slot: int,
    device: Device,
    activity: Activity,
    give_up: int,
) -> None:
    """Run one generation after the other, forever.

    Args:
        link: To the supervisor.
        loaded: The job.
        vm_id: This VM.
        slot: The slot that it drives.
        device: Of the slot.
        activity: Where it tells what it does.
        give_up: File descriptor of ``Guard``.
    """
    activity.begin()
    scales_loss = loaded.spec.precision == "fp16"
    context = WorkerContext(
        loaded=loaded,
        vm_id=vm_id,
        slot=slot,
        device=device,
        memory=SlotMemory(link, loaded.job, loaded.specs, device, scales_loss=scales_loss),
        checkpoints=open_store(loaded.spec.checkpoint_path),
        supervisor=link,
        faults=open_faults(),
        batches=Prefetcher(loaded.job, loaded.spec.seed, loaded.spec.loader, link.open_loader),
        activity=activity,
    )
    context.faults.end_with(partial(end_worker, context, "injected fault"))
    while True:
        command = link.next_command()
        places = [(place.vm_id, place.index) for place in command.plan.slots]
        at = vm_id, slot
        context.batches.label = f"rank {places.index(at)}" if at in places else ""
        label_output(context.batches.label)
        with Guard(context, give_up):
            reason = _run_one(context, link, command)
        activity.end()
        if reason:
            link.report(
                messages.GenerationBroken(
                    generation=command.generation,
                    slot=slot,
                    reason=redacted(reason)[:_MAX_REASON_CHARACTERS],
                )
            )
        # Models hold cycles, and arenas stay mapped as long as they do. The manager
        # chooses the next plan meanwhile.
        gc.collect()
        context.device.free_cached()


def _run_one(context: WorkerContext, link: SupervisorLink, command: messages.RunGeneration) -> str:
    """Run a generation to its end; return why it broke, or nothing."""
    try:
        run_generation(context, command, os.getpid())
    except UserCodeError as error:
        link.report(user_code_failed(error))
        return str(error)
    except UnreadableCheckpointError as error:
        link.report(error.report)
        return str(error)
    except NetworkRefusedError as error:
        link.report(messages.UserCodeFailed(message=str(error), traceback=""))
        return str(error)
    except Exception as error:  # noqa: BLE001  whatever it is, memory stays as it is
        traceback.print_exc(file=sys.stderr)
        _end_if_unusable(context, reason_of(error))
        return reason_of(error)
    return ""


def _end_if_unusable(context: WorkerContext, reason: str) -> None:
    """End this process if an error left its device unusable, as CUDA's sticky errors do."""
    if not context.device.is_usable():
        end_worker(context, f"the device is unusable after {reason}")


def reason_of(error: Exception) -> str:
    """Return an error's message in one line, without gloo's location and advice."""
    line = (str(error).splitlines() or [""])[0].partition(" This is typically")[0]
    found = _GLOO_MESSAGE.search(line)
    if found is not None:
        return found[1]
    return f"{type(error).__name__}: {line}"


def user_code_failed(error: UserCodeError) -> messages.UserCodeFailed:
    """Return the report of an error in the user's code, short and without secrets."""
    return messages.UserCodeFailed(
        message=redacted(str(error))[:_MAX_REASON_CHARACTERS],
        traceback=redacted(error.traceback)[-_MAX_TRACEBACK_CHARACTERS:],
    )
