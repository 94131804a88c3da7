"""The supervisor of a VM: has imported torch and the user's job, and forks workers.

Single-threaded; runs no operation and makes no CUDA call, so that forking is safe at any
time. It holds the memory of its workers, so that the memory outlives them. Commands
come in on stdin, a line each; reports go out on stdout.

    python -m spottrain.pipeline.process.supervisor < commands > reports

The first line is a ``Greeting``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # any optimizer imports it: once here, not in every worker

from spottrain.activity import Activity
from spottrain.codec import decode, encode
from spottrain.errors import SpottrainError, UserCodeError
from spottrain.pipeline.base.output import finish_output, label_output, unbuffer_c_output
from spottrain.pipeline.comm.groups import serve_rendezvous
from spottrain.pipeline.devices.open import open_device, prepare_device
from spottrain.pipeline.devices.port import UnusableDeviceError
from spottrain.pipeline.loader.process import serve_batches
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.pipeline.process.greeting import (
    Greeting,
    first_line,
    obstacle_to_forks,
    unfit,
)
from spottrain.pipeline.process.tasks import initialise_and_report, measure_and_report
from spottrain.pipeline.process.worker import (
    MAX_MESSAGE_BYTES,
    SupervisorLink,
    run_worker,
    user_code_failed,
)
from spottrain.redaction import hide
from spottrain.spawn import die_with_parent
from spottrain.wire import messages

_LOAD_IN_WORKERS = "--load-in-workers"
_STDERR_FD = 2
_CALIBRATION, _FIRST_WEIGHTS, _STORE = "calibration", "writing of first weights", "store"
_ROUNDS = (_CALIBRATION, _FIRST_WEIGHTS)

_Body = Callable[[socket.socket], None]
"""Function that a child runs, given its end of the socket to the supervisor."""


@dataclass(slots=True)
class _Child:
    """A forked process and the socket to it."""

    pid: int
    pidfd: int
    connection: socket.socket
    slot: int | None
    """The slot that a worker drives; ``None`` for a store or a task."""
    what: str
    generation: int = 0
    running: bool = False
    is_guarded: bool = False
    """Its state is on a device: it must not be killed before it has brought it away."""
    task_slot: int = 0
    """The slot that the death of a task is reported for."""
    ending: str = ""
    """Why a worker ends itself, which takes a while; it is not killed meanwhile."""
    ended_by: messages.EndWorkers | None = None
    """The command to kill it."""
    owner: int | None = None
    """The process that a loader works for."""
    number: int = 0
    """Of a loader, among those of its owner."""
    partial_report: str = ""
    """Pieces received of a long report."""


@dataclass(slots=True)
class _Slot:
    """Memory of one slot, by name, its device, and the worker that uses both."""

    index: int
    device: str
    """``cpu`` or ``cuda:<UUID>``."""
    memory_share: float
    """Of the GPU's memory."""
    pieces: dict[str, int] = field(default_factory=dict)
    worker: _Child | None = None
    give_up: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK))
    """Readable once its worker is told to end with its state brought to safety."""

    def forget_told(self) -> None:
        """Have the next worker, or this one in its next generation, not be told."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.give_up)


class Supervisor:
    """Executes commands and forwards reports.

    Args:
        greeting: The first line of stdin.
        reports: File descriptor for reports.
        loaded: The user's job, or ``None`` to let every worker load it by itself.
    """

    def __init__(self, greeting: Greeting, reports: int, loaded: LoadedJob | None) -> None:
        self._greeting = greeting
        self._reports = reports
        self._loaded = loaded
        self._slots = [
            _Slot(index, device, share)
            for index, (device, share) in enumerate(
                zip(greeting.devices, greeting.memory_shares, strict=True)
            )
        ]
        self._children: dict[int, _Child] = {}
        self._generation = 0
        self._round = 0
        """Number of the newest round of preparation; they count down."""
        self._spare_store: _Child | None = None
        """Forked ahead for the next generation; it does not listen yet."""
        self._stores: dict[int, str] = {}
        """The report of each generation's store: a command may come twice, after the
        manager has died and come back."""
        self._selector = selectors.EpollSelector()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        self._input = b""

    def report(self, report: messages.Report) -> None:
        """Forward a report to the agent."""
        self._write(encode(report))

    def run(self) -> None:
        """Serve until stdin ends or the VM is retired."""
        # Workers collect garbage between generations: what they share with this process
        # is none, and to look at it would copy it.
        gc.freeze()
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fd == sys.stdin.fileno():
                        if not self._read_commands():
                            return
                    elif isinstance(key.data, _Child):
                        self._receive(key.data, died=key.fd == key.data.pidfd)
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _read_commands(self) -> bool:
        """Execute the commands received; return whether to go on."""
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            if isinstance(command := decode(messages.Command, line), messages.Retire):
                return False
            self._perform(command)
        return bool(data)

    def _perform(self, command: messages.Command) -> None:
        match command:
            case messages.Initialise() | messages.Calibrate():
                self._begin_round(command)
            case messages.OpenStore(generation=generation):
                self._open_store(generation)
            case messages.RunGeneration():
                self._run_generation(command)
            case (
                messages.StopGeneration(generation=generation)
                | messages.ShareMinibatch(generation=generation)
                | messages.TraceMinibatches(generation=generation)
            ):
                for child in self._running():
                    if child.generation == generation:
                        self._send(child, command)
            case messages.AbandonGeneration(generation=generation):
                self._abandon(generation)
            case messages.EndWorkers():
                self._end_workers(command)
            case messages.Retire() | messages.InspectWorkers():
                raise AssertionError("handled before commands are performed")

    def _begin_round(self, command: messages.Initialise | messages.Calibrate) -> None:
        """Start this VM's processes of a round."""
        ranks = {
            rank: slot.index
            for rank, slot in enumerate(command.participants)
            if slot.vm_id == self._greeting.vm_id
        }
        if command.participants:
            if command.generation >= self._round:
                return
            self._round = command.generation
            self._end_rounds(before=command.generation)
        for rank, slot in ranks.items() if command.participants else ((0, 0),):
            if isinstance(command, messages.Initialise):
                task = functools.partial(initialise_and_report, command, rank, slot)
                child = self._fork_with_job(_FIRST_WEIGHTS, task, self._slots[slot])
            else:
                mine = self._slots[slot]
                where = mine.device, mine.memory_share, self._greeting.device_name()
                task = functools.partial(measure_and_report, command, rank, slot, *where)
                child = self._fork_with_job(_CALIBRATION, task, mine)
            child.generation, child.task_slot = command.generation, slot

    def _end_rounds(self, before: int) -> None:
        """Kill processes of rounds older than ``before``."""
        for child in self._children.values():
            if child.what in _ROUNDS and child.generation > before:
                os.kill(child.pid, signal.SIGKILL)

    def _running(self) -> list[_Child]:
        return [child for child in self._children.values() if child.running]

    def _run_generation(self, command: messages.RunGeneration) -> None:
        if command.generation <= self._generation:
            return
        self._generation = command.generation
        for participant in command.participants:
            if participant.vm_id != self._greeting.vm_id:
                continue
            slot = self._slots[participant.index]
            worker = slot.worker or self._fork_worker(slot)
            worker.generation, worker.running = command.generation, True
            on_device = command.plan.state == "device" and slot.device != "cpu"
            worker.is_guarded = worker.is_guarded or on_device
            self._send(worker, command)

    def _abandon(self, generation: int) -> None:
        """Kill the generation's workers, and never begin it if its command is late."""
        if generation < 0:
            self._round = min(self._round, generation)
            self._end_rounds(before=generation - 1)
            return
        self._generation = max(self._generation, generation)
        for slot in self._slots:
            worker = slot.worker
            if worker is None or not worker.running:
                reason = "asked to abandon a generation that it does not run"
                self.report(
                    messages.GenerationBroken(generation=generation, slot=slot.index, reason=reason)
                )
            elif worker.generation <= generation and not worker.ending:
                if worker.is_guarded:
                    os.eventfd_write(slot.give_up, 1)
                else:
                    os.kill(worker.pid, signal.SIGKILL)

    def _end_workers(self, command: messages.EndWorkers) -> None:
        """Kill workers that hang, or whose GPU has failed; their ends are reported."""
        for child in self._children.values():
            of = child.task_slot if child.what in _ROUNDS else child.slot
            if of in command.slots:
                child.ended_by = command
                os.kill(child.pid, signal.SIGKILL)

    def _send(self, child: _Child, command: messages.Command) -> None:
        try:
            child.connection.sendall(encode(command).encode())
        except OSError:
            return  # it is dying; its end is reported when the kernel signals it

    def _fork_worker(self, slot: _Slot) -> _Child:
        def work(loaded: LoadedJob, link: SupervisorLink) -> None:
            exact = loaded.spec.reduction == "exact"
            where = slot.device, slot.memory_share
            device = open_device(*where, deterministic=exact)
            activity = Activity.of_slot(self._greeting.activity_fd, slot.index)
            vm_id = self._greeting.vm_id
            run_worker(link, loaded, vm_id, slot.index, device, activity, slot.give_up)

        slot.forget_told()
        what = f"worker of slot {slot.index}"
        slot.worker = self._fork_with_job(what, work, slot, drives=True)
        return slot.worker

    def _fork_with_job(
        self,
        what: str,
        task: Callable[[LoadedJob, SupervisorLink], None],
        slot: _Slot,
        *,
        drives: bool = False,
    ) -> _Child:
        """Fork a process that needs the user's job: a worker, which drives its slot, or a
        short task."""
        held = frozenset(slot.pieces) if drives else frozenset[str]()
        spec, workdir = self._greeting.spec, Path(self._greeting.workdir)

        def body(connection: socket.socket) -> None:
            link = SupervisorLink(connection, held)
            torch.set_num_threads(self._greeting.threads)
            try:
                if (loaded := self._loaded) is None:
                    prepare_device(slot.device, deterministic=spec.reduction == "exact")
                    loaded = load(spec, workdir)
                task(loaded, link)
            except UserCodeError as error:
                link.report(user_code_failed(error))
            except UnusableDeviceError as error:
                link.report(messages.VmUnfit(reason=str(error)))

        return self._fork(what, body, slot.index if drives else None)

    def _open_store(self, generation: int) -> None:
        if generation in self._stores:
            self._write(self._stores[generation])
            return
        store, self._spare_store = self._spare_store or self._fork_store(), None
        store.generation = generation
        # One that is left is of a generation that has broken before it ran.
        for child in self._children.values():
            if child.what == _STORE and child.generation < generation:
                os.kill(child.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # a spare one that has just died
            store.connection.sendall(str(generation).encode())

    def _fork_store(self) -> _Child:
        """Fork a store that listens once it is sent the number of its generation."""
        host = self._greeting.private_address

        def body(connection: socket.socket) -> None:
            link = SupervisorLink(connection, frozenset())
            generation = int(connection.recv(MAX_MESSAGE_BYTES))
            try:
                serve_rendezvous(
                    host,
                    lambda port: link.report(
                        messages.StoreOpened(generation=generation, host=host, port=port)
                    ),
                )
            except OSError as error:
                reason = f"cannot listen on {host}, its private address: {error}"
                link.report(messages.VmUnfit(reason=reason))

        return self._fork(_STORE, body, None)

    def _open_loader(self, owner: _Child, number: int) -> None:
        """Start a loader process, in place of any of the same number."""
        self._end_loaders(owner.pid, number)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def body(connection: socket.socket) -> None:
            ours.close()
            serve_batches(theirs, self._job, self._greeting.spec.seed)

        child = self._fork(f"loader {number} of the {owner.what}", body, None)
        child.owner, child.number = owner.pid, number
        theirs.close()
        with ours, contextlib.suppress(OSError):  # its owner may be dying
            socket.send_fds(owner.connection, [b"fd"], [ours.fileno()])

    def _job(self) -> TrainingJob:
        """Return the user's job, in a process that may load it."""
        if self._loaded is not None:
            return self._loaded.job
        return load_job(self._greeting.spec.entrypoint, Path(self._greeting.workdir))

    def _end_loaders(self, owner: int, number: int | None = None) -> None:
        """Kill a process's loaders, or one of them."""
        for child in self._children.values():
            if child.owner == owner and number in (None, child.number):
                os.kill(child.pid, signal.SIGKILL)

    def _fork(self, what: str, body: _Body, slot: int | None) -> _Child:
        child = _fork_child(what, slot, body, self._files())
        self._children[child.pid] = child
        self._selector.register(child.connection, selectors.EVENT_READ, child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        return child

    def _files(self) -> list[int]:
        """Return the descriptors that a forked process must not keep."""
        children = self._children.values()
        return [
            self._reports,
            self._selector.fileno(),
            *(child.pidfd for child in children),
            *(child.connection.fileno() for child in children),
            *(fd for slot in self._slots for fd in slot.pieces.values()),
        ]

    def _receive(self, child: _Child, *, died: bool) -> None:
        """Handle a child's messages; after its death, all that are left."""
        if child.pid not in self._children:
            return
        while True:
            try:
                flags = socket.MSG_DONTWAIT
                data = child.connection.recv(MAX_MESSAGE_BYTES, flags)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # it left something unread; its messages come next
            if not data:
                self._selector_forget(child.connection)
                break
            self._handle(child, json.loads(data))
        if died:
            self._reap(child)

    def _selector_forget(self, connection: socket.socket) -> None:
        if connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)

    def _handle(self, child: _Child, message: dict[str, Any]) -> None:
        if "piece" in message:
            child.partial_report += message["piece"]
            return
        if "report" in message:
            text, child.partial_report = child.partial_report + message["report"], ""
            report = decode(messages.SupervisorReport, text)
            left = messages.GenerationBroken | messages.GenerationStopped
            if isinstance(report, left):
                child.running = False
                if child.slot is not None:
                    self._slots[child.slot].forget_told()
            elif isinstance(report, messages.StoreOpened):
                self._stores[report.generation] = text
            self._write(text)
            return
        if "ending" in message:
            child.ending = message["ending"]
            return
        if "loader" in message:
            self._open_loader(child, message["loader"])
            return
        assert child.slot is not None
        pieces = self._slots[child.slot].pieces
        if "release" in message:
            os.close(pieces.pop(message["release"]))
            return
        name = message["open"]
        if name not in pieces:
            pieces[name] = os.memfd_create(name)
        if os.fstat(pieces[name]).st_size < message["bytes"]:
            os.ftruncate(pieces[name], message["bytes"])
        try:
            socket.send_fds(child.connection, [b"fd"], [pieces[name]])
        except OSError:
            return  # it died while asking; its end is reported when the kernel signals it

    def _reap(self, child: _Child) -> None:
        """Reap a child, and report its end if that matters."""
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._selector.unregister(child.pidfd)
        self._selector_forget(child.connection)
        child.connection.close()
        os.close(child.pidfd)
        del self._children[child.pid]
        reason = (
            f"{child.what} was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"{child.what} exited with {code}"
        )
        if child.ended_by is not None:
            reason = f"{child.what} was ended: {child.ended_by.reason}"
        if child.ending:
            reason = f"{child.what} ended itself: {child.ending}"
        self._end_loaders(child.pid)
        if child.owner is not None:
            if code and child.owner in self._children:
                sys.stderr.write(f"{reason}\n")
                sys.stderr.flush()
        elif child.slot is not None:
            self._slots[child.slot].worker = None
            hung = child.ended_by is not None and child.ended_by.hang
            self.report(
                messages.WorkerDied(
                    generation=child.generation, slot=child.slot, reason=reason, hung=hung
                )
            )
            self._replace(child)
        elif child.what == _STORE:
            self._keep_spare(child, formed=not code)
        elif code:
            self.report(
                messages.WorkerDied(
                    generation=child.generation, slot=child.task_slot, reason=reason
                )
            )

    def _replace(self, dead: _Child) -> None:
        """Fork a successor of a worker ahead of the next generation.

        Not on a GPU, which may be what has ended the worker: none is used unasked.
        """
        assert dead.slot is not None
        slot = self._slots[dead.slot]
        if dead.running and slot.device == "cpu":
            self._fork_worker(slot).generation = dead.generation

    def _keep_spare(self, ended: _Child, *, formed: bool) -> None:
        """Have a spare store where one has served: the next one is probably here, too."""
        if ended is self._spare_store:
            self._spare_store = None
        elif formed and self._spare_store is None:
            self._spare_store = self._fork_store()

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode()
        while data:
            data = data[os.write(self._reports, data) :]


def _fork_child(what: str, slot: int | None, body: _Body, parent_fds: Sequence[int]) -> _Child:
    """Fork a process that runs ``body`` and ends with this one at the latest.

    Args:
        what: Its name in messages.
        slot: Slot of a worker.
        body: Function that it runs.
        parent_fds: File descriptors of this process, which it closes first.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_child(parent, theirs, body, [ours.fileno(), *parent_fds])
    theirs.close()
    return _Child(pid, os.pidfd_open(pid), ours, slot, what)


def _run_child(
    parent: int, connection: socket.socket, body: _Body, parent_fds: Sequence[int]
) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        for fd in parent_fds:
            os.close(fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        body(connection)
        code = 0
    except BaseException:  # noqa: BLE001  nothing may unwind into the supervisor
        sys.excepthook(*sys.exc_info())
    finally:
        finish_output()
        os._exit(code)


def main() -> None:
    """Serve one VM."""
    torch.set_num_threads(1)
    reports = os.dup(sys.stdout.fileno())
    os.dup2(_STDERR_FD, sys.stdout.fileno())  # the user's code prints to the log
    unbuffer_c_output()
    label_output("")
    load_in_workers = _LOAD_IN_WORKERS in sys.argv
    line = sys.argv[-1] if load_in_workers else first_line()
    greeting: Greeting = decode(Greeting, line)
    # A lost DNS query must not stall a connection to a store for 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    if greeting.private_address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Else torch.cuda.is_available() in the user's code would initialise the driver.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["SPOTTRAIN_STEPS"] = str(greeting.spec.steps)
    hide(greeting.spec.secrets)
    if os.path.isdir(greeting.workdir):
        os.chdir(greeting.workdir)  # user code opens files from there, as where it was inspected
    loaded = None
    failure: messages.Report | None = unfit(greeting.gpus)
    if failure is None and not load_in_workers:
        try:
            loaded = load(greeting.spec, Path(greeting.workdir))
        except UserCodeError as error:
            failure = user_code_failed(error)
        except SpottrainError as error:
            failure = messages.UserCodeFailed(message=str(error), traceback="")
        if failure is None and (why := obstacle_to_forks()):
            # Restart, and load in workers only.
            os.dup2(reports, 1)
            module = "spottrain.pipeline.process.supervisor"
            told = (
                f"{greeting.spec.entrypoint} {why} when it is loaded: each worker loads it by "
                "itself, which takes longer"
            )
            greeting = dataclasses.replace(greeting, warnings=(*greeting.warnings, told))
            argv = [sys.executable, "-P", "-m", module, _LOAD_IN_WORKERS, encode(greeting)]
            os.execv(sys.executable, argv)
    finish_output()  # else children would write it, too
    supervisor = Supervisor(greeting, reports, loaded)
    supervisor.report(failure or greeting.ready())
    supervisor.run()


if __name__ == "__main__":
    main()
