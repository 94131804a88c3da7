"""The supervisor, the agent's child process, and the queue of reports to post.

Standard library only: this file is copied to machines as it is.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spottrain import spawn
from spottrain.codec import decode, encode
from spottrain.errors import WireError
from spottrain.machine import supervisor_environment
from spottrain.spawn import Program
from spottrain.wire import messages

logger = logging.getLogger(__name__)

LOG = "supervisor.log"
"""Also what the user's code prints."""
WRITTEN_S = 1.0
"""How often a manager is asked whether it has written the last measurements."""
LOOK_S, STOPPED_LOOKS = 1.0, 15
"""Time between two looks at the processes of a VM, and how often in a row one is seen to be
stopped before it is ended."""
CLOSE_S = 5.0
"""How long a supervisor may take to end after its stdin has closed."""


class Outbox:
    """Reports in the order in which they were made, kept until the manager has them.

    Facts and measurements are numbered apart, each from 0. Facts are forgotten once the
    manager has received them, measurements once it has written them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, messages.Report | messages.Measured]] = deque()
        """What the manager has not received, with its number."""
        self._unwritten: deque[tuple[int, messages.Measured]] = deque()
        """Measurements that it has received but not written."""
        self._facts = self._measurements = 0
        """Numbers of the next ones."""
        self._received = 0
        """Facts that the manager has received."""
        self._traces: deque[messages.TraceWritten] = deque()

    def add(self, report: messages.Report) -> None:
        """Add a report; it is posted at once if no post is in flight."""
        with self._changed:
            if isinstance(report, messages.Measurement):
                measured = messages.Measured(after=self._facts, report=report)
                self._waiting.append((self._measurements, measured))
                self._measurements += 1
            else:
                self._waiting.append((self._facts, report))
                self._facts += 1
            self._changed.notify_all()

    def add_trace(self, trace: messages.TraceWritten) -> None:
        """Add a trace; it goes before the reports that are added after it."""
        with self._changed:
            self._traces.append(trace)

    def next_trace(self) -> messages.TraceWritten | None:
        """Return the oldest trace that is left, and forget it."""
        with self._changed:
            return self._traces.popleft() if self._traces else None

    def batch(self, vm_id: str, limit: int) -> messages.ReportBatch:
        """Wait for reports; return the oldest ones, up to ``limit``.

        While measurements are not written it is sometimes empty: a manager that has begun
        anew answers which of them it lacks.
        """
        with self._changed:
            wait_s = WRITTEN_S if self._unwritten else None
            self._changed.wait_for(lambda: self._waiting, wait_s)
            taken = tuple(itertools.islice(self._waiting, limit))
            measured = [(n, one) for n, one in taken if isinstance(one, messages.Measured)]
            first = measured[0][0] if measured else self._measurements
            oldest = self._unwritten[0][0] if self._unwritten else first
            return messages.ReportBatch(
                vm_id=vm_id,
                first=self._received,
                reports=tuple(one for _, one in taken if not isinstance(one, messages.Measured)),
                first_measurement=first,
                oldest_measurement=oldest,
                measurements=tuple(one for _, one in measured),
            )

    def acknowledge(self, answer: messages.ReportAnswer) -> None:
        """Forget what the manager has; send again what it asks for."""
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
            kept, self._unwritten = self._unwritten, deque()
            self._received = max(self._received, answer.received)
            for number, one in (*kept, *waiting):
                if not isinstance(one, messages.Measured):
                    if number >= self._received:
                        self._waiting.append((number, one))
                elif number >= answer.next_measurement:
                    self._waiting.append((number, one))
                elif number >= answer.measured:
                    self._unwritten.append((number, one))
            self._changed.notify_all()

    def wait_empty(self, timeout_s: float) -> bool:
        """Return whether everything was posted within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._unwritten, timeout_s
            )


class StoppedProcesses:
    """Which processes of a VM somebody has stopped (SIGSTOP), and never continues.

    They neither work nor end, and what they would report is not heard. Looks are counted,
    not seconds: a VM that was suspended as a whole has not looked.

    Args:
        pid: Of the supervisor.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks: dict[int, int] = {}

    def look(self) -> list[int]:
        """Return the supervisor or children of it that were stopped at each of the last
        ``STOPPED_LOOKS`` looks; each is returned once."""
        stopped = (pid for pid in (self._pid, *_children(self._pid)) if _is_stopped(pid))
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in stopped}
        return [pid for pid, looks in self._looks.items() if looks == STOPPED_LOOKS]


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # it has ended
        return []
    return [int(one) for one in text.split()]


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by no debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] == b"T"


class _Waiting:
    """A child that was forked before this process became the agent; as a ``Popen``.

    Args:
        pid: Its process id.
        connection: Where it waits to be told what to become.
        program: What it becomes.
        stderr: Its standard error.
    """

    def __init__(self, pid: int, connection: socket.socket, program: Program, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        its_stdin, stdin = os.pipe()
        stdout, its_stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        try:
            spawn.send(connection, program, (its_stdin, its_stdout, stderr))
        finally:
            os.close(its_stdin)
            os.close(its_stdout)
            connection.close()

    def wait(self) -> None:
        """Reap it."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)


class SupervisorProcess:
    """The child process that imports torch, and the workers that it forks.

    Args:
        argv: Its command.
        folder: Its working folder, where supervisor.log goes.
        vm_id: This VM, as plans name it.
        outbox: Where its reports go.
        environment: Its variables, and those of its workers.
        fds: Files of this process that it shares.
        waiting: A child that waits to become it, and the socket to that child.
    """

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        vm_id: str,
        outbox: Outbox,
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
        waiting: tuple[int, socket.socket] | None = None,
    ) -> None:
        self._vm_id = vm_id
        self._outbox = outbox
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._generation = -1
        self._running: set[int] = set()
        environment = supervisor_environment(environment)
        self._process: subprocess.Popen[bytes] | _Waiting
        with open(folder / LOG, "ab") as log:
            if waiting is not None:
                program = Program(argv, str(folder), environment, fds)
                self._process = _Waiting(*waiting, program, log.fileno())
                return
            self._process = subprocess.Popen(
                argv,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                pass_fds=fds,
                env=environment,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start(self, greeting: str, on_exit: Callable[[], None]) -> None:
        """Send the first line; ``on_exit`` is called after its last report."""
        self._lines.put(greeting)
        for name, target in (
            ("supervisor-in", self._write),
            ("supervisor-out", lambda: self._read(on_exit)),
            ("supervisor-end", self._reap),
        ):
            threading.Thread(target=target, name=name, daemon=True).start()

    def send(self, command: messages.Command) -> None:
        """Forward a command; never blocks."""
        logger.info("command: %s", command.kind)
        if isinstance(command, messages.RunGeneration):
            with self._changed:
                self._generation = command.generation
                self._running = {
                    slot.index for slot in command.plan.slots if slot.vm_id == self._vm_id
                }
        self._lines.put(encode(command))

    def checkpoint(self, timeout_s: float) -> None:
        """Stop the running generation with a checkpoint and wait for its end here."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if not self._running:
                return
            generation = self._generation
            self.send(messages.StopGeneration(generation=generation, checkpoint=True))
            self._changed.wait_for(lambda: not self._running, deadline - time.monotonic())

    def close(self) -> None:
        """Let it exit by itself within ``CLOSE_S``; its last reports are read."""
        self._lines.put(None)
        if not self._ended.wait(CLOSE_S):
            logger.info("supervisor did not exit on its own")

    def kill(self) -> None:
        """Kill it and all its workers at once, and reap it."""
        with self._changed:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._ended.wait()

    def _reap(self) -> None:
        """When it exits, kill its workers: they hold its stdout and have no leader."""
        # Not reaped yet, its pid cannot be reused: the group is still its own.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._changed:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._ended.set()

    def _write(self) -> None:
        """Write lines to its stdin; ``None`` closes it."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            while (line := self._lines.get()) is not None:
                stdin.write(f"{line}\n".encode())
                stdin.flush()
            stdin.close()
        except BrokenPipeError:
            logger.info("supervisor has closed its stdin")

    def _read(self, on_exit: Callable[[], None]) -> None:
        """Forward its reports until its stdout ends."""
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            try:
                report: messages.SupervisorReport = decode(messages.SupervisorReport, line)
            except WireError as error:
                logger.warning("supervisor sent an invalid report: %s: %r", error, line[:200])
                continue
            if isinstance(report, messages.TraceWritten):
                self._outbox.add_trace(report)
                continue
            self._outbox.add(report)
            self._note(report)
        on_exit()

    def _note(self, report: messages.Report) -> None:
        """Track the slots that run the newest generation here."""
        match report:
            case (
                messages.GenerationStopped(generation=generation, slot=slot)
                | messages.GenerationBroken(generation=generation, slot=slot)
                | messages.WorkerDied(generation=generation, slot=slot)
            ):
                with self._changed:
                    if generation == self._generation:
                        self._running.discard(slot)
                        self._changed.notify_all()
            case _:
                pass
