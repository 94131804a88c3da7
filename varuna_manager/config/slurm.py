"""The section of a job file about a Slurm cluster."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, model_validator

from spottrain.cloud.local.market import ZoneSpec
from spottrain.cloud.slurm.settings import HERE, INSTANCE_TYPE, SlurmSettings
from spottrain.varuna_manager.config.slots import SlotSection

_OURS = (
    *(
        "--parsable",
        "--requeue",
        "--no-requeue",
        "--nodes",
        "-N",
        "--ntasks",
        "-n",
        "--array",
        "-a",
    ),
    *("--comment", "--output", "-o", "--chdir", "-D", "--signal", "--job-name", "-J", "--wrap"),
    *("--partition", "-p", "--account", "-A", "--qos", "-q", "--constraint", "-C", "--gres"),
    *("--time", "-t", "--hold", "-H", "--test-only", "--wait", "-W"),
)
"""Options of ``sbatch`` that spottrain sets, that have keys, or that would break it."""


def _option(text: str) -> str:
    name = text.partition("=")[0]
    if not text.startswith("-") or name in _OURS or text[:2] in _OURS:
        raise ValueError(
            f"must be an option of sbatch that has no key here, such as --mem=64G: got {text}"
        )
    return text


def _manager_option(text: str) -> str:
    is_limit = text.partition("=")[0] in ("--time", "-t")
    return text if is_limit else _option(text)


def seconds(limit: str) -> int:
    """Return a time limit as ``sbatch --time`` reads it, in seconds: minutes, minutes:seconds,
    hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours_first = [*parts, 0, 0] if dash or len(parts) == 3 else [0, *parts, 0]
    hours, minutes, rest_s = hours_first[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest_s


Name = Annotated[str, Field(pattern=r"^[^\s,|]+$")]


class SlurmConfig(SlotSection):
    """A Slurm cluster, for `provider: slurm`; see docs/clouds/slurm.md."""

    partitions: tuple[Name, ...] = ()
    """Partitions in which nodes may be asked for; each is an offer."""
    account: str = ""
    """Account that is charged, as `sbatch --account`; by default your own default."""
    qos: str = ""
    """Quality of service, as `sbatch --qos`."""
    constraint: str = ""
    """Features that nodes must have, as `sbatch --constraint`."""
    gres: str = ""
    """Generic resources of each VM, as `sbatch --gres`, such as `gpu:a100:4`."""
    time_limit: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = None
    """Time limit of each VM, as `sbatch --time`; by default the partition's. Before it is
    over the VM gives its state away, as before a preemption."""
    notice_s: Annotated[int, Field(ge=10, le=65535)] = 120
    """How long before its time limit, which must be longer, a VM is told of it."""
    sbatch: tuple[Annotated[str, AfterValidator(_option)], ...] = ()
    """Further options of `sbatch`, such as `--mem=64G` or `--exclusive`."""
    before: str = ""
    """Shell commands that each batch script runs first, such as `module load python/3.12`."""
    python: str = Field(default="python3", min_length=1)
    """Python 3.11 or newer on the nodes, with torch, numpy and safetensors."""
    login: Annotated[str, Field(pattern=r"^[^\s-]\S*$")] = HERE
    """Login node of the cluster, as the `ssh` command knows it, such as `me@login`; `here`:
    this machine is one."""
    folder: str = Field(default="~/.spottrain-slurm", min_length=1)
    """Folder that login node and all nodes share, relative to the home folder there."""
    scratch: str = ""
    """Folder of a node's own for the job's files; variables such as `$TMPDIR` are the
    node's. By default Python's folder for temporary files."""
    address: str = ""
    """The login node's address for the nodes; by default that in the network of Slurm's
    controller."""
    manager_partition: Name | None = None
    """Partition for the manager of `launch --manager-vm`, one that is not preempted."""
    manager_sbatch: tuple[Annotated[str, AfterValidator(_manager_option)], ...] = ()
    """Options of `sbatch` for the manager, such as `--time=7-0` or `--mem=4G`."""
    usd_per_gpu_hour: NonNegativeFloat = 0.0
    """Price of a slot per hour, as you value it; budgets in dollars need one,
    `budget.max_gpu_hours` does not."""

    @model_validator(mode="after")
    def _has_time(self) -> Self:
        if self.time_limit is not None and seconds(self.time_limit) <= self.notice_s:
            raise ValueError(
                f"time_limit must be longer than notice_s, {self.notice_s} s: got "
                f"{self.time_limit}; give more time or a shorter notice"
            )
        return self

    def specs(self, max_vms: int) -> tuple[ZoneSpec, ...]:
        """Return the partitions, as zones for planners.

        Args:
            max_vms: How many nodes each may give.
        """
        return tuple(
            self.spec(name, INSTANCE_TYPE, max_vms, self.usd_per_hour) for name in self.partitions
        )

    @property
    def usd_per_hour(self) -> float:
        """Price of a VM."""
        return self.usd_per_gpu_hour * self.slots

    def settings(self, *, uses_gpus: bool = True) -> SlurmSettings:
        """Return the settings for the provider.

        Args:
            uses_gpus: False: slots are CPU slots.
        """
        return SlurmSettings(
            partitions=self.partitions,
            account=self.account,
            qos=self.qos,
            constraint=self.constraint,
            gres=self.gres,
            time_limit=self.time_limit or "",
            notice_s=self.notice_s,
            options=self.sbatch,
            before=self.before,
            python=self.python,
            login=self.login,
            folder=self.folder,
            scratch=self.scratch,
            address=self.address,
            usd_per_hour=self.usd_per_hour,
            **self.slot_settings(uses_gpus=uses_gpus),
        )


def check_slurm(slurm: SlurmConfig, checkpoint_path: str | None, *, needs_price: bool) -> None:
    """Check the rest of a job file with ``provider: slurm``.

    Args:
        slurm: Its section.
        checkpoint_path: Where checkpoints are to be; None: not said.
        needs_price: See ``check_cluster``.

    Raises:
        ValueError: It is wrong.
    """
    check_cluster(slurm, needs_price=needs_price)
    if checkpoint_path is None:
        raise ValueError(
            "resources.provider slurm needs a checkpoint.path that all nodes and this "
            "machine can access, such as a folder of the cluster's file system"
        )


def check_cluster(slurm: SlurmConfig, *, needs_price: bool) -> None:
    """Check that it is said where nodes are asked for, and for what.

    Args:
        needs_price: There is a budget in dollars, or throughput is weighed against them.

    Raises:
        ValueError: It is not.
    """
    if not slurm.partitions:
        raise ValueError("slurm needs slurm.partitions; 'sinfo' lists them")
    if needs_price and not slurm.usd_per_gpu_hour:
        raise ValueError(
            "budgets in dollars and morphing.objective examples_per_dollar need a price; give "
            "slurm.usd_per_gpu_hour, or budget.max_gpu_hours instead of dollars"
        )
