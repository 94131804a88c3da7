"""Copies of states are those of ``dataclasses.replace``."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.eventlog.changed import replace
from spottrain.varuna_manager.core.model.parts import HistoryState
from spottrain.varuna_manager.core.model.records import Tally
from spottrain.varuna_manager.core.model.state import State

CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "now_s": st.floats(allow_nan=False),
        "activity": st.text(),
        "ending_checkpoint": st.booleans(),
        "history": st.just(HistoryState(tally=Tally(morphs=2))),
    },
)


@given(CHANGES, CHANGES)
def test_a_copy_differs_in_what_was_asked_and_the_original_stays(
    first: dict[str, object], second: dict[str, object]
) -> None:
    before = dataclasses.replace(State(), **first)  # type: ignore[arg-type]
    same = dataclasses.replace(before)
    after = replace(before, **second)  # type: ignore[arg-type]
    assert after == dataclasses.replace(before, **second)  # type: ignore[arg-type]
    assert before == same
    assert all(
        getattr(after, one.name) is getattr(before, one.name)
        for one in dataclasses.fields(State)
        if one.name not in second
    )


def test_a_state_can_not_be_changed_nor_get_other_fields() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        State().now_s = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="nothing_known"):
        replace(State(), nothing_known=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="nothing_known"):
        replace(Tally(), nothing_known=1)  # type: ignore[call-arg]


def test_a_copy_does_not_keep_what_was_computed_of_the_original() -> None:
    @dataclasses.dataclass(frozen=True)
    class Half:
        of: int

        @functools.cached_property
        def value(self) -> float:
            return self.of / 2

    whole = Half(2)
    assert whole.value == 1.0
    assert replace(whole, of=6).value == 3.0
