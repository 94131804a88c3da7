"""Whether a GPU is well, from what the driver says of it; pure.

Numbers and meanings of XIDs: NVIDIA's XID catalogue and ``nverror.h`` of
open-gpu-kernel-modules; reasons of low clocks: ``nvmlClocksEventReasons`` of the NVML API
reference. No sick GPU was at hand: what to do after each is NVIDIA's advice, untried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spottrain.wire.model import GpuFacts

XidAction = Literal["restart_worker", "return_vm", "note"]


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reports."""

    number: int
    uuid: str
    """The GPU's."""


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that computes on a GPU."""

    pid: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """The state of a GPU at one moment."""

    is_lost: bool = False
    """It does not answer: off the bus, or to be reset first."""
    row_remap_pending: bool = False
    """A row of its memory has failed and is replaced at the next reset."""
    row_remap_failed: bool = False
    """A row has failed and no spare one is left."""
    recovery_action: int = 0
    """``nvmlDeviceGpuRecoveryAction_t``; 0: none."""
    clock_event_reasons: int = 0
    """Bits of ``nvmlClocksEventReasons``."""


RECOVERY_XID = 154
_XIDS: Mapping[int, tuple[XidAction, str]] = {
    13: ("restart_worker", "a kernel failed"),
    31: ("restart_worker", "a kernel read or wrote memory that is not its own"),
    43: ("restart_worker", "a kernel hung or failed"),
    45: ("note", "the work of a process that ended was removed"),
    48: ("return_vm", "memory has an error that cannot be corrected"),
    63: ("note", "a row of memory is recorded as failed"),
    64: ("return_vm", "a failed row of memory cannot be replaced"),
    74: ("return_vm", "an NVLink failed"),
    79: ("return_vm", "the GPU has fallen off the bus"),
    94: ("return_vm", "a memory error was contained"),
    95: ("return_vm", "a memory error was not contained"),
    119: ("return_vm", "the GPU's system processor does not answer"),
    120: ("return_vm", "the GPU's system processor failed"),
    140: ("return_vm", "memory has an error that cannot be corrected"),
    RECOVERY_XID: ("return_vm", "the driver asks for a recovery of the GPU"),
}
_RECOVERY_ACTIONS: Mapping[int, str] = {
    1: "a reset of the GPU",
    2: "a reboot",
    3: "no more traffic between GPUs",
    4: "a reset of the GPU, once nothing uses it",
    5: "a recovery of the NVLink domain",
    6: "a reset of the bus",
    7: "a reboot",
}
"""``NVML_GPU_RECOVERY_ACTION_*`` of nvidia-ml-py 13.615."""
_SLOWDOWNS: Mapping[int, str] = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
"""``nvmlClocksEventReason*``. The power cap (0x04), idle clocks and clocks that somebody
has set are ordinary."""


def action_on(xid: int) -> XidAction:
    """Return what an XID calls for; an unknown one is only noted."""
    return _XIDS.get(xid, ("note", ""))[0]


def describe_xid(xid: int, gpu: GpuFacts) -> str:
    """Return an XID in one line for people."""
    meaning = _XIDS.get(xid, ("note", "see NVIDIA's XID catalogue"))[1]
    return f"{describe(gpu)}: XID {xid}: {meaning}"


def describe(gpu: GpuFacts) -> str:
    """Return a GPU's number and name."""
    return f"GPU {gpu.index} ({gpu.name})"


def sickness(gpu: GpuFacts, health: GpuHealth, *, is_own: bool = False) -> str:
    """Return why a GPU must not be trained on, in one line; empty if it may.

    Args:
        health: Its state.
        is_own: Of a machine of the user's own, which no other can replace: a GPU that waits
            for a reset is used until then.
    """
    if health.is_lost:
        return f"{describe(gpu)} does not answer: it has fallen off the bus"
    if health.row_remap_failed:
        return f"{describe(gpu)}: a failed row of memory cannot be replaced"
    return "" if is_own else awaits_reset(gpu, health)


def awaits_reset(gpu: GpuFacts, health: GpuHealth) -> str:
    """Return why a GPU should be reset, in one line; empty if nothing asks for that.

    Until then work may go on (NVIDIA's guide on memory error management, row remapping).
    """
    if health.row_remap_pending:
        return f"{describe(gpu)}: a failed row of memory waits for a reset to be replaced"
    if health.recovery_action:
        number = health.recovery_action
        asked = _RECOVERY_ACTIONS.get(number, f"recovery action {number}")
        return f"{describe(gpu)}: the driver asks for {asked}"
    return ""


def slowdowns(health: GpuHealth) -> tuple[str, ...]:
    """Return why a GPU is slower than it could be, ordinary reasons left out."""
    reasons = health.clock_event_reasons
    return tuple(text for bit, text in _SLOWDOWNS.items() if reasons & bit)


def conflict(gpu: GpuFacts, users: Sequence[GpuUser]) -> str:
    """Return who else computes on a GPU, in one line; empty if nobody does."""
    if not users:
        return ""
    names = ", ".join(f"{user.pid} ({user.name})" for user in users[:3])
    more = f" and {len(users) - 3} more" if len(users) > 3 else ""
    return (
        f"{describe(gpu)} is in use by process {names}{more}: end it, or leave this GPU "
        "out with CUDA_VISIBLE_DEVICES"
    )
