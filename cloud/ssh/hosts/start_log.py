"""What the start of a VM takes: steps, time, bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from spottrain.cloud.port.provider import StartStep
from spottrain.cloud.ssh.transport.hosts import Calls


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
