"""The product's form: the pool's own core, with jobs that change size.

Managers answer at once, clouds always have VMs, and a change of size costs a job
``JobRequest.morph_s`` without training.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
from spottrain.varuna_manager.pool.simulation.outcome import JobOutcome, PoolOutcome
from spottrain.varuna_manager.pool.simulation.workload import SimulatedJob, Table

MICRO = 1e6
UNCONCERNED = frozenset({"fair", "priority", "fifo", "hierarchical"})
"""Policies to which it is all the same how much work is left."""
ROUNDING_S = 1e-6
"""Jobs that would end so soon have ended."""


def simulate(
    settings: PoolSettings,
    supplies: Sequence[Supply],
    jobs: Iterable[SimulatedJob],
    *,
    elastic: bool = True,
    morph_s: float = 10.0,
) -> PoolOutcome:
    """Return what comes of jobs that arrive on a pool.

    Args:
        settings: Of the pool. Managers here are never silent.
        supplies: The pool's VMs, a supply for each kind.
        jobs: In any order.
        elastic: They change size; else each has its own size, or nothing.
        morph_s: What a change of size costs a job, in seconds without training.
    """
    state = PoolState(settings=replace(settings, silent_s=math.inf), supplies=tuple(supplies))
    world = _World(state)
    coming = deque(sorted(jobs, key=lambda job: job.arrived_s))
    while coming or world.managers:
        arrives_s = coming[0].arrived_s if coming else math.inf
        ends_s = min(
            (manager.ends_s(world.state.now_s) for manager in world.managers.values()),
            default=math.inf,
        )
        then_s = min(arrives_s, ends_s, world.state.timer_s)
        if then_s == math.inf:
            break  # nothing will ever happen: no money is left
        world.advance(then_s)
        world.report_all()
        if then_s == arrives_s:
            world.submit(coming.popleft(), elastic=elastic, morph_s=morph_s)
        elif then_s == ends_s:
            world.end(then_s)
        else:
            world.tell(PoolTimerFired(at_s=then_s))
    outcomes = sorted(world.outcomes.values(), key=lambda one: one.job.arrived_s)
    return PoolOutcome(
        kinds=tuple(supply.name for supply in supplies),
        vms=tuple(supply.vms for supply in supplies),
        jobs=tuple(outcomes),
        refused=tuple((one.job, one.reason) for one in world.refused),
        decision_s=world.decision_s,
    )


@dataclass
class _Manager:
    """Of a job that has not ended; it does at once what it is told."""

    outcome: JobOutcome
    request: JobRequest
    held: Vms
    serial: int = 0
    done: float = 0.0
    rate: float = 0.0
    trains_from_s: float = 0.0

    @property
    def name(self) -> str:
        return self.request.name

    def ends_s(self, now_s: float) -> float:
        """Return when it ends if nothing changes."""
        if self.rate <= 0:
            return math.inf
        left = max(0.0, self.request.examples - self.done)
        return max(now_s, self.trains_from_s) + left / self.rate


class _World:
    """The pool's state, and the jobs' managers."""

    def __init__(self, state: PoolState) -> None:
        self.state = state
        self.outcomes: dict[str, JobOutcome] = {}
        self.managers: dict[str, _Manager] = {}
        self.refused: list[Refuse] = []
        self.decision_s = 0.0

    def submit(self, job: SimulatedJob, *, elastic: bool, morph_s: float) -> None:
        """Submit a job that arrives now."""
        tables = job.elastic() if elastic else job.fixed()
        request = JobRequest(
            name=job.name,
            throughputs=tuple(map(_pairs, tables)),
            examples=job.work,
            team=job.team,
            weight=job.weight,
            deadline_s=job.deadline_s,
            morph_s=morph_s,
        )
        none = (0,) * len(self.state.supplies)
        outcome = JobOutcome(job)
        self.outcomes[job.name] = outcome
        self.managers[job.name] = _Manager(outcome, request, none)
        self.tell(JobRequested(at_s=job.arrived_s, request=request))

    def tell(self, event: PoolEvent) -> None:
        """Give the pool an event; what it commands happens at once."""
        events = deque([event])
        while events:
            event = events.popleft()
            begun_s = time.process_time()
            self.state, commands = step(self.state, event)
            self.decision_s = max(self.decision_s, time.process_time() - begun_s)
            for command in commands:
                match command:
                    case Grant(job=name) if name in self.managers:
                        manager = self.managers[name]
                        if command.serial > manager.serial:
                            self._obey(manager, command)
                            events.append(self._report_of(manager, event.at_s))
                    case Refuse(job=name):
                        self.refused.append(command)
                        del self.managers[name], self.outcomes[name]

    def _obey(self, manager: _Manager, grant: Grant) -> None:
        now_s = self.state.now_s
        manager.serial = grant.serial
        if grant.vms == manager.held:
            return
        manager.held = grant.vms
        manager.outcome.holds(now_s, grant.vms)
        manager.rate = self.state.jobs[grant.job].rate(grant.vms)
        manager.trains_from_s = now_s
        if manager.outcome.started_s < math.inf:
            manager.trains_from_s += manager.request.morph_s
        elif any(grant.vms):
            manager.outcome.started_s = now_s

    def _report_of(self, manager: _Manager, now_s: float) -> HoldingsReported:
        return HoldingsReported(
            at_s=now_s,
            job=manager.name,
            serial=manager.serial,
            held=manager.held,
            spent=round(manager.outcome.usd * MICRO),
            examples_done=manager.done,
        )

    def report_all(self) -> None:
        """Let managers say how far they are, where the next decision looks at it.

        These reports decide nothing: they are put in at once, and not each by a step.
        """
        settings = self.state.settings
        has_deadlines = any(
            manager.request.deadline_s < math.inf for manager in self.managers.values()
        )
        if (
            has_deadlines
            or settings.policy not in UNCONCERNED
            or settings.limits.max_microusd < math.inf
        ):
            jobs = dict(self.state.jobs)
            for manager in self.managers.values():
                if any(manager.held):
                    jobs[manager.name] = replace(
                        jobs[manager.name],
                        examples_done=manager.done,
                        spent=round(manager.outcome.usd * MICRO),
                    )
            self.state = replace(self.state, jobs=jobs)

    def advance(self, then_s: float) -> None:
        """Let jobs train and spend until a point in time."""
        past_s = then_s - self.state.now_s
        for manager in self.managers.values():
            if any(manager.held):
                trained_s = then_s - max(self.state.now_s, manager.trains_from_s)
                manager.done += manager.rate * max(0.0, trained_s)
                per_hour = self.state.microusd_per_hour(manager.held)
                manager.outcome.usd += per_hour / MICRO * past_s / HOUR_S

    def end(self, now_s: float) -> None:
        """End the jobs that have done their work."""
        for manager in list(self.managers.values()):
            if manager.ends_s(now_s) <= now_s + ROUNDING_S:
                manager.held, manager.rate = (0,) * len(self.state.supplies), 0.0
                manager.outcome.ended_s = now_s
                manager.outcome.holds(now_s, manager.held)
                self.tell(PoolJobEnded(at_s=now_s, job=manager.name))
                self.tell(self._report_of(manager, now_s))
                del self.managers[manager.name]


def _pairs(table: Table) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(table.items()))
