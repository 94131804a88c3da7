"""Rebalances a mini-batch over its replicas from the times that they really took.

The controller of "Taming Resource Heterogeneity In Distributed ML Training With Dynamic
Batching" (section III-C) over virtual nodes. A replica that is slower than it was thought
to be, or has become so, gets a smaller share; their sum stays. No morph is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spottrain.morphing.adapt.shares import share_virtual_nodes
from spottrain.morphing.errors import PlanError

DEAD_BAND = 0.05
"""Minimum share of the slowest replica's time that a change must save."""
SMOOTHING = 0.1
"""Weight of the newest time in the moving average."""
MIN_OBSERVATIONS = 3
"""Minimum number of mini-batches before a change: fewer do not show the noise."""
PRECISION = 0.5
"""Standard error of a time that is good enough for a change, in dead-bands; where noise is
greater, a change waits until its average spans ``1 / SMOOTHING`` mini-batches."""
NOISE_BAND = 4.0
"""Standard errors by which the dead-band is widened: chance exceeds them once in some ten
thousand mini-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareBalancer:
    """State of the controller of one generation; ``observe`` returns the next state.

    Make one with ``start``. The fields from ``observations`` on are its history.
    """

    shares: tuple[int, ...]
    """Virtual nodes of each replica, to be used from the next mini-batch on."""
    limits: tuple[int, ...]
    """Upper limit of each: what fits in memory, or what was seen to slow it down."""
    observations: int = 0
    """Since the last change."""
    smoothed_s: tuple[float, ...] = ()
    """Moving average of each replica's time since the last change: the geometric one, to
    which a time ten times as long as ever counts no more than the factor 1.3."""
    latest_s: tuple[float, ...] = ()
    noise: float = 0.0
    """Moving average of the variance of a relative time, from one to the next."""
    noise_observations: int = 0
    shares_before: tuple[int, ...] = ()
    """Before the last change; so is the next field."""
    throughput_before: tuple[float, ...] = ()
    """Virtual nodes per second of each replica."""

    @property
    def replica_bounds(self) -> tuple[int, ...]:
        """The shares as in ``Plan.replica_bounds``."""
        return tuple(itertools.accumulate(self.shares, initial=0))

    def observe(self, times_s: Sequence[float]) -> ShareBalancer:
        """Return the state after a mini-batch computed with the present shares.

        Args:
            times_s: From its beginning until each replica had done its last backward:
                without waiting for other replicas, reductions or the optimizer.

        Returns:
            The next controller. Its ``shares`` differ only where a change is expected
            to save more than the dead-band, and more than noise can explain.

        Raises:
            PlanError: As many times are needed as replicas, finite and above 0.
        """
        if len(times_s) != len(self.shares) or not all(0 < time_s < math.inf for time_s in times_s):
            raise PlanError(
                f"{len(self.shares)} replicas need as many times above 0: got {list(times_s)}"
            )
        seen = _with_bounds_learned(_smoothed(self, tuple(times_s)))
        if len(self.shares) == 1 or not _is_settled(seen):
            return seen
        proposal = _proposal(seen)
        now_s = max(seen.smoothed_s)
        rated = zip(proposal, _throughput(seen), strict=True)
        then_s = max(share / rate for share, rate in rated)
        if 1 - then_s / now_s <= DEAD_BAND + NOISE_BAND * _standard_error(seen):
            return seen
        return replace(
            seen,
            shares=proposal,
            observations=0,
            smoothed_s=(),
            latest_s=(),
            shares_before=seen.shares,
            throughput_before=_throughput(seen),
        )


def start(
    shares: Sequence[int],
    *,
    limits: Sequence[int] | None = None,
) -> ShareBalancer:
    """Return the controller of a generation that begins.

    Args:
        shares: Virtual nodes of each replica.
        limits: The most that each can hold; any number if not given.

    Raises:
        PlanError: A share is below 1 or above the most.
    """
    limits = [sum(shares)] * len(shares) if limits is None else limits
    if not len(shares) == len(limits) >= 1 or not all(
        1 <= b <= top for b, top in zip(shares, limits, strict=True)
    ):
        raise PlanError(
            f"shares must be 1 up to their limits: got {list(shares)} and {list(limits)}"
        )
    return ShareBalancer(shares=tuple(shares), limits=tuple(limits))


def _smoothed(old: ShareBalancer, times_s: tuple[float, ...]) -> ShareBalancer:
    """Return ``old`` with updated moving averages.

    They are plain means as long as that weighs the newest more than ``SMOOTHING``.
    """
    count = old.observations + 1
    noise, noise_count = old.noise, old.noise_observations
    if old.latest_s:
        noise_count += 1
        weight = max(1 / noise_count, SMOOTHING)
        noise += weight * (_variance(old.latest_s, times_s) - noise)
    weight = max(1 / count, SMOOTHING)
    before = old.smoothed_s or times_s
    return replace(
        old,
        observations=count,
        smoothed_s=tuple(s * (t / s) ** weight for s, t in zip(before, times_s, strict=True)),
        latest_s=times_s,
        noise=noise,
        noise_observations=noise_count,
    )


def _variance(earlier_s: Sequence[float], later_s: Sequence[float]) -> float:
    """Return the variance of relative times, from two mini-batches.

    What slows all replicas equally is not noise here: it moves no share. A lasting
    change counts once only, since each time is compared with the one before.
    """
    steps = [math.log(b / a) for a, b in zip(earlier_s, later_s, strict=True)]
    mean = math.fsum(steps) / len(steps)
    freedom = max(len(steps) - 1, 1)
    return math.fsum((step - mean) ** 2 for step in steps) / 2 / freedom


def _standard_error(seen: ShareBalancer) -> float:
    """Return that of a smoothed time, as a share of it.

    The mean of n has a variance of 1/n of the single one's, a moving average that gives
    the newest the weight w one of w / (2 - w).
    """
    return math.sqrt(seen.noise * max(1 / seen.observations, SMOOTHING / (2 - SMOOTHING)))


def _is_settled(seen: ShareBalancer) -> bool:
    """Return whether the average is precise enough, or will not get more precise."""
    precise = _standard_error(seen) <= PRECISION * DEAD_BAND
    settled = precise or seen.observations * SMOOTHING >= 1
    return settled and seen.observations >= MIN_OBSERVATIONS


def _throughput(seen: ShareBalancer) -> tuple[float, ...]:
    return tuple(b / t for b, t in zip(seen.shares, seen.smoothed_s, strict=True))


def _with_bounds_learned(seen: ShareBalancer) -> ShareBalancer:
    """Limit a replica that got more and became slower: it does not get that much again.

    A replica that becomes slower later than ``1 / SMOOTHING`` mini-batches after the
    change has another reason. A limit is left out if the mini-batch would no longer fit
    under all of them.
    """
    last = max(MIN_OBSERVATIONS, 1 / SMOOTHING)
    first = MIN_OBSERVATIONS <= seen.observations <= last
    if not seen.shares_before or not first:
        return seen
    slack = DEAD_BAND + NOISE_BAND * _standard_error(seen)
    limits = list(seen.limits)
    for k, rate in enumerate(_throughput(seen)):
        earlier = seen.shares_before[k]
        dropped = rate < seen.throughput_before[k] * (1 - slack)
        room = sum(limits) - limits[k] + earlier
        if seen.shares[k] > earlier and dropped and room >= sum(seen.shares):
            limits[k] = min(limits[k], earlier)
    return replace(seen, limits=tuple(limits))


def _proposal(seen: ShareBalancer) -> tuple[int, ...]:
    """Return the proportional rule's shares, in whole virtual nodes (eqs. 4 and 5).

    b_k: share. t_k: its smoothed time. X_k: throughput. tau_k: error against the mean.
    The rule alone keeps the sum only nearly, and gives no whole numbers: of all shares
    with the right sum and within the limits those are taken that exceed what it asks
    for by the smallest factor.
    """
    t = seen.smoothed_s
    mean_t = math.fsum(t) / len(t)
    X = _throughput(seen)  # noqa: N806 (the paper's)
    tau = [t_k - mean_t for t_k in t]
    terms = zip(seen.shares, X, tau, strict=True)
    wanted = [b_k - X_k * tau_k for b_k, X_k, tau_k in terms]
    costs = [1 / b_k for b_k in wanted]
    bounds = share_virtual_nodes(sum(seen.shares), costs, seen.limits)
    return tuple(b - a for a, b in itertools.pairwise(bounds))
