"""The end of a worker by its own hand, its state safe."""

from __future__ import annotations

import os
import select
import sys
import threading
from types import TracebackType
from typing import NoReturn, Self

from spottrain.pipeline.state.context import WorkerContext
from spottrain.wire.patience import evacuation_s


def end_worker(context: WorkerContext, reason: str) -> NoReturn:
    """End this process; what its device holds is copied to the VM's memory before.

    For any thread; other threads may hang. State in the VM's memory outlives the process
    as it is.
    """
    context.supervisor.ending(reason)
    hanging = threading.Timer(evacuation_s(context.memory.num_bytes), os._exit, (1,))
    hanging.daemon = True
    hanging.start()
    try:
        context.memory.evacuate()
    except Exception as error:  # noqa: BLE001  whatever it is, the process must end
        outcome = f"; its copy of the state is lost ({error})"
    else:
        outcome = "; its state is in the VM's memory"
    context.supervisor.ending(reason + outcome)
    sys.stderr.write(f"{reason}{outcome}\n")
    sys.stderr.flush()
    os._exit(1)


class Guard:
    """Ends this worker, its state safe, when it is told to give a generation up.

    It is told when it has not left by itself: whatever its main thread waits for, such as
    an example or a disk, may take its time. Used as a context manager.

    Args:
        context: The worker's.
        told: File descriptor that becomes readable then.
    """

    def __init__(self, context: WorkerContext, told: int) -> None:
        self._context, self._told = context, told
        self._stopped = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.eventfd_write(self._stopped, 1)
        self._thread.join()
        os.close(self._stopped)

    def _watch(self) -> None:
        ready = select.select([self._told, self._stopped], [], [])[0]
        if self._stopped not in ready:
            end_worker(self._context, "it did not leave the generation by itself")
