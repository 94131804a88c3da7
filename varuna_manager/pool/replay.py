"""Jobs that arrive on a pool, replayed in virtual time with the pool's own core.

Managers answer at once, clouds always have VMs, and a change of size costs a job
``JobRequest.morph_s`` without training.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    HoldingsReported,
    JobRequest,
    JobRequested,
    PoolEvent,
    PoolJobEnded,
    PoolSettings,
    PoolState,
    PoolTimerFired,
    Refuse,
    Supply,
    Vms,
)
from spottrain.varuna_manager.pool.core.step import step


@dataclass
class ReplayedJob:
    """One job of a replay; times are points in virtual time, in seconds."""

    request: JobRequest
    arrived_s: float
    started_s: float = math.inf
    ended_s: float = math.inf
    """Infinite for a job that could not end."""
    spent: float = 0.0
    """Micro-dollars."""
    held: Vms = ()
    serial: int = 0
    done: float = 0.0
    rate: float = 0.0
    trains_from_s: float = 0.0
    sizes: list[tuple[float, Vms]] = field(default_factory=list)
    """(since, VMs by supply), as they changed."""

    def ends_s(self, now_s: float) -> float:
        """Return when it ends if nothing changes."""
        if self.rate <= 0 or self.ended_s < math.inf:
            return math.inf
        left = max(0.0, self.request.examples - self.done)
        return max(now_s, self.trains_from_s) + left / self.rate


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a replay."""

    jobs: tuple[ReplayedJob, ...]
    refused: tuple[Refuse, ...]
    vm_s: float
    """VM seconds held."""
    capacity: int
    """VMs of the pool."""

    @property
    def completion_s(self) -> list[float]:
        """Return each job's time from arrival to end."""
        return [job.ended_s - job.arrived_s for job in self.jobs]

    @property
    def queueing_s(self) -> list[float]:
        """Return each job's time from arrival to its first VM."""
        return [job.started_s - job.arrived_s for job in self.jobs]

    @property
    def makespan_s(self) -> float:
        """Return the time from the first arrival to the last end."""
        first_s = min(job.arrived_s for job in self.jobs)
        return max(job.ended_s for job in self.jobs) - first_s

    @property
    def utilisation(self) -> float:
        """Return the VM time held as a part of the pool's during the makespan."""
        return self.vm_s / (self.capacity * self.makespan_s)


def replay(
    settings: PoolSettings,
    supplies: Sequence[Supply],
    arrivals: Iterable[tuple[float, JobRequest]],
) -> Replay:
    """Return what comes of jobs that arrive at points in time, in seconds.

    Args:
        settings: Of the pool. Managers here are never silent.
        supplies: The pool's VMs.
        arrivals: In any order.
    """
    world = _World(
        PoolState(
            settings=replace(settings, silent_s=math.inf), supplies=tuple(supplies)
        )
    )
    coming = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
    while coming or any(job.ended_s == math.inf for job in world.jobs.values()):
        now_s = world.state.now_s
        arrives_s = coming[0][0] if coming else math.inf
        ends_s = min(
            (job.ends_s(now_s) for job in world.jobs.values()), default=math.inf
        )
        then_s = min(arrives_s, ends_s, world.state.timer_s)
        if then_s == math.inf:
            break  # nothing will ever happen: no money is left
        world.advance(then_s)
        if then_s == arrives_s:
            world.tell(JobRequested(at_s=then_s, request=coming.popleft()[1]))
        elif then_s == ends_s:
            world.end(then_s)
        else:
            for job in list(world.jobs.values()):
                world.report(job, then_s)
            world.tell(PoolTimerFired(at_s=then_s))
    capacity = sum(supply.vms for supply in supplies)
    jobs, refused = tuple(world.jobs.values()), tuple(world.refused)
    return Replay(jobs, refused, world.vm_s, capacity)


class _World:
    """The pool's state, and the jobs' managers."""

    def __init__(self, state: PoolState) -> None:
        self.state = state
        self.jobs: dict[str, ReplayedJob] = {}
        self.refused: list[Refuse] = []
        self.vm_s = 0.0

    def tell(self, event: PoolEvent) -> None:
        """Give the pool an event; what it commands happens at once."""
        events = deque([event])
        while events:
            event = events.popleft()
            if isinstance(event, JobRequested):
                fresh = ReplayedJob(event.request, event.at_s)
                self.jobs.setdefault(event.request.name, fresh)
            self.state, commands = step(self.state, event)
            for command in commands:
                match command:
                    case Grant(job=name) if command.serial > self.jobs[name].serial:
                        self._obey(self.jobs[name], command)
                        events.append(self._report_of(self.jobs[name], event.at_s))
                    case Refuse(job=name):
                        self.refused.append(command)
                        if name not in self.state.jobs:
                            self.jobs.pop(name, None)

    def _obey(self, job: ReplayedJob, grant: Grant) -> None:
        now_s = self.state.now_s
        job.serial = grant.serial
        if grant.vms != job.held:
            job.held = grant.vms
            job.sizes.append((now_s, grant.vms))
            job.rate = self.state.jobs[grant.job].rate(grant.vms)
            job.trains_from_s = now_s
            if job.started_s < math.inf:
                job.trains_from_s += job.request.morph_s
            elif any(grant.vms):
                job.started_s = now_s

    def _report_of(self, job: ReplayedJob, now_s: float) -> HoldingsReported:
        return HoldingsReported(
            at_s=now_s,
            job=job.request.name,
            serial=job.serial,
            held=job.held or (0,) * len(self.state.supplies),
            spent=round(job.spent),
            examples_done=job.done,
        )

    def report(self, job: ReplayedJob, now_s: float) -> None:
        """Let a running job's manager say how far it is."""
        if any(job.held):
            self.tell(self._report_of(job, now_s))

    def advance(self, then_s: float) -> None:
        """Let jobs train and spend until a point in time."""
        past_s = then_s - self.state.now_s
        for job in self.jobs.values():
            if any(job.held):
                trained_s = then_s - max(self.state.now_s, job.trains_from_s)
                job.done += job.rate * max(0.0, trained_s)
                per_hour = self.state.microusd_per_hour(job.held)
                job.spent += per_hour * past_s / HOUR_S
                self.vm_s += sum(job.held) * past_s

    def end(self, now_s: float) -> None:
        """End the jobs that have done their work."""
        for job in self.jobs.values():
            if job.ends_s(now_s) <= now_s + 1e-6:
                job.ended_s, job.rate = now_s, 0.0
                job.held = (0,) * len(self.state.supplies)
                job.sizes.append((now_s, job.held))
                self.tell(PoolJobEnded(at_s=now_s, job=job.request.name))
                self.tell(self._report_of(job, now_s))
