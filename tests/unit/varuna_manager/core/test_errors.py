"""An internal error says what led to it."""

from __future__ import annotations

import traceback
from dataclasses import replace

import pytest
from tests.unit.varuna_manager.invariants import check_invariants
from tests.unit.varuna_manager.story import Story
from tests.view import changed

from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.errors import InternalError


def ruined(story: Story) -> Story:
    """A state that no history leads to: a generation without participants."""
    generation = replace(story.generation, participants=None)  # type: ignore[arg-type]
    story.state = changed(story.state, current_generation=generation)
    return story


def test_it_names_the_event_and_the_state_and_keeps_its_cause() -> None:
    story = ruined(Story().training("a", "b"))
    seq = story.state.recent[-1].seq
    with pytest.raises(InternalError) as caught:
        story.tell(e.VmLost, vm_id="a", reason="gone")
    message = str(caught.value)
    assert f"at event {seq + 1}, VmLost of a;" in message
    assert message.endswith("the job is active, generation 1 is running, VMs: 2 ready")
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in message
    assert "\n" not in message
    assert len(message) < 300, "no dump of the state"


def test_it_tells_the_last_events_as_a_story() -> None:
    story = Story().training("a", "b", "c", "d", steps=30)
    story.notice("c", 100.0)
    story.tell(e.VmLost, vm_id="b", reason="gone")
    error = InternalError(story.state, ValueError("x"))
    printed = "".join(traceback.format_exception(error)).splitlines()
    lines = printed[printed.index("The last events:") + 1 :]
    assert len(lines) <= 10
    assert "ProgressMade (and " in lines[-3]
    assert "InterruptionNoticed of c" in lines[-2]
    assert "c: leaves in 100 s" in lines[-2]
    assert "VmLost of b" in lines[-1]
    assert "vm ready -> gone" in lines[-1]
    assert "generation running -> breaking" in lines[-1]
    assert "generation 1 broke: b: gone" in lines[-1]


def test_a_broken_invariant_tells_the_same_story() -> None:
    story = Story().training("a", "b")
    wrong = changed(story.state, next_generation=1)
    with pytest.raises(InternalError, match=r"generations only grow.*at event \d+"):
        check_invariants(wrong)


def test_events_are_numbered_as_in_the_journal() -> None:
    story = Story().training("a", "b")
    assert story.state.recent[-1].seq == len(story.events)
    story.tell(e.SetupFailed, vm_id="a", reason="no", output="")
    story.tell(e.VmsReturned, vm_ids=("a", "b"))
    story.tell(e.TimerFired)
    assert story.state.recent[-1].seq == len(story.events)


def test_the_newest_events_decide_nothing() -> None:
    story = Story().training("a", "b")
    forgetful = replace(story.state, recent=())
    event = e.VmLost(at_s=story.now_s, vm_id="a", reason="gone")
    assert step.step(forgetful, event) == step.step(story.state, event)
