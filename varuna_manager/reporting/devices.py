"""What a job computes on, in one line: the first of plan, status and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from spottrain.machine import cpu_name, is_cpu
from spottrain.varuna_manager.core.model.records import VmRecord
from spottrain.varuna_manager.core.model.state import State
from spottrain.wire.model import Precision

UNKNOWN = "nothing yet: no VM is ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """Workers on devices of one name."""

    workers: int = 0
    gpus: int = 0
    """GPUs that they share; 0: they compute on CPUs."""


def computes_on(state: State) -> str:
    """Return what a job's workers compute on: those that train, else those ready.

    Once no VM is left, what the model was measured on.
    """
    generation = state.training.generation
    ready = [vm for vm in state.fleet.vms.values() if vm.device]
    if generation is not None:
        used = [vm for vm in ready if generation.trains_on(vm.vm_id)]
        ready = used or ready
    precision = state.job.spec.precision
    if not ready:
        if state.preparation.profile is None:
            return UNKNOWN
        name = state.preparation.profile.device
        return f"{_alone(name)}, {precision}"
    return describe(_found(ready), precision)


def _found(vms: list[VmRecord]) -> dict[str, Computing]:
    workers: Counter[str] = Counter()
    uuids: dict[str, set[str]] = {}
    for vm in vms:
        workers[vm.device] += vm.num_slots
        uuids.setdefault(vm.device, set()).update(gpu.uuid for gpu in vm.gpus)
    return {
        name: Computing(workers=count, gpus=len(uuids[name])) for name, count in workers.items()
    }


def describe(found: Mapping[str, Computing], precision: Precision) -> str:
    """Return devices in one line.

    Such as ``4 x NVIDIA A10G (GPU), bf16`` or ``CPUs: AMD EPYC 9R14, 1 thread each, fp32``.

    Args:
        found: Workers by the name of their device.
        precision: Of the matrix multiplications.
    """
    gpus = []
    for name, one in sorted(found.items()):
        if not one.gpus:
            continue
        several = f"{one.workers} workers on " if one.workers > one.gpus else ""
        gpus.append(f"{several}{one.gpus} x {name} (GPU)")
    names = sorted(name for name, one in found.items() if not one.gpus)
    return f"{' and '.join([*gpus, *map(_cpus, names)])}, {precision}"


def _alone(device: str) -> str:
    """Return a device by itself, without numbers."""
    return _cpus(device) if is_cpu(device) else f"{device} (GPU)"


def _cpus(device: str) -> str:
    return f"CPUs: {cpu_name(device)}, 1 thread each"
