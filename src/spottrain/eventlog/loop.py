"""What decides, in real time: one queue, one journal.

    queue of events -> step -> journal (durable) -> commands performed -> events ...

All events that wait are decided on together and journalled, with the decisions, in one
transaction. Only then are their senders answered and their commands performed: what was
acknowledged is never lost, and nothing is done that nobody would know of.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Generic

from spottrain.eventlog.journal import C, E, Journal, JournalWriteError, S, Step

logger = logging.getLogger(__name__)

JOURNAL_WAIT_S = 60.0
"""How long the journal may fail to be written."""
RETRY_S = 0.5
"""Between two attempts to write it."""
SNAPSHOT_EVENTS = 1000
"""Events between two snapshots: what readers fold in a twentieth of a second."""


class Loop(ABC, Generic[S, E, C]):
    """Takes events in, one after the other; a class of it says how commands are performed.

    Made and used within one event loop of asyncio.

    Args:
        journal: Open for writing.
        state: Where its events have led.
    """

    def __init__(self, journal: Journal[S, E, C], state: S) -> None:
        self._journal = journal
        self.state = state
        """The state after the last event that is journalled."""
        self._ahead = state
        """The state after the last event that was taken."""
        self._seq = self._snapshot_seq = 0
        self._items = asyncio.Queue[tuple[Any, asyncio.Future[Sequence[C]]]]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[Any] | None = None

    # --- What a class of it says ----------------------------------------------------------

    @abstractmethod
    def _perform(self, command: C) -> None:
        """Begin to perform a command; what comes of it returns as an event."""

    def _events_of(self, item: Any) -> Iterable[E]:
        """Return the events of an item of the queue, each made on the state before it."""
        return (item,)

    def _note(self, step: Step[S, E, C]) -> None:
        """Take note of what was decided, before it is journalled."""

    def _needs_writing(self, steps: Sequence[Step[S, E, C]]) -> bool:
        """Return whether something is to be written now."""
        return bool(steps)

    def _append(self, steps: Sequence[Step[S, E, C]]) -> None:
        """Write what was decided.

        Raises:
            JournalError: It was not.
        """
        if steps:
            self._seq = self._journal.append(*steps)

    def _taken(self, steps: Sequence[Step[S, E, C]]) -> None:
        """Do what is to be done once everything is journalled, before anybody is answered."""

    def _for_readers(self) -> str:
        """Return what a snapshot holds beside the state."""
        return ""

    # --- Events in ------------------------------------------------------------------------

    def feed(self, event: E) -> asyncio.Future[Sequence[C]]:
        """Queue an event; the future has its commands once it is journalled."""
        return self._put(event)

    def _put(self, item: Any) -> asyncio.Future[Sequence[C]]:
        """Queue an item; the future is done once it was taken, and its events journalled."""
        taken = asyncio.get_running_loop().create_future()
        self._items.put_nowait((item, taken))
        return taken

    async def take_events(self) -> Any:
        """Take events until ``_end`` is called, and return what it was given.

        Raises:
            JournalError: The journal cannot be written any more.
            Exception: What ended a task that was begun with ``_start``.
        """
        self._over = asyncio.get_running_loop().create_future()
        self._start(self._take_all(self._over))
        try:
            return await self._over
        finally:
            await self._close()

    def _end(self, outcome: object) -> None:
        """Take no more events."""
        if self._over is not None and not self._over.done():
            self._over.set_result(outcome)

    async def _close(self) -> None:
        """End everything that still runs here."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_all(self, over: asyncio.Future[Any]) -> None:
        while not over.done():
            waiting = [await self._items.get()]
            while not self._items.empty():
                waiting.append(self._items.get_nowait())
            for command in await self._take(waiting):
                if not over.done():
                    self._perform(command)

    async def _take(
        self, waiting: Sequence[tuple[Any, asyncio.Future[Sequence[C]]]]
    ) -> Sequence[C]:
        """Decide on what waits, journal it and answer; return the commands that follow."""
        steps, commands = list[Step[S, E, C]](), list[Sequence[C]]()
        for item, _ in waiting:
            first = len(steps)
            for event in self._events_of(item):
                before = self._ahead
                self._ahead, asked = self._journal.step(before, event)
                steps.append(Step(before, event, self._ahead, tuple(asked)))
                self._note(steps[-1])
            commands.append([one for step in steps[first:] for one in step.commands])
        if self._needs_writing(steps):
            await self._write(steps)
        self.state = self._ahead
        if self._seq - self._snapshot_seq >= SNAPSHOT_EVENTS:
            self._save_snapshot()
        self._taken(steps)
        for (_, taken), asked in zip(waiting, commands, strict=True):
            if not taken.done():  # its sender may have disconnected
                taken.set_result(asked)
        return [one for asked in commands for one in asked]

    async def _write(self, steps: Sequence[Step[S, E, C]]) -> None:
        """Write what was decided; try again for a while if the disk is full.

        Nothing else is taken meanwhile: what is decided next depends on it.

        Raises:
            JournalError: It cannot be written any more.
        """
        give_up_at_s = time.monotonic() + JOURNAL_WAIT_S
        while True:
            try:
                self._append(steps)
                return
            except JournalWriteError as error:
                if time.monotonic() >= give_up_at_s:
                    raise
                logger.warning("%s; trying again", error)
            await asyncio.sleep(RETRY_S)

    def _save_snapshot(self) -> None:
        """Spare readers, and who goes on from here, what is journalled by now."""
        self._snapshot_seq = self._seq
        try:
            self._journal.save_snapshot(self._seq, self.state, self._for_readers())
        except JournalWriteError as error:
            logger.warning("%s; readers fold more of the journal", error)

    # --- What runs beside -----------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` concurrently, no longer than events are taken; an exception in it
        ends the loop."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._over is not None and not self._over.done():
            self._over.set_exception(error)
