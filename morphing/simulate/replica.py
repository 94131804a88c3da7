"""Event simulation of one replica's mini-batch, from its schedule lists.

It follows the executor's own rule (``schedules.rule``). Time runs in whole nanoseconds,
so that what happens at the same instant is seen at the same instant.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules import rule
from spottrain.morphing.schedules.lists import Schedule, pack
from spottrain.morphing.schedules.schedule import (
    NUMBERS,
    WORKS,
    StageSchedule,
    Task,
    Work,
)
from spottrain.morphing.schedules.stage import make_stages
from spottrain.morphing.simulate.loops.play import Records, Times, Wires, play

NANOSECONDS = 10**9
MAX_NANOSECONDS = 1 << 58
"""Nine years: a mini-batch that might take longer is refused, times could overflow."""
MAX_TRACED_TASKS = 1_000_000
"""Of a timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one micro-batch on one stage, or on one of its runs of sections."""

    forward_s: float
    recompute_s: float
    backward_s: float
    forward_spread: float = 0.0
    """Standard deviation as a share of the time; so are the others."""
    recompute_spread: float = 0.0
    backward_spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Time of a micro-batch between two neighbouring stages, either way.

    A direction carries one message at a time: it is taken for ``transfer_s``, and the
    message arrives ``latency_s`` after that. Links between VMs share the VMs' NICs, which
    send one message at a time and receive one at a time.
    """

    latency_s: float = 0.0
    transfer_s: float = 0.0
    jitter: float = 0.0
    """Standard deviation of the sum as a share of it."""
    vms: tuple[int, int] | None = None
    """Numbers of the VMs where it begins and ends, if it shares their NICs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """One replica's mini-batch; a value for each stage."""

    finish_s: tuple[float, ...]
    """Time at which the stage has done its last backward."""
    busy_s: tuple[float, ...]
    peak_in_flight: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpan:
    """A task that ran."""

    stage: int
    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpan:
    """A message, from the moment at which its link is free for it until it arrives."""

    sender: int
    receiver: int
    is_gradient: bool
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTrace:
    """Everything that happened in one replica's mini-batch."""

    run: PipelineRun
    tasks: tuple[TaskSpan, ...]
    """In the order in which they ended; so are messages in which they were sent."""
    messages: tuple[MessageSpan, ...]


class Conditions(StrEnum):
    """Rules of a simulation."""

    RUNTIME = "runtime"
    """As spottrain's own runtime: ``OrderPolicy.OPPORTUNISTIC``; a direction of a link
    carries one message at a time; all that happens at an instant is known before
    anything starts."""
    STRICT = "in-order"
    """The same except for ``OrderPolicy.STRICT``: stages follow their lists exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Random variation of the times of tasks and messages, each independent."""

    relative: float = 0.0
    """Standard deviation as a share of the time, besides what ``StageTimes`` and ``Link``
    say; the mean stays (log-normal)."""
    seed: int = 0
    """The same seed gives the same run."""


def simulate_pipeline(
    lists: Schedule | Sequence[StageSchedule],
    stages: Sequence[StageTimes | Sequence[StageTimes]],
    links: Sequence[Link],
    *,
    bound: int | None = None,
    conditions: Conditions = Conditions.RUNTIME,
    jitter: Jitter | None = None,
    fast_forward: bool = True,
    asynchronous: bool = False,
    limit_s: float = math.inf,
) -> PipelineRun:
    """Simulate one replica's mini-batch.

    The steady state is fast-forwarded, so that millions of micro-batches take no longer
    than hundreds; the result is the same to the nanosecond. (Not with jitter, which
    has no steady state.)

    Args:
        lists: Of all stages: ``compact_schedule`` or, at length, ``make_schedule``.
        stages: One per stage. The chunks of an interleaved schedule take equal shares, or
            what the stage's times say for each of them.
        links: One between each two neighbouring stages, and for an interleaved schedule
            one from the last stage to the first; as slow as the slowest if not given.
        bound: Maximum micro-batches in flight on any stage; for each stage that of its
            list if not given. Only the runtime's conditions heed it.
        conditions: Rules of the simulation; an interleaved schedule is played in order
            in the runtime's conditions too, as the runtime does.
        jitter: None if not given.
        fast_forward: Whether to skip the steady state; ``False`` for comparison.
        asynchronous: Whether devices compute by themselves, as GPUs do, so that a stage
            chooses its next task before the ones before are done.
        limit_s: When it should end: one that keeps a pace at which it would not is given up.

    Raises:
        PlanError: Numbers of stages and links do not fit the lists, or a time is
            negative or not finite.
        TooSlowError: It was given up.
    """
    schedule = lists if isinstance(lists, Schedule) else _packed(lists)
    if not jitter and _never_waits(schedule):
        parts = [_parts(stage, schedule.chunks) for stage in stages]
        _check(schedule, parts, links)
        return _run_alone(schedule, parts[0][0], bound, conditions)
    return _play(
        schedule,
        stages,
        links,
        bound=bound,
        conditions=conditions,
        jitter=jitter,
        fast_forward=fast_forward,
        asynchronous=asynchronous,
        limit_s=limit_s,
    )


def trace_pipeline(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    links: Sequence[Link],
    *,
    bound: int | None = None,
    conditions: Conditions = Conditions.RUNTIME,
    jitter: Jitter | None = None,
) -> PipelineTrace:
    """Simulate one replica's mini-batch and return when everything happened.

    Every micro-batch is played. Arguments are those of ``simulate_pipeline``.

    Raises:
        PlanError: As there, or there are more than ``MAX_TRACED_TASKS`` tasks.
    """
    count = schedule.num_tasks
    if count > MAX_TRACED_TASKS:
        raise PlanError(
            f"a timeline has at most {MAX_TRACED_TASKS:,} tasks: got {count:,}; take fewer "
            "micro-batches"
        )
    records = Records()
    run = _play(
        schedule,
        stages,
        links,
        bound=bound,
        conditions=conditions,
        jitter=jitter,
        fast_forward=False,
        asynchronous=False,
        records=records,
    )
    return PipelineTrace(
        run=run,
        tasks=tuple(
            TaskSpan(
                stage=task.stage,
                task=Task(WORKS[task.code % 3], task.microbatch, task.code // 3),
                start_s=task.begin / NANOSECONDS,
                end_s=task.end / NANOSECONDS,
            )
            for task in records.tasks
        ),
        messages=tuple(
            MessageSpan(
                sender=message.sender,
                receiver=message.receiver,
                is_gradient=message.is_gradient,
                microbatch=message.microbatch,
                start_s=message.begin / NANOSECONDS,
                end_s=message.end / NANOSECONDS,
            )
            for message in records.messages
        ),
    )


def _play(
    schedule: Schedule,
    stages: Sequence[StageTimes | Sequence[StageTimes]],
    links: Sequence[Link],
    *,
    bound: int | None,
    conditions: Conditions,
    jitter: Jitter | None,
    fast_forward: bool,
    asynchronous: bool,
    records: Records | None = None,
    limit_s: float = math.inf,
) -> PipelineRun:
    """Play a mini-batch event by event; see ``simulate_pipeline``."""
    parts = [_parts(stage, schedule.chunks) for stage in stages]
    _check(schedule, parts, links)
    around = _around(links, len(stages))
    durations, transfer, latency = _times(schedule, parts, around, jitter)
    free = conditions is Conditions.RUNTIME and schedule.chunks == 1
    bounds = (bound,) * len(stages) if bound else schedule.max_in_flight
    played = make_stages(schedule.lists, schedule.chunks, schedule.num_microbatches, bounds)
    once = [sum(times[0] for times in stage) for stage in durations]
    play(
        played,
        durations,
        Wires(transfer, latency, _carriers(around)),
        rule.OPPORTUNISTIC if free else rule.STRICT,
        is_asynchronous=asynchronous,
        watched=once.index(max(once)) if fast_forward and not jitter else None,
        records=records,
        deadline=limit_s * NANOSECONDS,
    )
    return PipelineRun(
        finish_s=tuple([stage.finish / NANOSECONDS for stage in played]),
        busy_s=tuple([stage.busy / NANOSECONDS for stage in played]),
        peak_in_flight=tuple([stage.peak for stage in played]),
    )


def _parts(stage: StageTimes | Sequence[StageTimes], chunks: int) -> Sequence[StageTimes]:
    """Return the times of each of a stage's chunks."""
    if not isinstance(stage, StageTimes):
        if len(stage) != chunks:
            raise PlanError(f"a stage of {chunks} chunks needs times for each: got {len(stage)}")
        return stage
    if chunks == 1:
        return (stage,)
    share = replace(
        stage,
        forward_s=stage.forward_s / chunks,
        recompute_s=stage.recompute_s / chunks,
        backward_s=stage.backward_s / chunks,
    )
    return (share,) * chunks


def _around(links: Sequence[Link], depth: int) -> list[Link]:
    """Return also the link from the last stage to the first."""
    slowest = max(links, key=lambda k: k.transfer_s + k.latency_s, default=Link())
    return [*links, *[replace(slowest, vms=None)] * (depth - len(links))]


def _carriers(links: Sequence[Link]) -> list[list[tuple[int, int]]]:
    """Return which carriers each link's messages take: see ``Wires``."""
    nics: dict[tuple[str, int], int] = {}
    carriers = []
    for number, link in enumerate(links):
        ways = []
        for way in range(2):
            if link.vms is None:
                out = into = ("link", 2 * number + way)
            else:
                out, into = ("out", link.vms[way]), ("into", link.vms[1 - way])
            ways.append((nics.setdefault(out, len(nics)), nics.setdefault(into, len(nics))))
        carriers.append(ways)
    return carriers


def busiest_s(links: Sequence[Link]) -> float:
    """Return how long the messages of a micro-batch take the link or NIC with most of them."""
    taken: Counter[int] = Counter()
    for link, ways in zip(links, _carriers(links), strict=True):
        for carrier in itertools.chain(*map(set, ways)):
            taken[carrier] += math.floor(link.transfer_s * NANOSECONDS)
    return max(taken.values(), default=0) / NANOSECONDS


def _packed(lists: Sequence[StageSchedule]) -> Schedule:
    """Return the schedule of expanded lists."""
    runs = [[([3 * t.chunk + NUMBERS[t.work] for t in tasks], 1)] for tasks in lists]
    count = sum(task.work is Work.BACKWARD and not task.chunk for task in lists[0])
    chunks = 1 + max((task.chunk for tasks in lists for task in tasks), default=0)
    return pack(runs, count, chunks)


def _check(
    schedule: Schedule, stages: Sequence[Sequence[StageTimes]], links: Sequence[Link]
) -> None:
    depth = schedule.pipeline_depth
    most = depth if schedule.chunks > 1 else depth - 1
    if len(stages) != depth or not depth - 1 <= len(links) <= most:
        raise PlanError(
            f"lists of {depth} stages need as many stages and {depth - 1} links: got "
            f"{len(stages)} stages and {len(links)} links"
        )
    times = [
        t for parts in stages for s in parts for t in (s.forward_s, s.recompute_s, s.backward_s)
    ]
    times += [t for link in links for t in (link.latency_s, link.transfer_s)]
    # One comparison for all: a time that is not a number fails it too.
    limit_s = MAX_NANOSECONDS / NANOSECONDS / (schedule.num_tasks + depth)
    if not all(0 <= time_s < limit_s for time_s in times):
        raise PlanError(
            f"times must be 0 or more, and less than {limit_s:.3g} s for so many tasks: "
            f"got {next(t for t in times if not 0 <= t < limit_s)} s; take fewer "
            "micro-batches or a shorter time"
        )


def _never_waits(schedule: Schedule) -> bool:
    """Return whether there is one stage, which has only forwards and backwards."""
    return (
        schedule.pipeline_depth == 1
        and schedule.chunks == 1
        and all(rule.RECOMPUTE not in pattern for pattern, _ in schedule.lists[0])
    )


def _run_alone(
    schedule: Schedule, stage: StageTimes, bound: int | None, conditions: Conditions
) -> PipelineRun:
    """Return the run of a single stage, which needs no simulation."""
    once = sum(round(t * NANOSECONDS) for t in (stage.forward_s, stage.backward_s))
    busy_s = schedule.num_microbatches * once / NANOSECONDS
    peak = schedule.max_in_flight[0]
    if bound is not None and conditions is Conditions.RUNTIME:
        peak = min(peak, bound)
    return PipelineRun(finish_s=(busy_s,), busy_s=(busy_s,), peak_in_flight=(peak,))


def _times(
    schedule: Schedule,
    stages: Sequence[Sequence[StageTimes]],
    links: Sequence[Link],
    jitter: Jitter | None,
) -> tuple[Times, Times, Times]:
    """Return durations, transfers and latencies for ``play``."""
    works_s = np.array(
        [
            [[time_s] for s in parts for time_s in (s.forward_s, s.recompute_s, s.backward_s)]
            for parts in stages
        ]
    )
    transfers_s = np.array([[[link.transfer_s]] * 2 for link in links])
    latencies_s = np.array([[[link.latency_s]] * 2 for link in links])
    if jitter is not None:
        count, random = schedule.num_microbatches, np.random.default_rng(jitter.seed)
        spreads = [
            [
                spread
                for s in parts
                for spread in (s.forward_spread, s.recompute_spread, s.backward_spread)
            ]
            for parts in stages
        ]
        works_s = works_s * _factors(spreads, jitter.relative, count, random)
        jitters = [[link.jitter] * 2 for link in links]
        # A message is late as a whole.
        late = _factors(jitters, jitter.relative, count, random)
        transfers_s, latencies_s = transfers_s * late, latencies_s * late
    return _whole(works_s), _whole(transfers_s), _whole(latencies_s)


def _factors(
    spreads: Sequence[Sequence[float]],
    relative: float,
    count: int,
    random: np.random.Generator,
) -> NDArray[np.float64]:
    """Return factors of mean 1 for each of ``count`` micro-batches (log-normal)."""
    variance = np.log1p(np.square(spreads) + relative**2)[..., None]
    drawn = random.standard_normal((*variance.shape[:2], count))
    return np.exp(np.sqrt(variance) * drawn - variance / 2)


def _whole(times_s: NDArray[np.float64]) -> Times:
    """Return seconds in whole nanoseconds."""
    nanoseconds: Times = np.rint(times_s * NANOSECONDS).astype(np.int64).tolist()
    return nanoseconds
