"""What a job is submitted with, and what of it a person may change later.

The facts of a job have one shape for each reader, and each is built in one place:

- ``JobConfig`` (``config.job``): the job file as people write it;
- ``JobSettings``: what the core decides by, sections of the job file among it
  (``config.sections``). Journalled, so that a manager that starts later needs no job file;
  made from it by ``launch.submit.job_settings``;
- ``JobSpec`` (``wire.messages``): the part of it that every VM must know, fixed for the
  job's life;
- ``RankingTerms``, ``JobStatus`` (``pricing``) and ``PlanInputs`` (``morphing``): what the
  ranking of offers, the deadline policy and the planner ask, which know neither jobs nor
  managers; made by ``offers.ranker.ranking_terms``, ``core.deadline.job_status`` and
  ``core.planning.plan_inputs``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spottrain.morphing.plan.inputs import Objective
from spottrain.pricing.billing.budget import BudgetKey
from spottrain.varuna_manager.config.sections import (
    BudgetConfig,
    ManagerConfig,
    MorphingConfig,
    NonFiniteConfig,
    ResourcesConfig,
)
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import ModelFacts, Profile
from spottrain.wire.numerics import Numerics, numerics_of
from spottrain.wire.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class VmOrder:
    """A VM that another job of the pool keeps, and this one may take."""

    name: str
    """Unique for the job."""
    vm_id: str
    """As the other job calls it."""
    kind: str
    by: str
    """The other job."""
    until_s: float
    """The cloud gives it to nobody who asks later. Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGrant:
    """What a job of a pool may hold and spend, until a time."""

    pool: str
    serial: int
    """Later grants have larger ones, and take the place of earlier ones."""
    vms: tuple[tuple[str, int], ...] = ()
    """Kind (``kind_of``) and number; what is not named must not be rented."""
    until_s: float = 0.0
    """All VMs are to be returned by then. Seconds since the epoch."""
    max_microusd: int = 0
    """Micro-dollars over the job's life."""
    orders: tuple[VmOrder, ...] = ()
    """Part of ``vms``: not rented, but taken from other jobs, if at all."""
    reservation_s: float = 0.0
    """How long VMs that the job has no more use for are kept for others; 0: not at all."""
    idle_s: float = 0.0
    """For how long the job may train nothing, to move elsewhere; 0: it must not move."""

    @property
    def total(self) -> int:
        """VMs of all kinds."""
        return sum(number for _, number in self.vms)

    def is_own_budget(self, max_usd: float | None) -> bool:
        """Return whether a job's own budget is no more than the pool allows it."""
        return max_usd is not None and max_usd * 1e6 <= self.max_microusd


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """All that the core must know of a job; fixed when it is submitted, except limits."""

    uid: str
    """Unique among all jobs: launch tokens are derived from it."""
    spec: JobSpec
    facts: ModelFacts
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    morphing: MorphingConfig = field(default_factory=MorphingConfig)
    manager: ManagerConfig = field(default_factory=ManagerConfig)
    on_nonfinite: NonFiniteConfig = field(default_factory=NonFiniteConfig)
    deadline_s: float | None = None
    """Seconds since the epoch."""
    min_examples_per_s: float | None = None
    """The minimum throughput; None: none was asked for."""
    numerics: Numerics = field(default_factory=Numerics)
    """What the job file asks for, or adopted checkpoints have settled; what is ``None`` plans
    choose."""
    data_bytes: dict[str, float] = field(default_factory=dict)
    """Bytes that each VM fetches when it boots, by the cloud whose buckets hold them."""
    busy_s: float = 0.0
    """How long a VM may take for the user's data and setup before it is ready."""
    shares: bool = False
    """True if the VMs share resources in the cloud that must be removed in the end."""
    microbatch_sizes: tuple[int, ...] = ()
    """Micro-batch sizes that a profile must contain; none: that of ``spec``."""
    profile: Profile | None = None
    """A profile given by the user: nothing is measured."""
    measures_only: bool = False
    """End once the model is measured, without training."""
    grant: PoolGrant | None = None
    """Of a job in a pool: it holds within its own limits and these."""

    @property
    def has_slo(self) -> bool:
        """True if there is a deadline or a minimum throughput to keep."""
        return self.deadline_s is not None or self.min_examples_per_s is not None

    @property
    def plan_objective(self) -> Objective:
        """What plans are compared by: throughput where the deadline policy decides how
        many VMs there are."""
        return "throughput" if self.has_slo else self.morphing.objective

    def numerics_after(self, plan: Plan | None) -> Numerics:
        """Return what every plan after ``plan`` must have: in exact mode what it has settled, in
        fast mode its micro-batch size."""
        if plan is None:
            return self.numerics
        settled = numerics_of(plan)
        if self.spec.reduction == "fast":
            settled = Numerics(microbatch_size=settled.microbatch_size)
        return self.numerics.completed_by(settled)


LimitName = Literal[BudgetKey, "max_usd_per_hour", "deadline_s", "min_examples_per_s"]
BUDGET_LIMITS: frozenset[LimitName] = frozenset(("max_usd", "max_usd_per_hour", "max_gpu_hours"))
"""Those in ``JobSettings.budget``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One of the limits in ``JobSettings``; None: no bound."""

    name: LimitName
    value: float | None
