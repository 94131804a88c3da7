"""What workers compute on, and the time of the update of committed state there.

A worker on a CPU computes on committed state itself. One on a GPU keeps it in its VM's
memory (``host``) and computes on working copies, or keeps it on the GPU (``device``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spottrain.wire.model import (
    Network,
    Precision,
    Profile,
    SectionFacts,
    SectionProfile,
    StateHome,
    WireType,
)
from spottrain.wire.plan import Semantics

NARROW_BYTES = 2
"""Of an element in any ``WireType`` but its own."""
BUS_BYTES_PER_S = 12e9
"""Assumed each way where it was not measured: PCIe 3.0 x16 carries 15.75 GB/s nominally."""
HOST_OPTIMIZER_S_PER_BYTE = 28 / 4 / 20e9
"""Assumed where it was not measured: Adam on the CPU moves 28 bytes for each parameter of
4; at 20 GB/s, what a few cores of a VM get of its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What all workers of a job compute on, in which type, and how they exchange it."""

    on_gpu: bool = False
    precision: Precision = "fp32"
    wire: WireType = "own"
    """In which activations and their gradients travel."""
    network: Network = "auto"
    """What sums gradients of GPUs; ``auto``: the faster one of those that were measured."""
    semantics: Semantics = "synchronous"
    """Whether two mini-batches may be under way."""
    group_size: int = 1
    """Ranks of a VM that are simulated as one, since they divide the matrices of a stage."""

    @property
    def lanes(self) -> int:
        """Mini-batches that may be under way, each with sums of gradients of its own."""
        return 2 if self.semantics == "stale_by_one" else 1

    def sent_bytes(self, section: SectionProfile) -> float:
        """Return the bytes that leave a section for one micro-batch, as they travel.

        An activation is never widened; of one whose type is not known, its own counts.
        """
        return _output_bytes(section, is_narrow=self.wire != "own")

    def summed_bytes(self, section: SectionProfile) -> float:
        """Return the bytes of what leaves a section as ranks that divide matrices sum it: in the
        type of their products, which autocast makes."""
        return _output_bytes(section, is_narrow=self.precision != "fp32")

    def cast_bytes(self, sections: Iterable[SectionFacts]) -> int:
        """Return the bytes of matrices as autocast converts them, to 2 bytes an element.

        Where it is not known which parameters these are, all are counted: matrices are
        nearly all of them.
        """
        if self.precision == "fp32":
            return 0
        return sum(
            (s.param_bytes if s.lowered_bytes is None else s.lowered_bytes) // 2 for s in sections
        )

    def working_bytes(self, sections: Iterable[SectionFacts]) -> int:
        """Return the bytes of a GPU's copies of parameters, matrices converted."""
        own = tuple(sections)
        return sum(section.param_bytes for section in own) - self.cast_bytes(own)


def _output_bytes(section: SectionProfile, *, is_narrow: bool) -> float:
    own_bytes = section.output_element_bytes
    if not is_narrow or own_bytes <= NARROW_BYTES:
        return section.output_bytes
    return section.output_bytes * NARROW_BYTES / own_bytes


CPU = Compute()


def update_s(
    profile: Profile,
    sections: Sequence[SectionFacts],
    state: StateHome,
    compute: Compute = CPU,
    beside_s: Sequence[float] = (),
) -> float:
    """Return the time from reduced gradients to updated parameters of one worker.

    With state on the host all gradients come down first: the commit wants them in memory
    that outlives the worker before anything is decided. Those of the last section leave
    first, while the sections before it are still at work. Then the CPU updates section by
    section, and parameters in the computing type go up while it updates the next one.

    Args:
        profile: Speeds of the device, the bus and the CPU.
        sections: Those of the worker.
        state: Where it keeps them.
        compute: What it computes on.
        beside_s: For how long each section is at work before its gradients can leave, the
            last one first: its backward, or its sum over replicas. None: all gradients
            leave at once.
    """
    if not compute.on_gpu or state == "device":
        param_bytes = sum(section.param_bytes for section in sections)
        return profile.optimizer_s_per_byte * param_bytes
    times_s = host_update_times_s(profile, sections, compute)
    ready_s = down_s = 0.0
    works_s = beside_s or (0.0,) * len(times_s)
    for (download_s, _, _), work_s in zip(times_s[::-1], works_s[::-1], strict=True):
        ready_s += work_s
        down_s = max(down_s, ready_s) + download_s
    updated_s = there_s = down_s - ready_s
    for _, own_s, upload_s in times_s:
        updated_s += own_s
        there_s = max(there_s, updated_s) + upload_s
    return there_s


def min_update_s(
    profile: Profile,
    sections: Sequence[SectionFacts],
    state: StateHome,
    compute: Compute,
) -> float:
    """Return a lower bound on ``update_s``, whatever downloads run beside.

    Those of the first section never do.
    """
    if not compute.on_gpu or state == "device":
        return update_s(profile, sections, state, compute)
    times_s = host_update_times_s(profile, sections, compute)
    _, updates_s, uploads_s = map(sum, zip(*times_s, strict=True))
    return times_s[0][0] + max(updates_s, uploads_s)


def host_update_times_s(
    profile: Profile, sections: Sequence[SectionFacts], compute: Compute
) -> list[tuple[float, float, float]]:
    """Return for each section the times of its download, its update and its upload."""
    down = profile.download_bytes_per_s or BUS_BYTES_PER_S
    up = profile.upload_bytes_per_s or BUS_BYTES_PER_S
    update = profile.host_optimizer_s_per_byte or HOST_OPTIMIZER_S_PER_BYTE
    return [
        (
            trained_bytes(section) / down,
            section.param_bytes * update,
            compute.working_bytes((section,)) / up,
        )
        for section in sections
    ]


def trained_bytes(section: SectionFacts) -> int:
    """Return the bytes of the gradients of a section's parameters."""
    gradients = section.gradient_bytes
    return section.param_bytes if gradients is None else gradients
