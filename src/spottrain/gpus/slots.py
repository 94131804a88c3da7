"""Which device each slot of a VM drives, and its share of it; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.errors import SpottrainError
from spottrain.gpus.health import describe
from spottrain.units import counted
from spottrain.wire.messages import DeviceChoice
from spottrain.wire.model import GpuFacts

CPU = "cpu"
_CUDA = "cuda:"
_NEARLY_ALL = 0.9
"""A declared share of a GPU's memory above which all of it is meant: catalogues round."""


class UnfitVmError(SpottrainError):
    """This VM cannot do what it was rented for; its CPUs must not stand in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDevices:
    """The devices of a VM's slots."""

    devices: tuple[str, ...]
    """Of each slot: ``cpu`` or ``cuda:<UUID>``."""
    memory_shares: tuple[float, ...]
    """Of each slot: its share of the GPU's memory; 1 on CPUs."""
    threads: int
    """CPU threads of a worker."""


def device_of(gpu: GpuFacts) -> str:
    """Return the name of a GPU as a slot's device."""
    return f"{_CUDA}{gpu.uuid}"


def visible_gpus(gpus: Sequence[GpuFacts], visible: str | None) -> tuple[GpuFacts, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves.

    Args:
        gpus: All of the machine.
        visible: The variable: numbers as nvidia-smi counts them, or UUIDs, of which the
            beginning is enough; None: not set. As in CUDA, what follows a number or name
            that no GPU has does not count (CUDA C++ programming guide, environment
            variables).
    """
    if visible is None:
        return tuple(gpus)
    found: list[GpuFacts] = []
    for name in map(str.strip, visible.split(",")):
        named = name.startswith("GPU-")
        fits = (
            gpu for gpu in gpus if (gpu.uuid.startswith(name) if named else str(gpu.index) == name)
        )
        gpu = next(fits, None)
        if gpu is None:
            break
        if gpu not in found:
            found.append(gpu)
    return tuple(found)


def assign(
    choice: DeviceChoice,
    gpus: Sequence[GpuFacts],
    num_slots: int,
    *,
    first_gpu: int = 0,
    cores: int,
    min_gpus: int = 0,
    slot_memory_bytes: int = 0,
    why_none: str = "",
) -> SlotDevices:
    """Return the devices of a VM's slots.

    One slot per GPU; if there are more slots than GPUs, they are spread evenly.

    Args:
        choice: ``resources.device``; ``gpu`` for every VM that was rented for its GPUs.
        gpus: That may be used.
        num_slots: Slots of the VM.
        first_gpu: Where a VM with fewer slots than its machine has GPUs begins to take
            them, counted round and round: VMs that share a machine begin elsewhere.
        cores: Its CPU cores.
        min_gpus: GPUs that it was rented with.
        slot_memory_bytes: Declared memory of a slot; VMs that share a machine, as those
            of the local provider do, share its GPUs by it. 0: not declared.
        why_none: Why there are no GPUs, if there are none.

    Raises:
        UnfitVmError: It has no GPU, or too few, and the job wants to compute on GPUs; or slots
            would drive GPUs of several types, where a VM is measured and planned as one.
    """
    if choice == "gpu" and not gpus:
        raise UnfitVmError(
            f"no GPU can be used: {why_none or 'the driver sees none'}; its CPUs are not "
            "used instead (resources.device: cpu would ask for that)"
        )
    if choice == "gpu" and len(gpus) < min_gpus:
        raise UnfitVmError(f"{len(gpus)} of {counted(min_gpus, 'GPU')} can be used")
    if choice == "cpu" or not gpus:
        whole = (1.0,) * num_slots
        return SlotDevices(devices=(CPU,) * num_slots, memory_shares=whole, threads=1)
    if partitioned := [gpu for gpu in gpus if gpu.is_partitioned]:
        raise UnfitVmError(
            f"{describe(partitioned[0])} is partitioned (MIG); turn MIG off with "
            "'nvidia-smi -mig 0'"
        )
    first = first_gpu if num_slots < len(gpus) else 0
    chosen = [gpus[(first + slot) % len(gpus)] for slot in range(num_slots)]
    if len(types := sorted({gpu.name for gpu in chosen})) > 1:
        raise UnfitVmError(
            f"its slots would drive GPUs of several types: got {', '.join(types)}; let its agent see "
            "those of one (CUDA_VISIBLE_DEVICES)"
        )
    slots_on = Counter(gpu.uuid for gpu in chosen)
    shares = tuple(
        _share(gpu.memory_bytes, slots_on[gpu.uuid], slot_memory_bytes) for gpu in chosen
    )
    threads = max(1, int(cores / len(gpus) * min(shares, default=1.0)))
    return SlotDevices(devices=tuple(map(device_of, chosen)), memory_shares=shares, threads=threads)


def _share(memory_bytes: int, slots: int, declared_bytes: int) -> float:
    """Return a slot's share of a GPU that some slots of its VM share."""
    declared = declared_bytes / memory_bytes
    even = 1.0 / slots
    return declared if 0.0 < declared < _NEARLY_ALL * even else even
