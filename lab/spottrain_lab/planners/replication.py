"""PipeDream's partitioning: stages of different numbers of replicas.

The dynamic program of Narayanan's dissertation (2.3.1), over a flat network. Its plans are
reported and not run: spottrain replicates every stage equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite

import numpy as np

from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.partition import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer, for one micro-batch."""

    name: str
    time_s: float
    """Forward and backward."""
    output_bytes: int
    """That travel to the next layer; the gradient comes back as large."""
    parameter_bytes: int
    state_bytes: int = 0
    """That each replica holds, where memory is limited."""


class SyncCost(StrEnum):
    """Bytes that m replicas of w bytes of weights send and receive before each update."""

    RING = "ring"
    """Of a ring all-reduce: 2 (m - 1) / m * w."""
    PRINTED = "printed"
    """As the dissertation's recurrence has it: 2 (m - 1) * w, through one link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedPlan:
    """Stages, each with its own number of replicas."""

    bounds: tuple[int, ...]
    """Stage p holds the layers from ``bounds[p]`` up to ``bounds[p + 1]``."""
    replicas: tuple[int, ...]
    microbatch_s: float
    """Time between two micro-batches once the pipeline is full: the slowest stage's."""

    @property
    def configuration(self) -> str:
        """As the dissertation writes it: ``15-1``, and ``16`` for data parallelism."""
        return "-".join(map(str, self.replicas))


def replicate(
    layers: Sequence[Layer],
    workers: int,
    bytes_per_s: float,
    *,
    sync: SyncCost = SyncCost.RING,
    inputs_per_update: int | None = None,
    memory_bytes: float = inf,
    even: bool = False,
) -> ReplicatedPlan:
    """Return the fastest partition of a chain of layers over equal workers.

    A stage of m replicas takes the longer of its computing over m and its share of the
    weights' sums, which overlap; two stages wait for the activation between them and its
    gradient. Equally fast: the plan with the fewer stages.

    Args:
        layers: The chain.
        workers: All of which are used.
        bytes_per_s: Of every worker's link.
        sync: What a sum of gradients sends.
        inputs_per_update: Micro-batches of all replicas between two updates; not given:
            one for each replica, as in PipeDream.
        memory_bytes: Of a worker, for the state of its layers.
        even: Give every stage equally many replicas.

    Raises:
        PlanError: There is no layer or worker, a number is negative or not finite, or no
            partition fits.
    """
    numbers = [bytes_per_s]
    for layer in layers:
        numbers += (layer.time_s, layer.output_bytes, layer.parameter_bytes)
    valid = all(isfinite(number) and number >= 0 for number in numbers)
    if not layers or workers < 1 or bytes_per_s <= 0 or not valid:
        raise PlanError(
            "partitioning needs layers, workers and a bandwidth above 0, all numbers "
            f"finite and not negative: got {len(layers)} layers, {workers} workers and "
            f"{bytes_per_s:g} bytes/s; correct them"
        )
    times = np.cumsum([0.0, *(layer.time_s for layer in layers)])
    weights_s = np.cumsum([0.0, *(layer.parameter_bytes for layer in layers)]) / bytes_per_s
    between_s = 2 * np.array([layer.output_bytes for layer in layers]) / bytes_per_s
    # Times may be 0; a share of the memory is compared with 1.
    shares = np.cumsum([0.0, *(layer.state_bytes for layer in layers)]) / memory_bytes
    replicas = np.arange(1, workers + 1, dtype=np.float64)
    sums = 2 * (replicas - 1) / (replicas if sync is SyncCost.RING else 1.0)
    sums /= replicas if inputs_per_update is None else float(inputs_per_update)
    counts = [k for k in range(1, workers + 1) if not even or workers % k == 0]
    best: ReplicatedPlan | None = None
    for allowed in [[k] for k in counts] if even else [counts]:
        microbatch_s, found = _replicate(times, weights_s, between_s, shares, sums, allowed)
        if microbatch_s < (inf if best is None else best.microbatch_s):
            best = ReplicatedPlan(
                bounds=(0, *(stop for stop, _ in found)),
                replicas=tuple(count for _, count in found),
                microbatch_s=microbatch_s,
            )
    if best is None:
        raise PlanError(
            f"{workers} workers cannot share {len(layers)} layers in the memory that "
            "they have; take other numbers"
        )
    return best


def _replicate(
    times: Costs,
    weights_s: Costs,
    between_s: Costs,
    shares: Costs,
    sums: Costs,
    allowed: Sequence[int],
) -> tuple[float, list[tuple[int, int]]]:
    """Fill the table of best pipelines over the first layers with so many workers.

    Args:
        times: Running sums of layers' times.
        weights_s: Running sums of weights over the bandwidth.
        between_s: Of each layer, its output and the gradient over the bandwidth.
        shares: Running sums of state over the memory.
        sums: By replicas less one, how often the weights are sent for a micro-batch.
        allowed: Numbers of replicas that a stage may have.

    Returns:
        Time of a micro-batch, infinite if there is no plan; by stage its end and replicas.
    """
    count, workers = len(times) - 1, len(sums)
    best = np.full((count + 1, workers + 1), np.inf)
    came = np.zeros((count + 1, workers + 1, 2), np.int64)
    stages = np.zeros((count + 1, workers + 1), np.int64)
    best[0, 0] = 0.0
    between_s = np.concatenate([[0.0], between_s])
    for stop in range(1, count + 1):
        compute_s = times[stop] - times[:stop]
        sync_s = weights_s[stop] - weights_s[:stop]
        too_large = shares[stop] - shares[:stop] > 1.0
        for used in range(1, workers + 1):
            for replicas in allowed:
                before = used - replicas
                if before < 0:
                    continue
                stage_s = np.maximum(compute_s / replicas, sync_s * sums[replicas - 1])
                waits_s = np.maximum(best[:stop, before], between_s[:stop])
                time_s = np.where(too_large, np.inf, np.maximum(stage_s, waits_s))
                number = stages[:stop, before] + 1
                start = np.lexsort((number, time_s))[0]
                found = time_s[start], number[start]
                if found < (best[stop, used], stages[stop, used]):
                    best[stop, used], stages[stop, used] = found
                    came[stop, used] = start, replicas
    plan: list[tuple[int, int]] = []
    stop, used = count, workers
    while stop and best[count, workers] < np.inf:
        start, replicas = came[stop, used].tolist()
        plan.append((stop, replicas))
        stop, used = start, used - replicas
    return float(best[count, workers]), plan[::-1]
