"""Watches the GPUs of a VM while it trains: errors, failures, slowdowns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from spottrain.gpus.health import (
    RECOVERY_XID,
    action_on,
    describe,
    describe_xid,
    sickness,
    slowdowns,
)
from spottrain.gpus.nvml import GpuLostError, NoNvmlError, Nvml
from spottrain.wire.messages import GpuSick, GpuThrottled
from spottrain.wire.model import GpuFacts, GpuUse

WAIT_MS = 1000
"""Longest wait for an XID before other things are looked at."""
POLLS_TO_THROTTLE = 10
"""Looks in a row, about a second apart, that a GPU must be hot or cool before it counts:
clocks drop for moments under ordinary load."""


class GpuWatch:
    """Turns what NVML says of a VM's GPUs into reports.

    Args:
        gpus: Those that the VM's slots drive.
        report: Takes the reports.
        restart: Restarts the workers on a GPU, given its UUID and why.
        note: Takes what is worth a line in the log.
        is_own: As for ``health.sickness``.
    """

    def __init__(
        self,
        nvml: Nvml,
        gpus: Sequence[GpuFacts],
        report: Callable[[GpuSick | GpuThrottled], None],
        restart: Callable[[str, str], None],
        note: Callable[[str], None],
        *,
        is_own: bool = False,
    ) -> None:
        self._nvml = nvml
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._report = report
        self._restart = restart
        self._note = note
        self._is_own = is_own
        self._polls = dict.fromkeys(self._gpus, 0)
        """Looks in a row at which a GPU was not what was last reported."""
        self._throttled: dict[str, str] = {}
        """Why GPUs are slow that were reported as slow."""
        self.uses: tuple[GpuUse, ...] = ()
        """What the GPUs did at the last look; replaced whole, for other threads."""

    def run(self, closing: threading.Event) -> None:
        """Watch until ``closing`` is set, or until a GPU has failed."""
        try:
            with self._nvml.xids(tuple(self._gpus.values())) as next_xid:
                while not closing.is_set():
                    xid = None if next_xid is None else next_xid(WAIT_MS)
                    if xid is not None and self._is_fatal(xid.number, xid.uuid):
                        return
                    if xid is None and self._look():
                        return
                    if next_xid is None:
                        closing.wait(WAIT_MS / 1000)
        except GpuLostError as error:
            self._report(GpuSick(reason=f"{error}: it has fallen off the bus"))
        except NoNvmlError as error:
            self._note(f"GPUs are not watched any more: {error}")

    def _is_fatal(self, number: int, uuid: str) -> bool:
        """Act on an XID; return whether the VM is to be returned."""
        gpu = self._gpus.get(uuid)
        if gpu is None:
            return False
        line = describe_xid(number, gpu)
        self._note(line)
        if number == RECOVERY_XID and self._is_own:
            return False
        match action_on(number):
            case "return_vm":
                self._report(GpuSick(reason=line))
                return True
            case "restart_worker":
                self._restart(uuid, line)
        return False

    def _look(self) -> bool:
        """Look at every GPU; return whether one has failed."""
        for gpu in self._gpus.values():
            health = self._nvml.health(gpu)
            if reason := sickness(gpu, health, is_own=self._is_own):
                self._report(GpuSick(reason=reason))
                return True
            self._fold(gpu, slowdowns(health))
        self.uses = tuple(map(self._nvml.use, self._gpus.values()))
        return False

    def _fold(self, gpu: GpuFacts, reasons: tuple[str, ...]) -> None:
        """Report a GPU that has become slow, or fast again, and stays so."""
        reported = gpu.uuid in self._throttled
        if bool(reasons) == reported:
            self._polls[gpu.uuid] = 0
            return
        self._polls[gpu.uuid] += 1
        if self._polls[gpu.uuid] < POLLS_TO_THROTTLE:
            return
        self._polls[gpu.uuid] = 0
        if reasons:
            self._throttled[gpu.uuid] = f"{describe(gpu)}: {', '.join(reasons)}"
        else:
            del self._throttled[gpu.uuid]
        self._report(GpuThrottled(reason="; ".join(self._throttled.values())))
