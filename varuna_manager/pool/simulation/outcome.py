"""What comes of a simulated pool: times, utilisation, fairness, deadlines and dollars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spottrain.varuna_manager.pool.core.model import Vms
from spottrain.varuna_manager.pool.simulation.workload import SimulatedJob


@dataclass
class JobOutcome:
    """What became of one job; points in time are seconds since the workload's start."""

    job: SimulatedJob
    started_s: float = math.inf
    ended_s: float = math.inf
    """Infinite for a job that could not end."""
    usd: float = 0.0
    sizes: list[tuple[float, Vms]] = field(default_factory=list)
    """(since, VMs by kind), as they changed."""

    @property
    def completion_s(self) -> float:
        """Time from arrival to end."""
        return self.ended_s - self.job.arrived_s

    @property
    def queueing_s(self) -> float:
        """Time from arrival to the first VM."""
        return self.started_s - self.job.arrived_s

    def holds(self, since_s: float, vms: Vms) -> None:
        """Note what it holds from now on."""
        if self.sizes and self.sizes[-1][1] == vms:
            return
        if self.sizes and self.sizes[-1][0] == since_s:
            self.sizes.pop()
        self.sizes.append((since_s, vms))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOutcome:
    """What came of a simulation."""

    kinds: tuple[str, ...]
    vms: Vms
    jobs: tuple[JobOutcome, ...]
    """In order of arrival, without those that were refused."""
    refused: tuple[tuple[str, str], ...] = ()
    """Name and reason."""
    decision_s: float = 0.0
    """Seconds of CPU of the slowest decision."""

    @property
    def makespan_s(self) -> float:
        """Time from the first arrival to the last end; infinite if a job has none."""
        first_s = min((one.job.arrived_s for one in self.jobs), default=0.0)
        return max((one.ended_s for one in self.jobs), default=math.inf) - first_s

    @property
    def utilisation(self) -> float:
        """VM time held as a part of the pool's during the makespan; nan without one."""
        if self.makespan_s == math.inf:
            return math.nan
        held = sum(self._vm_s(one) for one in self.jobs)
        return held / (sum(self.vms) * self.makespan_s)

    def _vm_s(self, one: JobOutcome) -> float:
        ends = [since_s for since_s, _ in one.sizes[1:]] + [one.ended_s]
        return sum(
            sum(vms) * (until_s - since_s)
            for (since_s, vms), until_s in zip(one.sizes, ends, strict=True)
            if any(vms)
        )

    def finish_time_fairness(self) -> list[float]:
        """Return, by job, its time over that in a pool in which each job keeps to its own part
        (``isolated_times_s``): the same for every policy."""
        alone = isolated_times_s([one.job for one in self.jobs], self.vms)
        return [one.completion_s / time_s for one, time_s in zip(self.jobs, alone, strict=True)]

    def deadlines(self) -> tuple[int, int]:
        """Return how many deadlines were kept, of how many."""
        due = [one for one in self.jobs if one.job.deadline_s < math.inf]
        # A millisecond for the sums of many intervals.
        return sum(one.ended_s <= one.job.deadline_s + 1e-3 for one in due), len(due)

    @property
    def usd(self) -> float:
        """Dollars of all VMs."""
        return sum(one.usd for one in self.jobs)


def isolated_times_s(jobs: Sequence[SimulatedJob], vms: Vms) -> list[float]:
    """Return the time from arrival to end of each job if each keeps to its own part.

    That part is one over the number of the jobs that are there then, of every kind, at the
    job's own size. Infinite for a job that cannot run.
    """
    rates: dict[tuple[int, int, int], float] = {}

    def rate_of(job: SimulatedJob, count: int) -> float:
        key = id(job.throughputs), job.size, count
        if key not in rates:
            rates[key] = own_part_rate(job, vms, 1.0 / count)
        return rates[key]

    ends_s = [math.inf] * len(jobs)
    runnable = [m for m, job in enumerate(jobs) if rate_of(job, 1) > 0]
    coming = sorted(runnable, key=lambda m: jobs[m].arrived_s, reverse=True)
    left: dict[int, float] = {}
    now_s = 0.0
    while coming or left:
        arrives_s = jobs[coming[-1]].arrived_s if coming else math.inf
        each = {m: rate_of(jobs[m], len(left)) for m in left}
        ends_first = min(left, key=lambda m: left[m] / each[m], default=None)
        lasts_s = math.inf if ends_first is None else left[ends_first] / each[ends_first]
        until_s = min(arrives_s, now_s + lasts_s)
        for m in left:
            left[m] -= each[m] * (until_s - now_s)
        now_s = until_s
        if arrives_s <= until_s:
            arrived = coming.pop()
            left[arrived] = jobs[arrived].work
        elif ends_first is not None:
            del left[ends_first]
            ends_s[ends_first] = now_s
    return [end_s - job.arrived_s for end_s, job in zip(ends_s, jobs, strict=True)]


def own_part_rate(job: SimulatedJob, vms: Vms, part: float) -> float:
    """Return what a job trains at its own size on a part of every kind.

    The kinds in order of its throughput there, each for as much of the time as the part has.
    """
    rates = sorted(
        (
            (table[job.size], part * held / job.size)
            for table, held in zip(job.throughputs, vms, strict=True)
            if table.get(job.size) and held >= job.size
        ),
        reverse=True,
    )
    trained, left = 0.0, 1.0
    for rate, share in rates:
        used = min(left, share)
        trained += rate * used
        left -= used
    return trained


def measures(outcome: PoolOutcome, window: tuple[int, int] | None = None) -> dict[str, float]:
    """Return the numbers of a simulation; where no job has a time it is infinite.

    Args:
        outcome: Of the simulation.
        window: The first and the last but one of the jobs, by arrival, whose times are
            measured; all if not given. Makespan, utilisation and dollars are of all jobs.
    """
    chosen = slice(*window) if window else slice(None)
    jobs: Sequence[JobOutcome] = outcome.jobs[chosen]
    completion = np.array([one.completion_s for one in jobs] or [math.inf])
    queueing = np.array([one.queueing_s for one in jobs] or [math.inf])
    fairness = np.array(outcome.finish_time_fairness()[chosen] or [math.inf])
    kept, due = outcome.deadlines()
    return {
        "jobs": len(jobs),
        "refused": len(outcome.refused),
        "ended": int(np.isfinite(completion).sum()),
        "mean_completion_s": float(completion.mean()),
        "median_completion_s": float(np.median(completion)),
        "p90_completion_s": float(np.percentile(completion, 90, method="higher")),
        "makespan_s": outcome.makespan_s,
        "mean_queueing_s": float(queueing.mean()),
        "median_queueing_s": float(np.median(queueing)),
        "utilisation": outcome.utilisation,
        "mean_finish_time_fairness": float(fairness.mean()),
        "worst_finish_time_fairness": float(fairness.max()),
        "deadlines": due,
        "deadlines_kept": kept,
        "usd": outcome.usd,
        "slowest_decision_s": outcome.decision_s,
    }
