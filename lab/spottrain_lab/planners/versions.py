"""Which version of the weights each task of an asynchronous pipeline uses.

PipeDream and PipeDream-2BW run 1F1B without ever draining the pipeline, so that weights
change while micro-batches are in flight (Narayanan's dissertation, 2.3.3 and 3.2.1). Both
are shown and simulated; what a job with ``semantics: stale_by_one`` does is the second one.

- ``pipedream``: every micro-batch is a mini-batch of its own, followed by an update.
  Weight stashing: forward and backward of a micro-batch on one stage use the newest
  version that the forward found there, ``max(k - (P - p), 0)`` of input k (from 1) on
  stage p (from 0) of P. Vertical sync: all stages use that of stage 0.
- ``2bw``: gradients of a mini-batch of m micro-batches make one update, and inputs use the
  version before the newest: ``max(floor((k - 1) / m) - 1, 0)``, the same on all stages. So
  two versions are enough, which takes m >= P.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.lists import compact_schedule
from spottrain.morphing.schedules.schedule import StageSchedule, Work, expand

StaleKind: TypeAlias = Literal["pipedream", "2bw"]
STALE_KINDS: tuple[StaleKind, ...] = ("pipedream", "2bw")


class StaleSchedule(NamedTuple):
    """The lists of an asynchronous pipeline, and the versions that their tasks use."""

    lists: tuple[StageSchedule, ...]
    versions: tuple[tuple[int, ...], ...]
    """Of each stage, by micro-batch: how many updates the weights contain."""
    microbatches_per_update: int

    def format(self) -> list[str]:
        """Return every stage's list as text: ``F4@1`` is a forward with version 1."""
        return [
            " ".join(f"{task}@{versions[task.microbatch]}" for task in tasks)
            for tasks, versions in zip(self.lists, self.versions, strict=True)
        ]

    def max_versions(self) -> list[int]:
        """Return how many versions of its weights each stage has to hold at once.

        The newest is one of them. An update follows the last backward of its inputs.
        """
        most = []
        for tasks, versions in zip(self.lists, self.versions, strict=True):
            peak, backwards = 1, 0
            in_flight: list[int] = []
            for task in tasks:
                if task.work is Work.FORWARD:
                    in_flight.append(versions[task.microbatch])
                newest = backwards // self.microbatches_per_update
                # Inputs that come next use a version that may be older than the newest.
                following = versions[min(len(in_flight) + backwards, len(versions) - 1)]
                held = {*in_flight, newest, min(following, newest)}
                peak = max(peak, len(held))
                if task.work is Work.BACKWARD:
                    in_flight.pop(0)
                    backwards += 1
            most.append(peak)
        return most


def stale_schedule(
    kind: StaleKind,
    pipeline_depth: int,
    num_microbatches: int,
    *,
    minibatches: int = 1,
    recompute: bool = False,
    vertical_sync: bool = False,
) -> StaleSchedule:
    """Return the lists and versions of a pipeline that is not drained.

    Args:
        kind: See the module.
        pipeline_depth: Stages, at least 1.
        num_microbatches: Micro-batches of a mini-batch. Of PipeDream: inputs in all, for
            each is a mini-batch.
        minibatches: Number of them; only of 2BW.
        recompute: Whether all stages but the last compute their forward again.
        vertical_sync: Of PipeDream: all stages use one version for an input.

    Raises:
        PlanError: There is no stage or no micro-batch, 2BW has fewer micro-batches than
            stages, or an option does not fit the kind.
    """
    if kind == "2bw" and num_microbatches < pipeline_depth:
        raise PlanError(
            "2bw needs as many micro-batches in a mini-batch as there are stages: got "
            f"{num_microbatches} for {pipeline_depth}; take at least {pipeline_depth}"
        )
    if kind == "2bw" and vertical_sync:
        raise PlanError(
            "vertical sync is an option of pipedream: got 2bw, whose stages always use "
            "the same version; leave it out"
        )
    if minibatches < 1 or (kind == "pipedream" and minibatches != 1):
        raise PlanError(
            f"{kind} has {'at least ' if kind == '2bw' else ''}1 mini-batch of the given "
            f"micro-batches: got {minibatches}; change it"
        )
    count = num_microbatches * minibatches
    lists = expand(compact_schedule("1f1b", pipeline_depth, count, recompute=recompute))
    version: Callable[[int, int], int]
    if kind == "2bw":

        def version(stage: int, k: int) -> int:
            return max((k - 1) // num_microbatches - 1, 0)

    else:

        def version(stage: int, k: int) -> int:
            behind = pipeline_depth if vertical_sync else pipeline_depth - stage
            return max(k - behind, 0)

    versions = tuple(
        tuple(version(stage, k) for k in range(1, count + 1)) for stage in range(pipeline_depth)
    )
    return StaleSchedule(lists, versions, num_microbatches if kind == "2bw" else 1)
