"""What of a machine changes the plan."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.wire.model import LinkProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShape:
    """The properties of a machine that change the plan."""

    gpus: int
    gpu_memory_bytes: int
    speed: float = 1.0
    """Of its GPUs, relative to the device of the profile."""
    network_bytes_per_s: float | None = None
    """Between machines; None: as in the profile."""
    gpu_link: LinkProfile | None = None
    """Between its GPUs, as estimated, see ``ThroughputCache.profile_on``; None: not known."""
    is_gpu: bool = False
    """False: its slots are CPU slots, whose memory is ``gpu_memory_bytes`` each."""
    memory_bytes: int = 0
    """Of the machine beside its GPUs'; 0: unknown."""
    locked_memory_bytes: int = 0
    """What each of its workers may page-lock; 0: there is no limit."""
    computer: str = ""
    """The computer that all machines of its kind are on; empty: each is one of its own."""
    cores: int = 0
    """That CPU slots of its computer share; 0: each slot has one."""
