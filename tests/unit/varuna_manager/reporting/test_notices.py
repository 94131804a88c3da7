from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.varuna_manager.story import Story
from tests.view import View, changed

from spottrain.varuna_manager.config.notify import NotifyConfig
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import Interruption
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.reporting.notices import Notice, notices

ALL = NotifyConfig(losses=3, window_s=100.0, stall_s=600.0)


def told(state: State, now_s: float | None = None) -> list[str]:
    now_s = state.now_s if now_s is None else now_s
    return [one.notice for one in notices(state, ALL, now_s)]


def with_losses(*at_s: float) -> State:
    story = Story().training("a", "b")
    losses = tuple(
        Interruption(interruption="kill", vm_id=f"v{i}", at_s=t, reason="gone", generation=None)
        for i, t in enumerate(at_s)
    )
    return changed(story.state, interruptions=losses)


def storms(state: State) -> list[Notice]:
    return [one for one in notices(state, ALL, state.now_s) if one.notice == "losses"]


def test_a_storm_is_told_once_and_the_next_again() -> None:
    assert storms(with_losses(1.0, 50.0)) == []
    (storm,) = storms(with_losses(1.0, 50.0, 99.0, 150.0, 190.0))
    assert storm.text == ("3 interruptions within 100 s: v0 (kill), v1 (kill), v2 (kill)")
    assert len(storms(with_losses(1.0, 2.0, 3.0, 500.0, 501.0, 502.0))) == 2


@given(st.lists(st.floats(0, 1000), max_size=12).map(sorted), st.integers(0, 12))
def test_a_notice_stays_the_same_when_more_happens(at_s: list[float], cut: int) -> None:
    before = {one.key for one in storms(with_losses(*at_s[:cut]))}
    assert before <= {one.key for one in storms(with_losses(*at_s))}


def test_a_training_job_that_commits_nothing_stalls_once() -> None:
    state = Story().training("a", "b").state
    last_s = View(state).progress.last_commit_at_s
    assert last_s is not None
    assert told(state, last_s + 600.0) == []
    assert told(state, last_s + 601.0) == ["stall"]
    late = [notices(state, ALL, last_s + after_s)[0].key for after_s in (601.0, 999.0)]
    assert late[0] == late[1]


def test_every_share_of_the_budget_is_told() -> None:
    story = Story(max_usd=10.0, alerts=(0.5, 0.8)).training("a", "b")
    while len(story.alerts) < 2:
        story.wait(600.0)
    texts = [one.text for one in notices(story.state, ALL, story.now_s)]
    assert "50% of the budget of 10 USD is spent" in texts
    assert "80% of the budget of 10 USD is spent" in texts


def test_losses_that_are_not_finite_are_told_when_they_end_the_job() -> None:
    story = Story(stop_after=2).training("a", "b")
    story.commit(4, skipped="loss")
    assert told(story.state) == []
    story.commit(5, skipped="loss")
    assert told(story.state) == ["nonfinite"]


def test_the_end_is_told_and_only_what_is_asked_for() -> None:
    story = Story().training("a", "b")
    story.tell(e.StopRequested, by="me", now=True)
    assert told(story.state) == []
    story.tell(e.VmsReturned, vm_ids=("a", "b"))
    (end,) = notices(story.state, ALL, story.now_s)
    assert end.notice == "end"
    assert end.text.startswith("stopped: ")
    budget = ALL.model_copy(update={"on": ("budget",)})
    assert notices(story.state, budget, story.now_s) == ()
