"""What the slots of this VM drive, or why it must not train."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spottrain import machine
from spottrain.gpus import health, nvml, slots
from spottrain.gpus.builds import UnfitBuildError, check_precision
from spottrain.wire.messages import DeviceChoice, GpuSick, VmUnfit
from spottrain.wire.model import GpuFacts, Precision

_SHARED_BYTES = 512 << 20
"""Less than NVIDIA asks for (1 GB; NCCL's user guide, troubleshooting, shared memory), far more
than the 64 MB that docker gives, and often enough for 8 GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmDevices:
    """The devices of a VM's slots, and the GPUs among them."""

    slots: slots.SlotDevices
    gpus: tuple[GpuFacts, ...]
    warnings: tuple[str, ...] = ()
    """What is wrong with GPUs that are used all the same."""

    @property
    def name(self) -> str:
        """What the slots compute on, as in ``Profile``."""
        return machine.device(self.gpus, self.slots.memory_shares)

    def greeting(self) -> dict[str, Any]:
        """Return them as a supervisor's first line has them."""
        return {
            "devices": self.slots.devices,
            "memory_shares": self.slots.memory_shares,
            "threads": self.slots.threads,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "warnings": self.warnings,
        }


def own_gpus() -> tuple[GpuFacts, ...]:
    """Return the GPUs of this machine that may be used; none where they cannot be read,
    of which agents say why."""
    try:
        with nvml.open_nvml() as driver:
            return slots.visible_gpus(driver.gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except (nvml.NoNvmlError, nvml.GpuLostError):
        return ()


def find_devices(
    choice: DeviceChoice,
    vm_id: str,
    num_slots: int,
    *,
    job: str,
    precision: Precision = "fp32",
    min_gpus: int = 0,
    place: int | None = None,
    slot_memory_bytes: int = 0,
    is_own: bool = False,
) -> VmDevices | VmUnfit | GpuSick:
    """Return what the slots of this VM drive, or why it must not train.

    Args:
        choice: As for ``slots.assign``.
        num_slots: Slots of it.
        job: Its name; processes of it, or of its pool, may be on the GPUs.
        precision: Of the job.
        min_gpus: GPUs that it was rented with.
        place: Its number among VMs of the job that share a machine: each has other GPUs,
            as far as there are enough. None: not known, and left to chance.
        slot_memory_bytes: Declared memory of a slot; 0: none.
        is_own: As for ``health.sickness``.
    """
    gpus: tuple[GpuFacts, ...] = ()
    why_none = ""
    try:
        if choice != "cpu":
            with nvml.open_nvml() as driver:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                gpus = slots.visible_gpus(driver.gpus(), visible)
    except nvml.GpuLostError as error:
        return GpuSick(reason=str(error))
    except nvml.NoNvmlError as error:
        if choice == "auto" and nvml.driver_is_loaded():
            hint = "or set resources.device: cpu"
            return VmUnfit(reason=f"its GPUs cannot be read: {error}, {hint}")
        why_none = str(error)
    try:
        devices = slots.assign(
            choice,
            gpus,
            num_slots,
            first_gpu=zlib.crc32(job.encode()) + place * num_slots
            if place is not None
            else zlib.crc32(vm_id.encode()),
            cores=machine.cores(),
            min_gpus=min_gpus,
            slot_memory_bytes=slot_memory_bytes,
            why_none=why_none,
        )
        used = tuple(gpu for gpu in gpus if slots.device_of(gpu) in devices.devices)
        for gpu in used:
            check_precision(precision, gpu.compute_capability, gpu.name)
    except (slots.UnfitVmError, UnfitBuildError) as error:
        return VmUnfit(reason=str(error))
    trouble = _trouble(used, machine.owner(job), is_own)
    if not isinstance(trouble, tuple):
        return trouble
    return VmDevices(slots=devices, gpus=used, warnings=(*trouble, *_shared_memory(used, gpus)))


def _shared_memory(used: Sequence[GpuFacts], gpus: Sequence[GpuFacts]) -> Iterator[str]:
    """Yield what is wrong with the memory through which NCCL may connect GPUs of a machine."""
    found = machine.shared_memory_bytes()
    if used and len(gpus) > 1 and found < _SHARED_BYTES:
        yield (
            f"/dev/shm has {found / 1e6:.0f} MB: NCCL may not start between its {len(gpus)} "
            "GPUs; give the container more (docker: --shm-size=1g)"
        )


def _trouble(
    gpus: tuple[GpuFacts, ...], owner: str, is_own: bool
) -> VmUnfit | GpuSick | tuple[str, ...]:
    """Return why GPUs cannot be used, as they are sick or others use them; or warnings."""
    if not gpus:
        return ()
    try:
        with nvml.open_nvml() as driver:
            states = [(gpu, driver.health(gpu)) for gpu in gpus]
            for gpu, state in states:
                if reason := health.sickness(gpu, state, is_own=is_own):
                    return GpuSick(reason=reason)
                if reason := health.conflict(gpu, driver.users(gpu, owner)):
                    return VmUnfit(reason=reason)
    except nvml.GpuLostError as error:
        return GpuSick(reason=str(error))
    except nvml.NoNvmlError as error:
        return VmUnfit(reason=f"its GPUs cannot be read: {error}")
    return tuple(filter(None, (health.awaits_reset(*one) for one in states)))
