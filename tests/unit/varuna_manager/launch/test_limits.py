"""The limits that a user may change, and messages about mistakes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.varuna_manager.story import FOUR, Story

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.settings import Limit, LimitName
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.launch.limits import (
    LimitsRefusedError,
    check,
    read_limits,
)

NOW_S = 1.9e9
"""2030-03-17T17:46:40Z"""


def config(**changes: Any) -> JobConfig:
    data = {
        "name": "demo",
        "entrypoint": "train:job",
        "minibatch_size": 16,
        "steps": 5,
        "slo": {"max_hours": 5},
        "budget": {"max_usd": 3, "alerts": [0.25]},
    }
    return parse_config({**data, **changes}, "job.yaml")


def read(*texts: str) -> dict[str, float | None]:
    limits = read_limits(texts, "demo", launched_at_s=NOW_S - 3600.0, now_s=NOW_S)
    return {limit.name: limit.value for limit in limits}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("budget.max_usd=60", "max_usd", 60.0),
        ("budget.max_usd = 0.5", "max_usd", 0.5),
        ("budget.max_usd=none", "max_usd", None),
        ("budget.max_usd_per_hour=1.25", "max_usd_per_hour", 1.25),
        ("budget.max_gpu_hours=500", "max_gpu_hours", 500.0),
        ("slo.deadline=2030-03-17T18:46:40Z", "deadline_s", NOW_S + 3600),
        ("slo.deadline=2030-03-17T20:46:40+02:00", "deadline_s", NOW_S + 3600),
        ("slo.deadline=none", "deadline_s", None),
        ("slo.max_hours=2", "deadline_s", NOW_S + 3600),
        ("slo.max_hours=None", "deadline_s", None),
        ("slo.min_examples_per_s=7", "min_examples_per_s", 7.0),
    ],
)
def test_a_limit_is_read_as_in_a_job_file(text: str, name: str, value: float | None) -> None:
    assert read(text) == {name: value}


def test_several_limits_change_at_once() -> None:
    assert read("budget.max_usd=60", "slo.max_hours=2") == {
        "max_usd": 60.0,
        "deadline_s": NOW_S + 3600,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget.max_usd", "must be KEY=VALUE, such as budget.max_usd=60"),
        ("budget.max_usd=", "must be KEY=VALUE"),
        ("budget.max_usd=0", "budget.max_usd: must be greater than 0: got 0"),
        ("budget.max_usd=60 EUR", "must be a number of US dollars"),
        ("budget.max_us=60", "budget.max_us: unknown key; did you mean max_usd?"),
        ("max_usd=60", "max_usd: unknown key; did you mean budget.max_usd?"),
        ("name.x=60", "name: unknown key"),
        ("steps=60", "steps: .* 'spottrain resume .* --steps N' changes it"),
        ("minibatch_size=60", "minibatch_size: .* new job with init_from: "),
        ("budget.alerts=[0.1]", "budget.alerts: cannot be changed after"),
        ("slo.deadline=2030-03-17T18:46:40", "must have a time zone, .* for UTC"),
        ("slo.deadline=tomorrow", "slo.deadline: must be a time, such as"),
        (
            "slo.deadline=2030-03-17T17:46:39Z",
            "slo.deadline: is in the past: got 2030-03-17T17:46:39Z; give a later",
        ),
        ("slo.max_hours=0.5", "slo.max_hours: is in the past"),
        ("budget.max_usd={", "must be a plain value"),
    ],
)
def test_a_wrong_limit_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read(text)
    assert "\n" not in str(refused.value)


def test_a_limit_is_given_once() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        read("budget.max_usd=6", "budget.max_usd=7")
    with pytest.raises(ConfigError, match="deadline or max_hours, not both"):
        read("slo.deadline=2030-03-17T18:46:40Z", "slo.max_hours=7")


# --- What would follow ------------------------------------------------------------------------


def changed(story: Story, name: LimitName, value: float | None) -> e.LimitsChanged:
    limit = Limit(name=name, value=value)
    return e.LimitsChanged(at_s=story.now_s, by="a person", limits=(limit,))


def test_a_cap_below_what_is_committed_is_refused_with_numbers() -> None:
    story = Story(max_usd=10.0).training(*FOUR)
    story.now_s += 900.0  # 1 USD
    check(story.state, changed(story, "max_usd", 2.5))
    with pytest.raises(LimitsRefusedError) as refused:
        check(story.state, changed(story, "max_usd", 1.5))
    assert str(refused.value) == (
        "budget.max_usd: 1.5 would end the job at once: 1.0033 is spent and 0.9667 "
        "reserved for the 870 s that the VMs may still run; give more than 1.9700, or "
        "confirm with --yes"
    )
    assert refused.value.exit_code == 4


def test_gpu_hours_fewer_than_are_committed_are_refused() -> None:
    story = Story(max_usd=10.0).training(*FOUR)
    story.now_s += 900.0
    check(story.state, changed(story, "max_gpu_hours", 2.5))
    with pytest.raises(LimitsRefusedError, match=r"^budget\.max_gpu_hours: 1\.5 would end"):
        check(story.state, changed(story, "max_gpu_hours", 1.5))


def test_a_budget_for_not_one_vm_is_refused_while_the_job_waits() -> None:
    story = Story(max_usd=10.0)
    story.start()
    story.tell(e.VmsLaunched, intent="intent-0", vms=())
    with pytest.raises(
        LimitsRefusedError, match=r"^this would end the job at once: .*; give a higher"
    ):
        check(story.state, changed(story, "max_usd", 0.01))


def test_a_limit_that_would_end_a_stopped_job_when_resumed_is_refused() -> None:
    story = Story(max_usd=10.0).training(*FOUR)
    story.now_s += 900.0
    story.tell(e.StopRequested, by="a person", now=True)
    story.tell(e.VmsReturned, vm_ids=FOUR)
    assert story.state.phase is JobPhase.ENDED
    with pytest.raises(LimitsRefusedError, match="as soon as it is resumed: 1"):
        check(story.state, changed(story, "max_usd", 1.0))
    check(story.state, changed(story, "max_usd", 1.5))


def test_what_ends_nothing_is_accepted() -> None:
    story = Story(max_usd=10.0).training(*FOUR)
    check(story.state, changed(story, "max_usd", None))
    check(story.state, changed(story, "max_usd_per_hour", 0.5))
    check(story.state, changed(story, "deadline_s", story.now_s + 1.0))
    check(story.state, changed(story, "min_examples_per_s", 1e9))
