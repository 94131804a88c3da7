"""Copies of the state of all sections at one mini-batch, kept on other VMs.

With one replica, a stage's state is lost with its VM. Where a plan asks for copies, every
rank copies its sections at a due mini-batch within its VM's memory, which holds training
up, and sends them beside training to the rank that keeps them (``Plan.copy_holders``). A
rank keeps its own copy too: if another one goes back, so must it (``agreement``). The gather
that ends each later mini-batch shows how far all ranks are.

Every copy has two rooms, so that a state stays whole until a newer one is. What is sent goes
in pieces, each announced by a number, as it shares connections with activations, and the
end of a generation does not wait for all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from spottrain.morphing.adapt.checkpointing import CheckpointInterval
from spottrain.pipeline.comm.collectives import COPY_TAG
from spottrain.pipeline.comm.groups import world
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.context import WorkerContext
from spottrain.pipeline.state.slot import COPY_ROOMS
from spottrain.pipeline.state.staging import copy_section
from spottrain.wire.messages import RunGeneration

PIECE_BYTES = 1 << 20
"""An activation waits for at most one piece: 8 ms at 1 Gbit/s."""
CHEAP_SHARE = 0.01
"""Share of training time that copies may take: less than predictions are precise to."""
MIN_COST_S = 0.01
"""Least cost of copies, assumed until it was measured: less cannot be told from noise."""
NOT_SETTLED = -1
_END, _MORE = 0, 1
"""What announces the end of a sender before its time, or a piece."""


class PeerCopies:
    """The copies of one generation, one mini-batch at a time, as one rank sees them.

    Every method but ``settled_step`` is called by all ranks at the same point. Without
    holders in the plan, all of them do nothing.

    Args:
        context: The worker's.
        command: The generation's.
        rank: Of this worker.
        arenas: Its sections.
    """

    def __init__(
        self,
        context: WorkerContext,
        command: RunGeneration,
        rank: int,
        arenas: Mapping[int, SectionArena],
    ) -> None:
        plan = command.plan
        holders = plan.copy_holders
        self._memory, self._activity = context.memory, context.activity
        self._arenas = arenas
        self._holder = holders[rank] if holders else None
        self._held = {
            source: plan.sections_of(source)
            for source, holder in enumerate(holders)
            if holder == rank
        }
        copies = self._memory.copies.values()
        self._whole = max((c.content for c in copies if c.version >= 0), default=None)
        """State whose copies are not overwritten: handovers leave one at most."""
        self._state = self._whole
        """That of the newest copies begun."""
        if self._holder is not None:
            self._memory.hold_copies(self._sections)
        self._pending: int | None = None
        self._begun = max((arena.version for arena in arenas.values()), default=0)
        self._threads: list[Future[bool]] = []
        self._pool = ThreadPoolExecutor(2, "copy")
        self._stopping = threading.Event()
        self.copied_step: int | None = None
        """The newest mini-batch of which another VM has all sections."""
        self._interval = CheckpointInterval(
            command.copy_losses_per_s,
            plan.predicted_step_s,
            MIN_COST_S,
            min_cost_s=MIN_COST_S,
            cheap_share=CHEAP_SHARE,
        )

    @property
    def _sections(self) -> set[int]:
        """Those of which this rank keeps copies."""
        return set(self._arenas).union(*self._held.values())

    def is_due(self, step: int) -> bool:
        """Return whether copies are to be made after ``step`` mini-batches."""
        ready = self._holder is not None and self._pending is None
        return ready and step - self._begun >= self._interval.every_steps

    def observe(self, step_s: float) -> None:
        """Take the time of a mini-batch."""
        self._interval.observe(step_s, saving=self._pending is not None)

    def start(self, step: int) -> None:
        """Copy this rank's sections, and begin to send and receive."""
        if self._holder is None or self._pending is not None:
            return
        began_s = time.monotonic()
        own = [self._free_room(section) for section in self._arenas]
        for arena, copy in zip(self._arenas.values(), own, strict=True):
            copy_section(arena, copy)
        state = self._state = own[0].content
        held = {
            source: [self._free_room(section) for section in sections]
            for source, sections in self._held.items()
        }
        self._pending = self._begun = step
        self._threads = [
            self._pool.submit(self._send, self._holder, own),
            self._pool.submit(self._receive, held, state),
        ]
        self._interval.begin(time.monotonic() - began_s)

    def _free_room(self, section: int) -> SectionArena:
        """Return where no copy of the whole state is, unless both rooms have one."""
        rooms = [self._memory.copies[section, room] for room in COPY_ROOMS]
        return next((copy for copy in rooms if copy.content != self._whole), rooms[0])

    def settled_step(self) -> int:
        """Return the step of the copies under way if this rank has sent and received."""
        if self._pending is None or not all(one.done() for one in self._threads):
            return NOT_SETTLED
        whole = all(one.result() for one in self._threads)
        return self._pending if whole else NOT_SETTLED

    def settle(self, common_step: int) -> None:
        """Replace the copies before if all ranks have settled the newest ones.

        Args:
            common_step: The minimum ``settled_step`` of all ranks, as gathered.
        """
        if self._pending is None or common_step != self._pending:
            return
        self.copied_step, self._pending = self._pending, None
        self._whole, sections = self._state, self._sections
        self._memory.keep_copies(lambda copy: copy.section in sections)

    def stop(self) -> None:
        """End what is under way, with all other ranks."""
        self._stopping.set()
        with self._activity.waiting():
            for one in self._threads:
                one.result()

    def close(self) -> None:
        """End the threads; after an error the connections must have been cut."""
        self._pool.shutdown()

    def _send(self, holder: int, copies: Sequence[SectionArena]) -> bool:
        """Send to the rank that keeps the copies; return whether all were sent."""
        for piece in (piece for copy in copies for piece in _pieces(copy)):
            stops = self._stopping.is_set()
            word = torch.tensor([_END if stops else _MORE])
            world().send(word, holder, COPY_TAG).wait()
            if stops:
                return False
            world().send(piece, holder, COPY_TAG).wait()
        return True

    def _receive(self, held: Mapping[int, Sequence[SectionArena]], state: tuple[int, int]) -> bool:
        """Receive what this rank keeps of others; return whether all came."""
        # Each sender is heard to its end: it waits for that.
        whole = [self._receive_from(*one, state) for one in held.items()]
        return all(whole)

    def _receive_from(
        self, source: int, copies: Sequence[SectionArena], state: tuple[int, int]
    ) -> bool:
        announced = torch.empty(1, dtype=torch.int64)
        for copy in copies:
            copy.invalidate()
            for piece in _pieces(copy):
                world().receive(announced, source, COPY_TAG).wait()
                if announced.item() == _END:
                    return False
                world().receive(piece, source, COPY_TAG).wait()
            copy.set_version(*state)
        return True


def _pieces(copy: SectionArena) -> Iterator[torch.Tensor]:
    for span in copy.movable:
        if span.numel():
            yield from torch.split(span, PIECE_BYTES)
