"""Finds out whether mixing GPU types is faster than the best type alone.

The solver of VirtualFlow, section 5.1.2: all workers of a type get equally many
examples, in equal virtual nodes one after the other; the split whose slowest worker is
fastest wins. A worker is a GPU or, where the model does not fit into one, a pipeline of
equal GPUs. ``shares`` answers the narrower question that a plan asks: one micro-batch
size, and all workers are to be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spottrain.morphing.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerType:
    """Workers of one kind, as measured alone (VirtualFlow, section 5.1.1)."""

    name: str
    count: int
    virtual_node_s: Mapping[int, float]
    """Time of a virtual node by its examples: of those sizes only that fit its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeShare:
    """The part of the workers of one type."""

    name: str
    workers: int
    """Number of them that are used."""
    virtual_node_examples: int
    virtual_nodes: int
    """Of each worker, computed one after the other (waves)."""
    compute_s: float
    """Of each worker, for a mini-batch."""

    @property
    def examples(self) -> int:
        """Examples of each worker in a mini-batch."""
        return self.virtual_node_examples * self.virtual_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A mini-batch split over types of workers."""

    step_s: float
    """The slowest worker's compute and the communication."""
    shares: tuple[TypeShare, ...]
    """Of the types that are used, in the order they were given."""

    @property
    def is_mixed(self) -> bool:
        """True if more than one type is used."""
        return len(self.shares) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """The fastest split and those it was compared with."""

    best: Split
    alone: Mapping[str, Split | None]
    """The fastest split for each type alone; ``None`` if no split of it is possible."""


def split_minibatch(
    minibatch_size: int,
    types: Sequence[WorkerType],
    communication_s: Callable[[int], float],
) -> Mixing:
    """Find the split of a mini-batch with the shortest step time.

    All numbers of workers of each type, all sizes of virtual nodes and all numbers of
    waves are considered. Of equally fast splits the one with the fewest workers is
    taken, then the one with the fewest types, so mixing is chosen only where it pays.

    Args:
        minibatch_size: Examples.
        types: Of distinct names.
        communication_s: Time that so many workers need to sum their gradients, as
            measured with a virtual node of one example; not negative.

    Raises:
        PlanError: No split adds up to the mini-batch, or an argument makes no sense.
    """
    _check(minibatch_size, types)
    alone = {t.name: _fastest(minibatch_size, [t], communication_s) for t in types}
    limit_s = min((a.step_s for a in alone.values() if a is not None), default=math.inf)
    best = _fastest(minibatch_size, types, communication_s, limit_s)
    if best is None:
        sizes = {t.name: sorted(t.virtual_node_s) for t in types}
        raise PlanError(
            f"no split over the workers gives {minibatch_size} examples: got virtual "
            f"nodes of {sizes}; measure smaller ones or change minibatch_size"
        )
    return Mixing(best=best, alone=alone)


def _check(minibatch_size: int, types: Sequence[WorkerType]) -> None:
    names = [t.name for t in types]
    if minibatch_size < 1 or not types or len(set(names)) != len(names):
        raise PlanError(
            "a split needs a mini-batch of 1 or more and types of distinct names: got "
            f"{minibatch_size} and {names}"
        )
    for t in types:
        measured = t.virtual_node_s.items()
        if t.count < 0 or not all(b >= 1 and 0 < s < math.inf for b, s in measured):
            raise PlanError(
                "a type needs a count of 0 or more, sizes of 1 or more and times above "
                f"0: got {t}; calibrate again"
            )


_Ways = dict[tuple[int, int], tuple[float, tuple[TypeShare, ...]]]
"""By examples and workers: the slowest worker's compute, and the shares."""
_Options = dict[int, list[TypeShare]]
"""Options of the workers of a type, by the examples of all of them together."""


def _fastest(
    minibatch_size: int,
    types: Sequence[WorkerType],
    communication_s: Callable[[int], float],
    limit_s: float = math.inf,
) -> Split | None:
    """Return the split with the shortest step time among those that take ``limit_s``.

    Go from type to type, keeping the fastest way to each (examples, workers): the slowest
    of two groups of workers is the slower of both groups' slowest, so nothing else of a
    way matters to what follows. What the last type has to add is known.
    """
    *others, last = types
    ways: _Ways = {(0, 0): (0.0, ())}
    for one in others:
        ways = _joined(ways, _options(minibatch_size, one, limit_s), minibatch_size)
    options = _options(minibatch_size, last, limit_s)
    splits = []
    for (examples, _), (compute_s, shares) in ways.items():
        wholes = [shares] if examples == minibatch_size else []
        ends = options.get(minibatch_size - examples, [])
        for whole in [*wholes, *((*shares, end) for end in ends)]:
            slowest_s = max(compute_s, whole[-1].compute_s)
            workers = sum(share.workers for share in whole)
            step_s = slowest_s + communication_s(workers)
            splits.append((step_s, workers, len(whole), whole))
    if not splits:
        return None
    step_s, _, _, whole = min(splits, key=lambda split: split[:3])
    return Split(step_s=step_s, shares=whole)


def _joined(ways: _Ways, options: _Options, most: int) -> _Ways:
    """Return the ways that use a further type or do not."""
    further = dict(ways)
    for (examples, workers), (compute_s, shares) in ways.items():
        for own_examples, own in options.items():
            if examples + own_examples > most:
                continue
            for share in own:
                key = examples + own_examples, workers + share.workers
                way = max(compute_s, share.compute_s), (*shares, share)
                known = further.get(key)
                if known is None or (way[0], len(way[1])) < (known[0], len(known[1])):
                    further[key] = way
    return further


def _options(minibatch_size: int, one: WorkerType, limit_s: float) -> _Options:
    """Return the options of a type's workers within a time, by examples of all of them.

    Of several ways to the same number of examples of a worker the fastest.
    """
    fastest: dict[int, tuple[float, int, int]] = {}
    for size, virtual_node_s in sorted(one.virtual_node_s.items()):
        for waves in range(1, minibatch_size // size + 1):
            way = virtual_node_s * waves, size, waves
            if way[0] > limit_s:
                break
            if way < fastest.get(size * waves, (math.inf,)):
                fastest[size * waves] = way
    options: _Options = {}
    for examples, (compute_s, size, waves) in fastest.items():
        for workers in range(1, min(one.count, minibatch_size // examples) + 1):
            share = TypeShare(
                name=one.name,
                workers=workers,
                virtual_node_examples=size,
                virtual_nodes=waves,
                compute_s=compute_s,
            )
            options.setdefault(workers * examples, []).append(share)
    return options
