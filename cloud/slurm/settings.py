"""Settings of a Slurm cluster, and of the batch jobs that are VMs there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spottrain.cloud.port.settings import SlotSettings

INSTANCE_TYPE = "node"
"""Name of the type of all batch jobs in offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings(SlotSettings):
    """Settings of the batch jobs; every one has a node, and all are alike."""

    partitions: tuple[str, ...]
    account: str = ""
    qos: str = ""
    constraint: str = ""
    gres: str = ""
    time_limit: str = ""
    """As Slurm writes it, such as ``4:00:00``; empty: the partition's."""
    notice_s: int = 120
    """How long before the time limit a VM is told of it."""
    options: tuple[str, ...] = ()
    """Further options of ``sbatch``."""
    before: str = ""
    """Shell commands that the batch script runs first."""
    python: str = "python3"
    folder: Path
    """On this machine and all nodes."""
    scratch: str = ""
    """Folder of a node's own; empty: that for temporary files there."""
    address: str = ""
    """Of this machine for the nodes; empty: that in the network of Slurm's controller."""
