"""Watching a job: live at a terminal, plain lines anywhere else.

The watcher only reads the journal; closing it changes nothing. Ctrl-C in the watcher of
``launch`` and ``resume`` asks the manager to stop the job: once to checkpoint first,
twice to return the VMs at once.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from spottrain.errors import SpottrainError
from spottrain.varuna_manager.api.actions import outcome_of
from spottrain.varuna_manager.format import clock
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import Follower
from spottrain.varuna_manager.launch.asking import request_stop
from spottrain.varuna_manager.reporting.documents import status
from spottrain.varuna_manager.reporting.measured import newest
from spottrain.varuna_manager.reporting.tables import live_panel, plain_line

POLL_S = 0.25
PLAIN_LINE_S = 5.0
"""Minimum time between lines where there is no terminal."""
ALIVE_S = 2.0
"""Time between checks of the manager's lock."""
INTERRUPTED = 130


class Watcher:
    """Shows a job until it ends.

    Args:
        job: What to watch.
        console: Where the progress is shown.
        manager: The manager's process, if it is a child of this one.
        may_stop: Ctrl-C stops the job; otherwise it only stops watching.
    """

    def __init__(
        self,
        job: JobDir,
        console: Console,
        *,
        manager: subprocess.Popen[bytes] | None = None,
        may_stop: bool = False,
    ) -> None:
        self._job = job
        self._console = console
        self._manager = manager
        self._may_stop = may_stop
        # What has happened so far is for 'spottrain events'.
        self._follower = Follower(job, from_now=True)
        self._interrupts = 0
        self._interrupts_served = 0
        self._alive_at_s = time.monotonic()
        self._plain_at_s = 0.0
        self._plain_step = -1

    def run(self) -> int:
        """Show the job until it has ended; return its exit code, or 130.

        Raises:
            ManagerGoneError: The manager is gone before the job's end.
        """
        try:
            with self._interrupt_handler(), self._display() as live:
                while not self._show(live):
                    if self._interrupts and not self._may_stop:
                        return INTERRUPTED
                    self._serve_interrupts()
                    time.sleep(POLL_S)
            return self._exit_code()
        finally:
            self._follower.close()

    def _show(self, live: Live | None) -> bool:
        """Show what is new; return whether that was the end."""
        # Checked before the journal is read, so that the last events are not missed.
        gone = self._manager_is_gone()
        for entry in self._follower.advance():
            if entry.message:
                self._say(f"{clock(entry.event.at_s)} {entry.message}")
        view = status(self._follower.state, not gone, time.time())
        view |= newest(self._job, self._follower.measurements())
        if live is not None:
            live.update(live_panel(view, self._follower.message_at_s), refresh=True)
        elif self._plain_is_due():
            self._plain_step = view["step"]
            self._plain_at_s = time.monotonic()
            self._say(f"{clock(time.time())} {plain_line(view)}")
        return gone

    def _say(self, line: str) -> None:
        wrap = not self._console.is_terminal  # a log has no width
        self._console.print(line, markup=False, highlight=False, soft_wrap=wrap)

    def _plain_is_due(self) -> bool:
        moved = self._follower.state.history.progress.step != self._plain_step
        return moved and time.monotonic() - self._plain_at_s >= PLAIN_LINE_S

    def _manager_is_gone(self) -> bool:
        """Return whether the job has no manager any more."""
        if self._manager is not None:
            return self._manager.poll() is not None
        if time.monotonic() - self._alive_at_s >= ALIVE_S or self._follower.has_ended:
            self._alive_at_s = time.monotonic()
            return not self._job.is_managed()
        return False

    def _exit_code(self) -> int:
        outcome = outcome_of(self._job, self._follower.state)
        stopped = self._interrupts and outcome.kind == "stopped"
        return INTERRUPTED if stopped else outcome.exit_code

    def _serve_interrupts(self) -> None:
        """Forward Ctrl-C to the manager: first to checkpoint, then to end at once."""
        interrupts = self._interrupts  # may rise below: served next time
        if self._interrupts_served == interrupts or self._follower.has_ended:
            return
        address = self._job.manager()
        if self._manager and (address is None or address.pid != self._manager.pid):
            return  # it is still starting: asked as soon as it can answer
        now = interrupts > 1
        try:
            request_stop(self._job, checkpoint=not now, now=now)
        except SpottrainError as error:
            self._say(f"error: {error}")
        else:
            self._say(
                "returning all VMs now"
                if now
                else "stopping: checkpoint, then return the VMs (Ctrl-C again: now)"
            )
        self._interrupts_served = interrupts

    @contextlib.contextmanager
    def _interrupt_handler(self) -> Iterator[None]:
        def count(signum: int, frame: FrameType | None) -> None:
            self._interrupts += 1

        before = signal.signal(signal.SIGINT, count)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def _display(self) -> Iterator[Live | None]:
        if not self._console.is_terminal:
            yield None
            return
        with (
            _without_echo_of_ctrl_c(),
            Live(console=self._console, auto_refresh=False) as live,
        ):
            yield live


@contextlib.contextmanager
def _without_echo_of_ctrl_c() -> Iterator[None]:
    """Keep the terminal from writing ``^C`` into the live display."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
