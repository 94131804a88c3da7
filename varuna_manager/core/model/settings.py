"""What a job is submitted with, and what of it a person may change later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spottrain.morphing.plan.inputs import Objective
from spottrain.pricing.ranking.cooldowns import Span
from spottrain.wire import JobSpec, ModelFacts, Profile, ScheduleKind


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """All that the core must know of a job; fixed when it is submitted, but for limits."""

    uid: str
    """Unique for ever: launch tokens are derived from it."""
    spec: JobSpec
    facts: ModelFacts
    max_vms: int
    min_vms: int = 1
    """No plan is made with fewer VMs than this."""
    allow_on_demand: bool = False
    """Rent on demand too."""
    max_usd: float | None = None
    max_usd_per_hour: float | None = None
    alerts: tuple[float, ...] = ()
    """Shares of ``max_usd`` that are told of when they are spent."""
    storage_usd_per_gb_month: float = 0.0
    zone_usd_per_gb: float | None = None
    """What a gigabyte from zone to zone of a region costs; None: what the cloud asks."""
    deadline_s: float | None = None
    """Seconds since the epoch."""
    min_examples_per_s: float | None = None
    """Throughput that was asked for; None: none was."""
    capacity_wait_s: float | None = None
    """Give up (exit code 5) after waiting this long without a VM; None waits on."""
    microbatch_size: int | None = None
    """What every plan must have; None: the first plan settles it."""
    schedule: ScheduleKind | None = None
    """What every plan must have; None: the planner chooses."""
    recompute: bool | None = None
    """What every plan must have; None: the planner chooses."""
    objective: Objective = "throughput"
    """What plans are compared by."""
    suspect_s: float = 5.0
    """Heartbeats missing for this long make a VM suspect."""
    debounce_s: float = 2.0
    """How long the fleet must be quiet before a plan is made for growth."""
    data_bytes: dict[str, float] = field(default_factory=dict)
    """What each VM fetches when it boots, by the cloud whose buckets hold it."""
    busy_s: float = 0.0
    """How long a VM may be busy with the user's data and setup before it is ready."""
    boot_wait_s: float = 60.0
    """How long the first plan waits for VMs that are still booting."""
    cooldown_s: float = 30.0
    """How long what has refused is left alone at first; longer if it refuses again."""
    span: Span = "region"
    """How far apart VMs that train together may be."""
    shares: bool = False
    """Whether the VMs share things in the cloud that must be removed in the end."""
    microbatch_sizes: tuple[int, ...] = ()
    """Micro-batch sizes that a profile must know; none: that of ``spec``."""
    profile: Profile | None = None
    """A profile that the user gives: nothing is measured."""

    @property
    def has_slo(self) -> bool:
        """Whether there is a deadline or a least throughput to keep."""
        return self.deadline_s is not None or self.min_examples_per_s is not None

    @property
    def plan_objective(self) -> Objective:
        """What plans are compared by: where a promise decides how many VMs there are,
        plans make the most of them."""
        return "throughput" if self.has_slo else self.objective


LimitName = Literal["max_usd", "max_usd_per_hour", "deadline_s", "min_examples_per_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One of the limits in ``JobSettings``; None: no bound."""

    name: LimitName
    value: float | None
