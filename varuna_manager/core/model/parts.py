"""The parts of a job's state: what changes together, so that an event copies little.

Immutable like ``state.State``, whose fields they are, and like it without slots: see
``changed.replace``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spottrain.cloud.port.provider import Offer
from spottrain.manifest import CheckpointEntry
from spottrain.pricing.billing.ledger import Ledger
from spottrain.pricing.ranking.cooldowns import Cooldown
from spottrain.pricing.ranking.order import OfferWorth
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.core.model.deadline_state import DeadlineState
from spottrain.varuna_manager.core.model.events import KnownProfile
from spottrain.wire.messages import CheckpointDamaged
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan


@dataclass(frozen=True, kw_only=True)
class MarketState:
    """What can be rented, and what it is worth to the job."""

    offers: tuple[Offer, ...] = ()
    offers_seen_at_s: float = 0.0
    worths: Mapping[str, OfferWorth] = field(default_factory=dict)
    """The worth of offers to the job by ``offer_key``, as far as it is known."""
    rankings: int = 0
    """Rankings of offers so far; ``considered``: up to which it was asked whether a move
    pays."""
    considered: int = 0


@dataclass(frozen=True, kw_only=True)
class LaunchState:
    """What clouds were asked for, what they refused, and what may be asked of them."""

    cooldowns: Mapping[str, Cooldown] = field(default_factory=dict)
    """What refused lately, by scope (``pricing.ranking.cooldowns``): it is not asked."""
    unfit: Mapping[str, int] = field(default_factory=dict)
    """VMs that could not do what they were rented for, by ``kind_of``, since one of
    the type could."""
    failing: records.FailedStarts | None = None
    """Set while VMs come up and do not train."""
    folder_trouble: str = ""
    """What is wrong with the job's folder: nothing is rented; empty: nothing is."""
    folder_trouble_since_s: float = 0.0
    kernels: str | None = None
    """In exact mode: as in ``Numerics``; ``None``: no VM has settled it."""
    images: Mapping[str, str] = field(default_factory=dict)
    """The image of the job's VMs by cloud: a newer one may have another torch."""
    intents: Mapping[str, records.Intent] = field(default_factory=dict)
    asked_clouds: frozenset[str] = frozenset()
    """Clouds that were ever asked for VMs: they may hold something of the job."""
    given_up: frozenset[str] = frozenset()
    """Intents that a cloud did not answer and that were launched elsewhere since: VMs that
    may still come of them are billed, and returned."""
    next_intent: int = 0
    takeover_epoch: int = 0
    """Epoch of the takeover by this machine; 0: the job began here."""


@dataclass(frozen=True, kw_only=True)
class FleetState:
    """The VMs that are billed."""

    reconciled: bool = False
    """Whether the provider has listed its VMs since the manager started."""
    vms: Mapping[str, records.VmRecord] = field(default_factory=dict)
    orders: Mapping[str, records.OrderRecord] = field(default_factory=dict)
    """VMs of other jobs of the pool that were asked for, by the name of the order; what has
    been answered only as long as the grant has it."""
    size_limit: records.FleetSizeLimit | None = None
    """Set when VMs were returned that the plan did not use; None: as many as allowed."""
    move: records.Move | None = None
    """To VMs that train more per dollar, while it is under way."""
    move_after_s: float = 0.0
    """When the next may begin, after one that was given up."""
    moves_of_day: tuple[tuple[float, str], ...] = ()
    """When moves of the last day began, and the offers (``offer_key``)."""
    idle_asked_s: float = 0.0
    """For how long a pool is asked to let the job train nothing, as it is to move; 0: it is not."""
    fleet_changed_at_s: float = 0.0
    """When usable slots last came or went."""
    short_since_s: float | None = None
    """Since when there are no VMs, or too few to train."""
    shortages: Mapping[str, records.Shortage] = field(default_factory=dict)
    """By kind of machine, where memory was less than a plan needed."""

    @property
    def training(self) -> tuple[records.VmRecord, ...]:
        """The VMs that the job trains on, or will: until a move has all new ones, the old."""
        waits = self.move is not None and not self.move.is_cut_over
        return tuple(vm for vm in self.vms.values() if (vm.successor if waits else vm.counts))


@dataclass(frozen=True, kw_only=True)
class PreparationState:
    """What training needs: a profile of the model, and a checkpoint to begin with."""

    profile: Profile | None = None
    profile_at_s: float = 0.0
    """When it was measured, or when that was tried last."""
    measures_again: bool = False
    """The model is to be measured before the next generation, though there is a profile."""
    known_profiles: tuple[KnownProfile, ...] = ()
    """Measured for this job and earlier ones, newest first."""
    unmeasured: tuple[str, ...] = ()
    """Types of devices whose own times remain unknown: measuring on them failed."""
    round: records.Round | None = None
    """That runs now: the checkpoint of step 0 is written, or the model is measured."""
    next_round: int = -1
    next_round_after_s: float = 0.0
    """When the next round may begin, after one that failed."""
    progress_at_s: float = 0.0
    """When the round began, or was last heard of."""
    failed_preparations: int = 0
    checkpoints: tuple[CheckpointEntry, ...] = ()
    """Complete ones, newest first."""
    damaged: tuple[CheckpointDamaged, ...] = ()
    """As the newest listing has them."""
    listed: bool = False
    """Whether the store has been listed since the manager started."""
    store_error: str = ""
    """Why the store cannot be asked now; empty: it can, as far as is known."""
    doubted: tuple[records.Doubt, ...] = ()
    """What VMs could not read, until the store is asked: nothing begins before."""
    unread: tuple[records.Doubt, ...] = ()
    """What VMs could not read although it is whole, until something trains."""
    read_after_s: float = 0.0
    """When VMs may try to read again."""
    blocked_since_s: float | None = None
    """Since when nothing can begin, as no checkpoint can be read."""
    from_scratch: bool = False
    """A person wants to begin again if no checkpoint can be used."""
    known_models: tuple[str, ...] = ()
    """Fingerprints of earlier code, whose weights fit the present one."""
    checkpoint_saved_at_s: float | None = None
    """When one was last saved, as far as that is known."""
    nccl_failures: int = 0
    """Generations that broke before a commit because NCCL failed, with all VMs there."""
    checkpoint_error: str = ""
    """Why the newest attempt to write a checkpoint failed; empty if it did not."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The generation that trains, and the plans for the next one."""

    next_generation: int = 1
    generation: records.Generation | None = None
    previous_plan: Plan | None = None
    answer: records.PlanAnswer | None = None
    plan_asked: str | None = None
    """Hash of the ``ComputePlan`` that is not answered yet."""
    morph: records.MorphChoice | None = None
    """The newest plan that was compared with the running one."""
    plan_reason: str = "start"
    """Why the next plan will differ from the present one."""
    fruitless: int = 0
    """Generations in a row that broke before they committed anything."""


@dataclass(frozen=True, kw_only=True)
class HistoryState:
    """The numbers of the report: totals, and the newest of what happened."""

    progress: records.Progress = field(default_factory=records.Progress)
    tally: records.Tally = field(default_factory=records.Tally)
    ledger: Ledger = field(default_factory=Ledger)
    """All that was spent."""
    alerts: tuple[records.BudgetAlert, ...] = ()
    """Shares of the budget that were spent and alerted to, the smallest first."""
    generations: tuple[records.GenerationSummary, ...] = ()
    """Finished ones, oldest first."""
    interruptions: tuple[records.Interruption, ...] = ()
    price_changes: tuple[records.PriceChange, ...] = ()
    slow_vms: tuple[records.SlowVm, ...] = ()
    """Those that were replaced, oldest first."""


Part = (
    MarketState
    | DeadlineState
    | LaunchState
    | FleetState
    | PreparationState
    | TrainingState
    | HistoryState
)
FIELDS: dict[type[Part], str] = {
    MarketState: "market",
    DeadlineState: "deadline",
    LaunchState: "launches",
    FleetState: "fleet",
    PreparationState: "preparation",
    TrainingState: "training",
    HistoryState: "history",
}
"""The field of ``State`` that each is."""
