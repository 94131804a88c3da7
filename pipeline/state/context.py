"""The context of a worker over all its generations, and its supervisor's port."""

from __future__ import annotations

import socket
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from spottrain.activity import Activity
from spottrain.manifest import FileRecord
from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.base.heap import trim_heap
from spottrain.pipeline.base.tracking import KnownTasks
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.loader.prefetch import Prefetcher
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.state.checkpoint import Background
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.storage.store import Store
from spottrain.wire import messages


class StopRequest:
    """Request of a rank to stop all ranks after the mini-batch; the highest wins."""

    NONE, STOP, STOP_AND_CHECKPOINT = range(3)


class SupervisorPort(Protocol):
    """Calls of a worker to its supervisor while it trains."""

    def report(self, report: messages.SupervisorReport) -> None:
        """Send a report to the manager."""

    def stop_request(self) -> int:
        """Return the strongest ``StopRequest`` that has come in; never waits."""

    def ending(self, reason: str) -> None:
        """Say that this worker ends itself, and is not to be killed before."""

    def open_loader(self, number: int) -> socket.socket:
        """Have a loader process started in place of any with the same number.

        Returns:
            A socket to it; it ends when that is closed, or with this worker.
        """

    def newest_share(self) -> messages.ShareMinibatch | None:
        """Return the newest share that had come in by the last ``stop_request``."""

    def newest_trace(self) -> messages.TraceMinibatches | None:
        """Return the newest trace asked for by the last ``stop_request``."""


@dataclass(slots=True)
class StageHistory:
    """Stages that a worker has computed, and what is known of their tasks.

    Most recoveries give a worker the stage that it had: it finds its heap as it left it,
    and watches no task again.
    """

    _known: dict[Hashable, KnownTasks] = field(default_factory=dict)
    _last: Hashable = None
    known: KnownTasks = field(default_factory=KnownTasks)
    """Of the stage that is computed now."""

    def enter(self, stage: Hashable) -> None:
        """Begin with a stage; another one than before finds the heap trimmed.

        Args:
            stage: Equal for stages whose tasks take the same; ``None``: no task runs.
        """
        if stage is None or stage != self._last:
            trim_heap()
        self._last = stage
        self.known = self._known.setdefault(stage, KnownTasks())


@dataclass(frozen=True, slots=True)
class FrozenFiles:
    """The files of parameters that are not trained, as every manifest names them."""

    files: tuple[FileRecord, ...] = ()
    base: str = ""
    """As in ``Manifest``."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Everything that stays the same over the generations of one worker."""

    loaded: LoadedJob
    vm_id: str
    slot: int
    device: Device
    memory: SlotMemory
    checkpoints: Store
    supervisor: SupervisorPort
    faults: FaultScript
    batches: Prefetcher
    activity: Activity = field(default_factory=Activity)
    stages: StageHistory = field(default_factory=StageHistory)
    frozen: list[FrozenFiles] = field(default_factory=list)
    """One, once it is known."""
    uploads: Background = field(default_factory=Background)
    """Writes checkpoints; one that an error has left may still be on its way."""
    tidying: Background = field(default_factory=Background)
    """Deletes old ones."""
