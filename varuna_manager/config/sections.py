"""The sections of the job file that the manager's core decides by, as they are.

``JobConfig`` has them, and ``JobSettings`` of ``core``: a key has one name, one default and
one description wherever it is read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from spottrain.morphing.plan.inputs import Objective
from spottrain.pricing.billing.money import MAX_USD
from spottrain.pricing.ranking.cooldowns import Span
from spottrain.varuna_manager.config.base import Section
from spottrain.varuna_manager.config.clouds import Provider, provider_of
from spottrain.wire.messages import DeviceChoice
from spottrain.wire.model import Network, Precision, StateHome, WireType
from spottrain.wire.plan import ScheduleKind


class ResourcesConfig(Section):
    """What may be rented."""

    provider: Annotated[Provider, BeforeValidator(provider_of)] = "local"
    """Where machines come from: `local` simulates a spot market on this machine, `ssh`
    uses your own hosts, `slurm` nodes and `kubernetes` pods of a cluster, the others rent from
    that cloud; several as a list: `[aws, gcp]`."""
    device: DeviceChoice = "auto"
    """What workers compute on: `gpu`, or `cpu` to rent machines without GPUs; `auto`:
    GPUs from a cloud, on other machines those that they have."""
    span: Span = "region"
    """How far apart the VMs of a plan may be: `region` keeps them in one region, where
    they reach each other; `cloud` and `any` need a network of yours that connects
    regions."""
    min_vms: PositiveInt = 1
    """Minimum number of VMs to train on; with fewer, the job waits."""
    max_vms: PositiveInt = 4
    """Maximum number of VMs at a time, not counting those that leave or are being
    replaced."""
    allow_on_demand: bool = False
    """Also rent on-demand VMs: where there is no spot capacity, and where they train
    more per dollar than spot VMs, including interruptions; with `slo`, only as needed
    for it."""
    capacity_wait_s: PositiveFloat | None = None
    """Give up after waiting this long without any VM, or with too few to train; by
    default wait forever."""

    @property
    def providers(self) -> tuple[str, ...]:
        """Names of all providers; usually one."""
        return (self.provider,) if isinstance(self.provider, str) else self.provider

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_vms > self.max_vms:
            raise ValueError(
                f"min_vms must be at most max_vms: got {self.min_vms} > {self.max_vms}"
            )
        return self


def _dollars(value: Any) -> Any:
    match value:
        case str():
            raise ValueError("must be a number of US dollars, without a currency")
        case _:
            return value


Dollars = Annotated[PositiveFloat, Field(le=MAX_USD), BeforeValidator(_dollars)]
Price = Annotated[NonNegativeFloat, Field(le=MAX_USD), BeforeValidator(_dollars)]
Share = Annotated[float, Field(gt=0, lt=1)]


class BudgetConfig(Section):
    """What may be spent; by default without limit. See docs/budget.md."""

    max_usd: Dollars | None = None
    """Dollars for the whole job. The job saves a checkpoint and ends before it spends
    more."""
    max_usd_per_hour: Dollars | None = None
    """Dollars per hour for all VMs together, at the prices they are billed."""
    max_gpu_hours: Annotated[PositiveFloat, Field(le=MAX_USD)] | None = None
    """GPU-hours for the whole job, kept as `max_usd` is: the time of each VM times its GPUs
    (slots), from its start to its end."""
    alerts: tuple[Share, ...] = (0.5, 0.8, 0.95)
    """Shares of `max_usd` and of `max_gpu_hours` at which to report the spending, once each."""
    storage_usd_per_gb_month: Price = 0.0
    """Price of the checkpoint store."""
    zone_usd_per_gb: Price | None = None
    """Price of data between two zones of a region, both ends together; by default the
    cloud's list price."""


class NonFiniteConfig(Section):
    """What to do about losses and gradients that are not finite."""

    stop_after: PositiveInt = 10
    """End the job, with exit code 3, after this number of mini-batches in a row whose
    loss or gradients are not finite. None of them changes the weights."""


class MorphingConfig(Section):
    """How the job changes its plan."""

    debounce_s: NonNegativeFloat = 2.0
    """Time to wait for further changes before growing."""
    schedule: Literal["auto", ScheduleKind] = "auto"
    """Pipeline schedule; `auto`: the best one for each plan."""
    recompute: bool | Literal["auto", "selective"] = "auto"
    """Recompute activations in the backward pass to save memory, in segments where that
    is what fits; `auto`: where that is faster; `selective`: blocks keep the outputs of their
    matrix products and attention kernels alone, and stages recompute beside that as with `auto`."""
    objective: Objective = "throughput"
    """How plans are compared: by `throughput` (examples per second) or by
    `examples_per_dollar`, which returns machines that are not worth their price."""
    peer_copies: Literal[0, 1] = 0
    """Copies of the weights and optimizer state of an earlier mini-batch that other VMs keep
    in memory where a plan has one replica: 1, where their memory is enough, or 0. See
    docs/checkpoints.md."""

    @property
    def asked_schedule(self) -> ScheduleKind | None:
        """The schedule that every plan must have; ``None``: the planner chooses."""
        return None if self.schedule == "auto" else self.schedule

    @property
    def asked_recompute(self) -> bool | None:
        """True if every plan must recompute; ``None``: the planner chooses."""
        return self.recompute if isinstance(self.recompute, bool) else None


class RuntimeConfig(Section):
    """How workers compute. See docs/gpu.md."""

    precision: Literal["auto", Precision] = "auto"
    """Type of matrix multiplications: `bf16` (A100 and newer), `fp16` with a dynamic
    loss scale, or `fp32`. Parameters and optimizer state keep their own type. `auto`: bf16 where
    every GPU that may be used has it, else fp16 (fp32 with `semantics: stale_by_one`), and
    fp32 on CPUs and on own hosts whose GPUs `ssh.hosts.gpu` does not name; it is settled at
    the launch, for the job's life."""
    state: Literal["auto", StateHome] = "auto"
    """Where parameters and optimizer state are kept on GPU machines: `host` memory,
    which outlives a worker and is larger, or the `device`'s, which is faster; `auto`:
    the faster one that fits."""
    network: Network = "auto"
    """Library that sums gradients over GPUs; `auto`: of NCCL and gloo the faster one as
    measured, if replicas have GPUs of their own."""
    wire: Literal["auto", WireType] = "auto"
    """Type in which activations and their gradients travel between stages: `bf16` or
    `fp16` for half the bytes of fp32, at the price of rounding, or their `own`; `auto`:
    bf16 with `reduction: fast` and a precision of 16 bits, else their own.
    `reduction: exact` allows no other."""
    tensor_parallel: Literal["auto"] | PositiveInt = "auto"
    """GPUs (or CPU slots) of one VM that divide the matrices of each stage among them. `auto`:
    as many as each plan chooses, 1, 2, 4, 8 or more where the model can be divided; with
    `reduction: exact` as many as the first plan chooses. A number: every plan has as many. See
    docs/training.md."""
    sequence_parallel: bool = False
    """Where slots divide matrices, they divide the sequence between these, too: norms, dropouts
    and what passes from block to block take one part of the memory at each. See docs/training.md."""

    @property
    def asked_state(self) -> StateHome | None:
        """Where every plan must keep state; ``None``: the planner chooses."""
        return None if self.state == "auto" else self.state


class ManagerConfig(Section):
    """How the manager monitors VMs."""

    heartbeat_s: PositiveFloat = 1.0
    """Time between heartbeats of an agent."""
    suspect_s: PositiveFloat = 5.0
    """Silence of a VM after which its provider is asked about it."""
    hang_s: PositiveFloat = 30.0
    """A worker that is idle at one task for so long, and for 20 mini-batches, hangs."""
    lease_s: PositiveFloat = 600.0
    """VMs without contact to a manager for this long save a checkpoint and end."""
    json_log: bool = False
    """Write the manager's log as JSON lines too, into `manager.json.log` of the job's folder."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.heartbeat_s < self.suspect_s < self.lease_s:
            raise ValueError("must be heartbeat_s < suspect_s < lease_s")
        return self
