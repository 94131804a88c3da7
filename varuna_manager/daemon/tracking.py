"""Starts the processes that write a job's measurements, and the one that makes the calls that
it has asked for (``daemon.callbacks``), and keeps them running.

What happens to them is told, once, and changes nothing else: no event waits for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spottrain.varuna_manager.config.track import TrackConfig
from spottrain.varuna_manager.jobs.folder import JobDir, try_to_write_text
from spottrain.varuna_manager.jobs.follow import uid_of

logger = logging.getLogger(__name__)

_PACKAGE = "spottrain.varuna_manager"
_CALLBACKS = "callbacks"
MOST_CALLS = 4
"""At a job's end: one of each function."""
FIRST_PAUSE_S = 5.0
"""Before a process that has ended is started again; twice as long each time."""
MAX_PAUSE_S = 600.0
FINISH_S = 30.0
"""How long the processes may take at the job's end to write what is left."""
_LINES = "metrics.jsonl"


class Trackers:
    """The processes of one job.

    Args:
        track: The trackers asked for.
        callback_limit_s: Of the calls that the job asks for; ``None``: it asks for none.
    """

    def __init__(
        self,
        job: JobDir,
        track: TrackConfig,
        callback_limit_s: float | None = None,
    ) -> None:
        self._job = job
        self._callback_limit_s = callback_limit_s
        self._sinks = (_LINES, *track.asked)
        if callback_limit_s is not None:
            self._sinks += (_CALLBACKS,)
        self.on_failed_call: Callable[[str], None] = lambda trouble: None
        """Called with what is in the way of a call."""
        self._ending = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._trouble: dict[str, str] = {}
        self._write_status()

    def wake(self) -> None:
        """There is something to write: start the processes, if they do not run."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def finish(self, limit_s: float, *, has_ended: bool = False) -> None:
        """Let the processes write what is left; they are killed if it takes too long.

        Args:
            has_ended: The job has, so that the last calls are made: each has its own limit.
        """
        if has_ended and self._callback_limit_s is not None:
            self.wake()  # it may have ended before anything was measured
        if self._running is None:
            return
        self._ending.set()
        for process in self._processes.values():
            _close_stdin(process)
        await asyncio.wait((self._running,), timeout=limit_s)
        self._kill(limit_s, but=_CALLBACKS if has_ended else "")
        if has_ended and self._callback_limit_s is not None:
            limit_s = MOST_CALLS * self._callback_limit_s + limit_s
            await asyncio.wait((self._running,), timeout=limit_s)
            self._kill(limit_s)
        await self._running

    def _kill(self, limit_s: float, but: str = "") -> None:
        for sink, process in self._processes.items():
            if process.returncode is None and sink != but:
                self._tell(sink, f"not all was written within {limit_s:.0f} s")
                process.kill()

    async def _run(self) -> None:
        """Keep the processes running until ``finish``."""
        with suppress(OSError):  # each process says that it cannot be started
            (self._job.path / "tracking").mkdir(exist_ok=True)
        await asyncio.gather(*(self._keep(sink) for sink in self._sinks))

    async def _keep(self, sink: str) -> None:
        pause_s = FIRST_PAUSE_S
        log = self._job.path / "tracking" / f"{sink}.log"
        while True:
            try:
                code = await self._run_once(sink, log)
            except OSError as error:
                self._tell(sink, f"cannot be started: {error}")
            else:
                if code == 0:
                    return
                if code > 0 or not self._ending.is_set():
                    self._tell(sink, f"{_last_line(log)} (exit {code})")
            if self._ending.is_set():
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _run_once(self, sink: str, log: Path) -> int:
        module = "daemon.callbacks" if sink == _CALLBACKS else "tracking.main"
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", f"{_PACKAGE}.{module}"),
                *(str(self._job.path), sink, uid_of(self._job)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
            )
        finally:
            os.close(output)
        self._processes[sink] = process
        if self._ending.is_set():
            _close_stdin(process)
        assert process.stdout is not None, "it is a pipe"
        async for line in process.stdout:
            self._tell(sink, line.decode(errors="replace").strip())
        return await process.wait()

    def _tell(self, sink: str, trouble: str) -> None:
        """Log what is in the way of a sink, and keep it for ``status``."""
        if trouble == self._trouble.get(sink, ""):
            return
        self._trouble[sink] = trouble
        if trouble:
            logger.warning("%s: %s; the job goes on", sink, trouble)
            if sink == _CALLBACKS:
                self.on_failed_call(trouble)
        else:
            logger.info("%s: works again", sink)
        self._write_status()

    def _write_status(self) -> None:
        trouble = {k: v for k, v in self._trouble.items() if v}
        try_to_write_text(self._job.tracking_status, json.dumps(trouble))


def _close_stdin(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()


def _last_line(log: Path) -> str:
    lines = []
    with suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "ended"
