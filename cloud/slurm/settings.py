"""Settings of a Slurm cluster, and of the batch jobs that are VMs there."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.cloud.port.settings import SlotSettings

HERE = "here"
"""The login node is this machine."""
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
    login: str = HERE
    """The machine where Slurm's commands are, as ``ssh`` is told of it."""
    folder: str
    """On the login node and all nodes; may be relative to the home folder."""
    scratch: str = ""
    """Folder of a node's own; empty: that for temporary files there."""
    address: str = ""
    """Of the login node for the nodes; empty: that in the network of Slurm's controller."""
