"""Finds stragglers: ranks of a plan that are slower than they should be.

All replicas of a stage run the same computation, so a machine that is slow without
failing shows as an outlier among them (Varuna, section 4.6, "fail-stutter").
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan, segments_of

MARGIN = 0.15
"""An outlier takes that much longer than the median of its peers, or more."""
CALM = 0.2
"""Scatter of the ranks' slowness (standard deviation of its logarithm, their median) up
to which that holds. Among ranks that scatter more, as on machines with other work, an
outlier is one scatter above its peers: a rank like the others is that in 16 % of the
mini-batches. Logarithms, for a rank that runs in bursts must not hide by being very
slow: then its times scatter by more than the others take."""
WINDOW = 30
"""Number of newest mini-batches that are examined."""
OUTLYING = 21
"""Number of them in which a straggler must be an outlier. With noise of 10 % and one
peer, a rank like the others is an outlier in 16 % of the mini-batches, one that is
slower by 30 % in 81 %: almost no windows with the one have so many, 95 % of those with
the other do."""
TRUST = 2.0
"""With one replica only, a rank has no peers that run the same. The profile may then be
wrong about a stage by up to that factor, as the generation's first mini-batches show it:
what becomes slower later is found, and what takes even longer than that at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """Measurements of one rank in one mini-batch."""

    busy_s: float
    """Inside its tasks."""
    expected_s: float
    """Time that they should take by the profile."""
    microbatches: int

    @property
    def ratio(self) -> float:
        """Time taken over time expected."""
        return self.busy_s / self.expected_s

    @property
    def pace_s(self) -> float:
        """Time of one micro-batch."""
        return self.busy_s / self.microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than its peers."""

    rank: int
    slowness: float
    """Median of its time over that of its peers in the newest ``OUTLYING`` mini-batches;
    2: it takes twice as long."""
    outlying: int
    """Mini-batches of the newest ``WINDOW`` in which it was an outlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerWatch:
    """Observations of the ranks of one generation."""

    pipeline_depth: int
    samples: tuple[tuple[RankSample, ...], ...] = ()
    """Of each of the newest mini-batches, oldest first: every rank's."""
    slowness: tuple[tuple[float, ...], ...] = ()
    """Of each of them: every rank's time over that of its peers."""
    usual: tuple[float, ...] = ()
    """With one replica: each rank's slowness at first, from 1 to ``TRUST``."""

    def observe(self, samples: Sequence[RankSample]) -> StragglerWatch:
        """Return the watch after one more mini-batch.

        Args:
            samples: Of every rank, in order; all with micro-batches and times above 0.
        """
        seen = slowness_of([sample.ratio for sample in samples], self.pipeline_depth)
        alone = len(samples) == self.pipeline_depth
        if alone:
            usual = self.usual or (TRUST,) * len(samples)
            seen = tuple(one / was for one, was in zip(seen, usual, strict=True))
        watch = replace(
            self,
            samples=(*self.samples, tuple(samples))[-WINDOW:],
            slowness=(*self.slowness, seen)[-WINDOW:],
        )
        if alone and not self.usual and len(watch.slowness) == WINDOW:
            first = map(statistics.median, zip(*watch.slowness, strict=True))
            usual = tuple(min(max(1.0, TRUST * one), TRUST) for one in first)
            watch = replace(watch, usual=usual)
        return watch

    def stragglers(self) -> tuple[Straggler, ...]:
        """Return the stragglers, the slowest first."""
        if len(self.slowness) < OUTLYING:
            return ()
        columns = tuple(zip(*self.slowness, strict=True))
        margin = MARGIN
        if any(_outlying(column, margin) >= OUTLYING for column in columns):
            scatter = statistics.median(map(_scatter, columns))
            margin = margin if scatter <= CALM else math.expm1(scatter)
        slow = [
            Straggler(
                rank=rank,
                slowness=statistics.median(column[-OUTLYING:]),
                outlying=_outlying(column, margin),
            )
            for rank, column in enumerate(columns)
            if _outlying(column, margin) >= OUTLYING
        ]
        return tuple(sorted(slow, key=lambda straggler: -straggler.slowness))

    def saved_s(self, slow: Collection[Straggler]) -> float:
        """Return the time a mini-batch would save if they were as fast as their peers.

        A replica goes as fast as its slowest stage. Now all wait for the replica that
        finishes last; then virtual nodes would be shared in proportion to the replicas'
        speeds.
        """
        ranks = range(len(self.samples[-1]))
        lately = self.samples[-OUTLYING:]
        paces = [statistics.median(b[rank].pace_s for b in lately) for rank in ranks]
        better = list(paces)
        for straggler in slow:
            better[straggler.rank] /= straggler.slowness
        firsts = self.samples[-1][:: self.pipeline_depth]
        shares = [sample.microbatches for sample in firsts]
        paced = zip(shares, self._bottlenecks(paces), strict=True)
        now_s = max(share * pace_s for share, pace_s in paced)
        rates = [1 / pace_s for pace_s in self._bottlenecks(better)]
        return max(0.0, now_s - sum(shares) / math.fsum(rates))

    def _bottlenecks(self, paces: Sequence[float]) -> list[float]:
        """Return the time of every replica's slowest stage."""
        depth = self.pipeline_depth
        return [max(paces[i : i + depth]) for i in range(0, len(paces), depth)]


def _outlying(column: Sequence[float], margin: float) -> int:
    return sum(slowness > 1 + margin for slowness in column)


def _scatter(column: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm of a rank's slowness, robustly."""
    logs = [math.log(slowness) for slowness in column]
    median = statistics.median(logs)
    return 1.4826 * statistics.median(abs(one - median) for one in logs)


def slowness_of(ratios: Sequence[float], pipeline_depth: int) -> tuple[float, ...]:
    """Return every rank's time over the median of its peers'.

    Peers are the other replicas of its stage. With one replica only, they are all other
    ranks, and errors of the profile show as slowness (``TRUST``). A rank without any
    peer has slowness 1.

    Args:
        ratios: Of every rank, time taken over time expected.
        pipeline_depth: Rank ``d * pipeline_depth + p`` is stage ``p`` of replica ``d``.
    """
    alone = len(ratios) == pipeline_depth
    strides = [slice(p, None, pipeline_depth) for p in range(pipeline_depth)]
    if alone:
        strides = [slice(None)]
    slowness = [1.0] * len(ratios)
    for peers in strides:
        slowness[peers] = _over_others(ratios[peers])
    return tuple(slowness)


def _over_others(values: Sequence[float]) -> list[float]:
    """Return each value over the median of the others; 1 if there is none."""
    if len(values) == 1:
        return [1.0]
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [1.0] * len(values)
    middle, odd = divmod(len(values) - 1, 2)
    for place, i in enumerate(order):
        above = values[order[middle + (place <= middle)]]
        below = above if odd else values[order[middle - 1 + (place < middle)]]
        result[i] = values[i] / ((above + below) / 2)
    return result


def expected_busy_s(
    plan: Plan, profile: Profile, rank: int, microbatches: int, recomputes: int
) -> float:
    """Return the time a rank's tasks of one mini-batch should take by the profile.

    Args:
        plan: Which sections the rank has, and the size of its micro-batches.
        profile: Times of its device.
        rank: In the plan.
        microbatches: Forwards, and backwards.
    """
    stage, size = rank % plan.pipeline_depth, plan.microbatch_size_of(plan.replica_of(rank))
    measured, beside = profile.sections_at(size), profile.overheads_at(size)
    sections = [measured[k] for k in plan.sections_of(stage) if k < len(measured)]
    once_s = math.fsum(one.forward_s + one.backward_s for one in sections)
    again_s = math.fsum(one.recompute_s for one in sections)
    for run in plan.runs_of(stage):
        for segment in segments_of(run, plan.segments)[:-1]:  # within the backward
            inner_s = math.fsum(one.recompute_s for one in measured[segment.start : segment.stop])
            once_s += inner_s + 2 * beside.recompute_s
            again_s -= inner_s
    inner = (stage > 0) + (stage + 1 < plan.pipeline_depth)
    once_s += beside.forward_s + beside.backward_s + inner * beside.posting_s
    busy_s = microbatches * once_s + recomputes * (again_s + beside.recompute_s)
    return busy_s + microbatches * beside.stall_s(busy_s / max(1, microbatches))
