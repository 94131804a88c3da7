"""A replica's mini-batch, played plainly with ``StageProgress`` and ``next_task``.

What ``simulate.loops`` are compared with: the same rules, written down again
over the very objects that the executor keeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.morphing.schedules.schedule import (
    OrderPolicy,
    StageProgress,
    StageSchedule,
    Task,
    Work,
)
from spottrain.morphing.simulate.replica import Link, PipelineRun, StageTimes

NANOSECONDS = 10**9
KINDS = 3
DONE, ACTIVATION, GRADIENT = range(3)


def nanoseconds(time_s: float) -> int:
    return round(time_s * NANOSECONDS)


@dataclass
class SlowReplica:
    lists: Sequence[StageSchedule]
    stages: Sequence[StageTimes]
    links: Sequence[Link]
    order_policy: OrderPolicy
    bound: int | None = None
    asynchronous: bool = False

    def __post_init__(self) -> None:
        depth = len(self.lists)
        self.chunks = 1 + max(task.chunk for tasks in self.lists for task in tasks)
        self.progress = [
            StageProgress(
                tasks,
                first=p == 0,
                last=p == depth - 1,
                bound=self.bound,
                order_policy=self.order_policy,
            )
            for p, tasks in enumerate(self.lists)
        ]
        self.events: list[tuple[int, int, int]] = []
        self.running: list[Task | None] = [None] * depth
        self.queued: list[Task | None] = [None] * depth
        self.chosen: list[Task | None] = [None] * depth
        self.busy = [0] * depth
        self.finish = [0] * depth
        self.free = [[0, 0] for _ in range(depth)]

    def run(self) -> PipelineRun:
        for p in range(len(self.lists)):
            self.start(p, 0)
        while self.events:
            now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == now:
                _, p, what = heapq.heappop(self.events)
                touched.add(p)
                self.happen(p, what, now)
            for p in touched:
                self.start(p, now)
        return PipelineRun(
            finish_s=tuple(at / NANOSECONDS for at in self.finish),
            busy_s=tuple(time / NANOSECONDS for time in self.busy),
            peak_in_flight=tuple(p.peak_in_flight for p in self.progress),
        )

    def happen(self, p: int, what: int, now: int) -> None:
        chunk, what = divmod(what, KINDS)
        if what == ACTIVATION:
            self.progress[p].activation_arrived(chunk)
        elif what == GRADIENT:
            self.progress[p].gradient_arrived(chunk)
        else:
            self.end(p, now)

    def start(self, p: int, now: int) -> None:
        while True:
            if self.running[p] is None and (task := self.queued[p]):
                self.queued[p] = None
                self.begin(p, task, now)
            if self.chosen[p] is None and (self.asynchronous or self.running[p] is None):
                self.chosen[p] = self.progress[p].next_task()
            if (task := self.chosen[p]) is None or self.queued[p] is not None:
                return
            self.queued[p], self.chosen[p] = task, None
            self.progress[p].completed(task)

    def begin(self, p: int, task: Task, now: int) -> None:
        self.running[p] = task
        times = self.stages[p]
        duration = {
            Work.FORWARD: nanoseconds(times.forward_s / self.chunks),
            Work.RECOMPUTE: nanoseconds(times.recompute_s / self.chunks),
            Work.BACKWARD: nanoseconds(times.backward_s / self.chunks),
        }[task.work]
        self.busy[p] += duration
        heapq.heappush(self.events, (now + duration, p, DONE))

    def end(self, p: int, now: int) -> None:
        task = self.running[p]
        assert task is not None
        self.running[p] = None
        self.finish[p] = now
        last = self.chunks * len(self.lists) - 1
        run = task.chunk * len(self.lists) + p
        if task.work is Work.FORWARD and run < last:
            self.send(run, 0, now)
        elif task.work is Work.BACKWARD and run > 0:
            self.send(run, 1, now)

    def send(self, run: int, way: int, now: int) -> None:
        """Send on what the sections of ``run`` have made."""
        p = run % len(self.lists)
        link = (p - way) % len(self.lists)
        free = self.free[link]
        free[way] = max(now, free[way]) + nanoseconds(self.links[link].transfer_s)
        self.arrive(run, way, free[way] + nanoseconds(self.links[link].latency_s))

    def arrive(self, run: int, way: int, at: int) -> None:
        to, what = (run - 1, GRADIENT) if way else (run + 1, ACTIVATION)
        chunk, p = divmod(to, len(self.lists))
        heapq.heappush(self.events, (at, p, what + KINDS * chunk))
