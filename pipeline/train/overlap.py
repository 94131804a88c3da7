"""Mini-batches beside the commits of those before them (PipeDream-2BW).

The gradient of mini-batch t is taken at W(t - 1), which mini-batch t - 2 leads to. So once
that one is applied, t may begin: its forwards fill the pipeline while t - 1 drains. And
while t is computed, a thread commits t - 1: sums, gather, decision, update, and whatever
follows a commit. Commits keep their order, and each is what it is without overlap; what is
computed ahead of them is lost with the generation, and never in committed memory before
the mini-batch before it is applied there.

Whether t begins beside t - 1 is decided by the commit of t - 2, so that all ranks decide
alike. A stop comes after one mini-batch more than the one it was agreed on with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass

from spottrain.pipeline.base.fixed_point import MAX_ATTEMPTS
from spottrain.pipeline.comm.groups import Connections
from spottrain.pipeline.comm.p2p import PipelineLinks
from spottrain.pipeline.state.context import StopRequest, WorkerContext
from spottrain.pipeline.train.executor import Minibatch
from spottrain.pipeline.train.lanes import Computed, Lanes


@dataclass(frozen=True, slots=True)
class Committed:
    """How the commit of a mini-batch has ended, the same at all ranks."""

    stop: int = StopRequest.NONE
    """The strongest stop request."""
    in_range: bool = True
    """False: gradients were out of range, and the mini-batch is to be computed again."""
    drains: bool = False
    """The pipeline must be empty before anything else is begun."""

    @property
    def goes_on(self) -> bool:
        """True if another mini-batch may begin before the next commit."""
        return self.in_range and not self.drains and self.stop == StopRequest.NONE


class Overlap:
    """Stretches of mini-batches, from an empty pipeline to an empty one.

    Args:
        context: The worker's.
        lanes: What computes.
        links: To the neighbours.
        connections: Of the generation, cut where a commit fails.
        commit: Commits what was computed.
        keep: Begins the checkpoints and copies that are due after a commit.
        drains: Returns whether the pipeline must be empty before a mini-batch.
        shown: Returns the context in which a thread that commits, or waits for a commit,
            lets that be seen as what the worker does.
    """

    def __init__(
        self,
        context: WorkerContext,
        lanes: Lanes,
        links: PipelineLinks,
        connections: Connections,
        commit: Callable[[Computed], Committed],
        keep: Callable[[], None],
        drains: Callable[[int], bool],
        shown: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._context, self._lanes, self._links = context, lanes, links
        self._connections = connections
        self._commit, self._keep, self._drains = commit, keep, drains
        self._shown = shown
        self._thread = ThreadPoolExecutor(1, "commit")
        self._under_way: Future[Committed] | None = None
        self._failures: list[BaseException] = []
        """The first one is the reason."""

    def run(self, step: int, overlaps: bool) -> int:
        """Train from mini-batch ``step`` on, up to where the pipeline must be empty.

        All is committed then; what follows the last commit is left to the caller.

        Args:
            step: The first one.
            overlaps: Whether there may be more of them.

        Returns:
            The strongest stop request.
        """
        self._under_way = None
        try:
            return self._run(step, overlaps)
        except BaseException as error:
            self._fail(error)
            if self._under_way is not None:
                wait([self._under_way])
            if self._failures[0] is error:
                raise
            raise self._failures[0] from None

    def close(self) -> None:
        """End the thread; after an error the connections must have been cut."""
        self._thread.shutdown()

    def _run(self, step: int, overlaps: bool) -> int:
        began_s = time.monotonic()
        current = self._lanes.open(step)
        while True:
            self._context.faults.step = step
            follows = overlaps and not self._drains(step + 1)
            after = step + 1

            def follow(after: int = after, follows: bool = follows) -> Minibatch | None:
                return self._lanes.open(after) if follows and self._goes_on() else None

            computed = self._lanes.finish(step, current, began_s, follow)
            began_s = time.monotonic()
            self._context.batches.adapt(computed.tasks_s)
            before = self._finished()
            if not before.in_range:
                return self._again(step - 1)
            if not (follows and before.goes_on):
                with self._shown():
                    committed = self._commit(computed)
                if not committed.in_range:
                    return self._again(step)
                return max(before.stop, committed.stop)
            # Opened before the commit begins: it starts from what is committed now.
            current = current.following or self._lanes.open(after)
            self._under_way = self._thread.submit(self._behind, computed)
            step = after

    def _goes_on(self) -> bool:
        """Return whether the commit under way has ended and lets a mini-batch begin."""
        if self._under_way is None:
            return True
        return self._under_way.done() and self._under_way.result().goes_on

    def _finished(self) -> Committed:
        """Return how the commit under way ends, if there is one."""
        if self._under_way is None:
            return Committed()
        with self._shown():
            return self._under_way.result()

    def _again(self, step: int) -> int:
        """Compute a mini-batch again that was out of range; return as ``run``.

        What was computed of the one after it is dropped.
        """
        self._context.faults.step = step
        for attempt in range(1, MAX_ATTEMPTS):
            began_s = time.monotonic()
            minibatch = self._lanes.open(step, attempt)
            computed = self._lanes.finish(step, minibatch, began_s)
            with self._shown():
                committed = self._commit(computed)
            if committed.in_range:
                return committed.stop
        raise AssertionError("the last attempt takes any finite gradient")

    def _behind(self, computed: Computed) -> Committed:
        """Commit in the thread of commits."""
        try:
            with self._context.device.beside():
                committed = self._commit(computed)
                if committed.in_range:
                    self._keep()
            return committed
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._links.wake()

    def _fail(self, error: BaseException) -> None:
        """Note an error, and have the other thread meet one as well."""
        self._failures.append(error)
        self._connections.cut()
