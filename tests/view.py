"""What tests read and write of a job's state: the one place that knows where a field is.

Tests say ``view.step`` and ``changed(state, vms=vms)``, so that a field that is renamed
or moves to another part of the state changes a line here and no test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

from spottrain.cloud.port.provider import Offer
from spottrain.codec import hints
from spottrain.eventlog.changed import replace
from spottrain.manifest import CheckpointEntry
from spottrain.pricing.billing.ledger import Ledger
from spottrain.pricing.deadline.model import FleetDecision
from spottrain.pricing.ranking.cooldowns import Cooldown
from spottrain.pricing.ranking.order import OfferWorth
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.core.model.state import State
from spottrain.wire.messages import CheckpointDamaged
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan

T = TypeVar("T")
_SECTIONS = {
    key: section
    for section in ("resources", "budget", "morphing", "manager", "on_nonfinite")
    for key in hints(JobSettings)[section].model_fields
}
"""The section of the job file that a setting is in, by its key."""


class Field(Generic[T]):
    """A field of the state, by its path there."""

    def __init__(self, path: str) -> None:
        self._path = path.split(".")
        self._read: Callable[[State], T] = attrgetter(path)

    def __get__(self, view: View, owner: type[View]) -> T:
        return self._read(view.state)

    def put(self, state: State, value: object) -> State:
        result: State = _put(state, self._path, value)
        return result


def _put(whole: Any, path: Sequence[str], value: object) -> Any:
    first, *rest = path
    if rest:
        value = _put(getattr(whole, first), rest, value)
    return replace(whole, **{first: value})


class View:
    """A job's state in the words of tests."""

    def __init__(self, state: State) -> None:
        self.state = state

    # What can be rented, and what was asked for.
    offers = Field[tuple[Offer, ...]]("market.offers")
    offers_seen_at_s = Field[float]("market.offers_seen_at_s")
    worths = Field[Mapping[str, OfferWorth]]("market.worths")
    decision = Field[FleetDecision | None]("deadline.decision")
    intents = Field[Mapping[str, records.Intent]]("launches.intents")
    cooldowns = Field[Mapping[str, Cooldown]]("launches.cooldowns")
    unfit = Field[Mapping[str, int]]("launches.unfit")
    kernels = Field[str | None]("launches.kernels")
    images = Field[Mapping[str, str]]("launches.images")

    # VMs.
    reconciled = Field[bool]("fleet.reconciled")
    vms = Field[Mapping[str, records.VmRecord]]("fleet.vms")
    orders = Field[Mapping[str, records.OrderRecord]]("fleet.orders")
    move = Field[records.Move | None]("fleet.move")
    shortages = Field[Mapping[str, records.Shortage]]("fleet.shortages")

    def vm(self, vm_id: str) -> records.VmRecord:
        return self.vms[vm_id]

    # Before training.
    profile = Field[Profile | None]("preparation.profile")
    round = Field[records.Round | None]("preparation.round")
    failed_preparations = Field[int]("preparation.failed_preparations")
    checkpoints = Field[tuple[CheckpointEntry, ...]]("preparation.checkpoints")
    damaged = Field[tuple[CheckpointDamaged, ...]]("preparation.damaged")
    doubted = Field[tuple[records.Doubt, ...]]("preparation.doubted")
    store_error = Field[str]("preparation.store_error")
    checkpoint_error = Field[str]("preparation.checkpoint_error")

    # Training.
    current_generation = Field[records.Generation | None]("training.generation")
    next_generation = Field[int]("training.next_generation")
    previous_plan = Field[Plan | None]("training.previous_plan")
    plan_asked = Field[str | None]("training.plan_asked")
    plan_reason = Field[str]("training.plan_reason")
    morph = Field[records.MorphChoice | None]("training.morph")
    fruitless = Field[int]("training.fruitless")

    @property
    def generation(self) -> records.Generation:
        """The current generation, where there must be one."""
        assert self.current_generation is not None, self.state.activity
        return self.current_generation

    # What has been reached, and what it cost.
    progress = Field[records.Progress]("history.progress")
    step = Field[int]("history.progress.step")
    highest_step = Field[int]("history.progress.highest_step")
    copied_step = Field[int | None]("history.progress.copied_step")
    minibatches_lost = Field[int]("history.progress.minibatches_lost")
    minibatches_recomputed = Field[int]("history.progress.minibatches_recomputed")
    tally = Field[records.Tally]("history.tally")
    ledger = Field[Ledger]("history.ledger")
    alerts = Field[tuple[records.BudgetAlert, ...]]("history.alerts")
    generations = Field[tuple[records.GenerationSummary, ...]]("history.generations")
    interruptions = Field[tuple[records.Interruption, ...]]("history.interruptions")
    slow_vms = Field[tuple[records.SlowVm, ...]]("history.slow_vms")


def changed(state: State, **values: object) -> State:
    """Return a state with other values in fields, by their names in ``View``."""
    for name, value in values.items():
        field: Field[Any] = vars(View)[name]
        state = field.put(state, value)
    return state


def settings_with(settings: JobSettings, **values: object) -> JobSettings:
    """Return a job's settings with other values, by their keys, whatever their sections."""
    for name, value in values.items():
        if (section := _SECTIONS.get(name)) is not None:
            value = getattr(settings, section).model_copy(update={name: value})
        settings = replace(settings, **{section or name: value})  # type: ignore[arg-type]
    return settings
