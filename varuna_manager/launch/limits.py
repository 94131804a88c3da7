"""Changes of a job's limits: parses them and checks what would follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from spottrain.errors import BudgetError, ConfigError
from spottrain.pricing.billing.money import NOTHING, Money
from spottrain.varuna_manager.config.base import Section
from spottrain.varuna_manager.config.files import key_paths, read_value, validate
from spottrain.varuna_manager.config.job import JobConfig, SloConfig
from spottrain.varuna_manager.config.sections import BudgetConfig
from spottrain.varuna_manager.core import limits, step
from spottrain.varuna_manager.core.model.events import LimitsChanged
from spottrain.varuna_manager.core.model.settings import Limit
from spottrain.varuna_manager.core.model.state import JobPhase, State, budgets
from spottrain.varuna_manager.format import utc

SETTABLE = (
    "budget.max_usd",
    "budget.max_usd_per_hour",
    "budget.max_gpu_hours",
    "slo.deadline",
    "slo.max_hours",
    "slo.min_examples_per_s",
)
"""Keys of the job file that can be changed before the job has ended."""
_FIXED = (
    "entrypoint",
    "microbatch_size",
    "minibatch_size",
    "precision",
    "reduction",
    "seed",
    "semantics",
)
"""Keys of the job file that ``config_fingerprint`` of a checkpoint depends on."""
_NO_BOUND = ("none", "null")


class _Limits(Section):
    budget: BudgetConfig = BudgetConfig()
    slo: SloConfig = SloConfig()


class LimitsRefusedError(BudgetError):
    """A change of limits would end the job, and the user has not confirmed it."""


def read_limits(
    texts: Iterable[str], name: str, *, launched_at_s: float, now_s: float
) -> tuple[Limit, ...]:
    """Return the limits that the user wrote as ``key=value``; ``none`` removes one.

    Args:
        texts: Such as ``budget.max_usd=60``.
        name: Of the job.
        launched_at_s: What ``slo.max_hours`` counts from, seconds since the epoch.
        now_s: A deadline must be later.

    Raises:
        ConfigError: A key is unknown, cannot be changed or is given twice, or its value
            is wrong.
    """
    values: dict[str, Any] = {}
    for text in texts:
        key, given, value = text.partition("=")
        key = key.strip()
        if not given or not value.strip():
            raise ConfigError(f"a limit must be KEY=VALUE, such as budget.max_usd=60: got {text!r}")
        if key in values:
            raise ConfigError(f"{key}: is given twice; remove one")
        values[key] = _scalar(key, value.strip())
    _check_keys(values, name)
    if "slo.deadline" in values and "slo.max_hours" in values:
        raise ConfigError("slo: give deadline or max_hours, not both")
    parsed = _parsed(values)
    return tuple(_limit(key, values[key], parsed, launched_at_s, now_s) for key in values)


def _scalar(key: str, text: str) -> Any:
    if text.lower() in _NO_BOUND:
        return None
    try:
        return read_value(text)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_keys(values: dict[str, Any], name: str) -> None:
    known = set(key_paths(JobConfig))
    for key in values:
        if key == "steps":
            raise ConfigError(
                f"steps: 'spottrain stop {name}', then 'spottrain resume {name} --steps N' "
                "changes it"
            )
        if key in _FIXED:
            raise ConfigError(
                f"{key}: the weights so far depend on it; launch a new job with init_from: {name}"
            )
        if key in known and key not in SETTABLE:
            raise ConfigError(
                f"{key}: cannot be changed after the launch; these can: {', '.join(SETTABLE)}"
            )


def _parsed(values: dict[str, Any]) -> _Limits:
    """Return the new limits alone, checked as in a job file."""
    data: dict[str, Any] = {}
    for key, value in values.items():
        section, dot, name = key.partition(".")
        if dot:
            data.setdefault(section, {})[name] = value
        else:
            data[key] = value
    return validate(_Limits, data, "set")


def _limit(key: str, value: Any, given: _Limits, launched_at_s: float, now_s: float) -> Limit:
    match key:
        case "budget.max_usd":
            return Limit(name="max_usd", value=given.budget.max_usd)
        case "budget.max_usd_per_hour":
            return Limit(name="max_usd_per_hour", value=given.budget.max_usd_per_hour)
        case "budget.max_gpu_hours":
            return Limit(name="max_gpu_hours", value=given.budget.max_gpu_hours)
        case "slo.min_examples_per_s":
            return Limit(name="min_examples_per_s", value=given.slo.min_examples_per_s)
        case _:
            deadline_s = given.slo.deadline_s(launched_at_s)
            if value is not None and deadline_s is not None and deadline_s <= now_s:
                raise ConfigError(
                    f"{key}: is in the past: got {utc(deadline_s)}; give a later time"
                )
            return Limit(name="deadline_s", value=deadline_s)


def check(state: State, event: LimitsChanged) -> None:
    """Check that a change of limits does not end the job.

    Raises:
        LimitsRefusedError: It would end the job, at once or when it is resumed.
    """
    after = limits.with_limits(state, event)
    for money in budgets(replace(after, now_s=max(after.now_s, event.at_s))):
        if money.cap is None or money.committed < money.cap:
            continue
        when = "as soon as it is resumed" if state.phase is JobPhase.ENDED else "at once"
        spent, min_usd = f"{money.spent.usd:.4f} is spent", _up(money.committed)
        if money.reserve > NOTHING:
            spent += (
                f" and {money.reserve.usd:.4f} reserved for the {money.reserve_s:g} s that "
                "the VMs may still run"
            )
        raise LimitsRefusedError(
            f"budget.{money.key}: {money.cap.usd:g} would end the job {when}: {spent}; "
            f"give more than {min_usd:.4f}, or confirm with --yes"
        )
    if state.phase is JobPhase.ACTIVE:
        ended, _ = step.step(state, event)
        if ended.phase is not JobPhase.ACTIVE and ended.outcome is not None:
            raise LimitsRefusedError(
                f"this would end the job at once: {ended.outcome.reason}; "
                "give a higher limit, or confirm with --yes"
            )


def _up(amount: Money) -> float:
    """Return dollars rounded up to the digits that are shown."""
    return -(-amount.microusd // 100) / 1e4
