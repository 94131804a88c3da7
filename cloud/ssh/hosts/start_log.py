"""The starts of agents, and what each takes: steps, time, bytes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import StartStep
from spottrain.cloud.ssh.transport.hosts import Calls

_STARTS = 64
"""Agents that are started in parallel."""
_PATIENCE_S = 100.0
"""Time limit of one call to start an agent; the next call continues to wait."""


class AgentStarts:
    """The starts of agents, at most one at a time on each VM.

    Args:
        cloud: Whose VMs, for the names of threads.
    """

    def __init__(self, cloud: str) -> None:
        self._threads = ThreadPoolExecutor(_STARTS, f"{cloud}-start")
        self._lock = threading.Lock()
        self._starts: dict[str, Future[tuple[StartStep, ...]]] = {}

    def __contains__(self, vm_id: str) -> bool:
        return vm_id in self._starts

    def wait_for(
        self, vm_id: str, place: str, start: Callable[[], tuple[StartStep, ...]]
    ) -> tuple[StartStep, ...]:
        """Return what a start returns; begin it unless it runs.

        Args:
            place: The VM's name in errors.

        Raises:
            CloudError: It is not over yet, and goes on; or its own error.
        """
        with self._lock:
            running = self._starts.get(vm_id)
            if running is None or running.done():
                running = self._starts[vm_id] = self._threads.submit(start)
        try:
            return running.result(_PATIENCE_S)
        except FutureTimeoutError as error:
            raise CloudError(f"{place}: is not ready yet, and is waited for") from error

    def close(self, *, wait: bool = True) -> None:
        """Begin no start any more.

        Args:
            wait: For those that run.
        """
        self._threads.shutdown(wait=wait, cancel_futures=True)


class StartLog:
    """The steps of one VM's start so far; repeated steps add up."""

    def __init__(self) -> None:
        self.doing = "waiting to start"
        """The current step, for people."""
        self._steps: dict[str, StartStep] = {}
        self._booted = False

    def take(self) -> tuple[StartStep, ...]:
        """Return the steps in the order in which they were begun, and forget them."""
        taken, self._steps = tuple(self._steps.values()), {}
        return taken

    def add(self, name: str, seconds: float, num_bytes: int = 0, source: str = "") -> None:
        """Add time and bytes to a step."""
        known = self._steps.get(name, StartStep(name=name, seconds=0.0))
        self._steps[name] = replace(
            known,
            seconds=known.seconds + seconds,
            num_bytes=known.num_bytes + num_bytes,
            source=source or known.source,
        )

    def waited(self, seconds: float) -> None:
        """Note how long a VM took from its launch until it let us in; once."""
        if not self._booted:
            self._booted = True
            self.add("boot", max(0.0, seconds))

    @contextlib.contextmanager
    def step(self, name: str, session: Calls) -> Iterator[list[str]]:
        """Measure a step on a host; one that fails counts too.

        Yields:
            A list for the step's source.
        """
        self.doing = name
        received, began_s = session.call("received"), time.monotonic()
        source: list[str] = []
        self.add(name, 0.0)
        try:
            yield source
        except BaseException:
            self.add(name, time.monotonic() - began_s)
            raise
        took_s = time.monotonic() - began_s
        self.add(name, took_s, session.call("received") - received, " and ".join(source))
