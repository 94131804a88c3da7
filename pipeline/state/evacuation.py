"""The end of a worker by its own hand, its state safe."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

from spottrain.pipeline.state.context import WorkerContext

_EVACUATION_BOUND_S = 15.0
"""The manager suspects a VM to hang after 20 s without a word."""


def end_worker(context: WorkerContext, reason: str) -> NoReturn:
    """End this process; what its device holds is copied to the VM's memory before.

    For any thread; other threads may hang. State in the VM's memory outlives the process
    as it is.
    """
    context.supervisor.ending(reason)
    hanging = threading.Timer(_EVACUATION_BOUND_S, os._exit, (1,))
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
