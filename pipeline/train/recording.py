"""A rank's own record of a mini-batch, on demand: its tasks, messages and phases.

It takes moments and computes nothing with tensors, so that what is computed, and in which
order, stays the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spottrain.codec import encode
from spottrain.morphing.schedules.schedule import Task
from spottrain.pipeline.comm.p2p import Arrival, Direction
from spottrain.pipeline.devices.port import Device
from spottrain.wire.plan import Plan
from spottrain.wire.timeline import (
    ArrivedAt,
    Phase,
    PhaseTimes,
    RankTimeline,
    SentAt,
    TaskTimes,
)

_LOOKS = 5


class Recording:
    """Takes down what a rank does from now on.

    Args:
        device: What computes.
        plan: Of the generation.
        rank: Of the plan.
    """

    def __init__(self, device: Device, plan: Plan, rank: int) -> None:
        self._device, self._depth = device, plan.pipeline_depth
        self._replica, self._stage = divmod(rank, plan.pipeline_depth)
        self._first_mark, self._began_s, self._wall_s = _beginning(device)
        self._tasks: list[tuple[Task, Any, Any]] = []
        self._sent: list[SentAt] = []
        self._arrived: list[ArrivedAt] = []
        self._phases: list[PhaseTimes] = []

    def task(self, task: Task, began: Any, ended: Any) -> None:
        """Note a task, and the device's marks before and after it."""
        self._tasks.append((task, began, ended))

    def sent(self, direction: Direction, microbatch: int) -> None:
        """Note that a message was given to its link."""
        self._sent.append(
            SentAt(
                is_gradient=direction is Direction.GRADIENT,
                microbatch=microbatch,
                at_s=time.monotonic() - self._began_s,
            )
        )

    def arrived(self, arrival: Arrival) -> None:
        """Note when a message had come in."""
        self._arrived.append(
            ArrivedAt(
                is_gradient=arrival.direction is Direction.GRADIENT,
                at_s=arrival.at_s - self._began_s,
            )
        )

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Note how long what is done inside takes the host."""
        start_s = time.monotonic() - self._began_s
        yield
        end_s = time.monotonic() - self._began_s
        self._phases.append(PhaseTimes(phase=phase, start_s=start_s, end_s=end_s))

    def stop(self) -> None:
        """Wait for what the device still does of it."""
        self._device.synchronise()

    def write(self, file: Path) -> None:
        """Write a ``RankTimeline``."""
        timeline = RankTimeline(
            replica=self._replica,
            stage=self._stage,
            pipeline_depth=self._depth,
            wall_s=self._wall_s,
            tasks=tuple(self._times(*one) for one in self._tasks),
            sent=tuple(self._sent),
            arrived=tuple(self._arrived),
            phases=tuple(self._phases),
        )
        file.write_text(encode(timeline))

    def _times(self, task: Task, began: Any, ended: Any) -> TaskTimes:
        return TaskTimes(
            work=task.work.value,
            microbatch=task.microbatch,
            chunk=task.chunk,
            start_s=self._device.elapsed_s([(self._first_mark, began)]),
            end_s=self._device.elapsed_s([(self._first_mark, ended)]),
        )


def _beginning(device: Device) -> tuple[Any, float, float]:
    """Return one moment by the device's time, the host's, and that of the wall.

    The host may be held up between its looks at them, but hardly each time.
    """
    found = []
    for _ in range(_LOOKS):
        device.synchronise()  # so that the device comes to the mark at once
        began_s = time.monotonic()
        mark, wall_s = device.mark(), time.time()
        found.append((time.monotonic() - began_s, (mark, began_s, wall_s)))
    return min(found, key=lambda one: one[0])[1]
