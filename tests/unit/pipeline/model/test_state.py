"""State of an optimizer as tensors: nested, restored, never mixed up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.state import check_forms, flatten, keep_leaves

CONSTANTS = st.sampled_from(["a,b->ab", "", None])
LEAVES = st.integers(-9, 9) | st.floats(allow_nan=False) | st.booleans()
VALUES = st.recursive(
    LEAVES | CONSTANTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)
    ),
)
STATES = st.dictionaries(st.sampled_from("abc"), VALUES)


@given(STATES)
def test_a_state_is_built_again_from_its_leaves(state: dict[str, Any]) -> None:
    flat = flatten("weight", state)

    built = {key: form.build(flat.leaves) for key, form in flat.forms.items()}

    assert built == {key: value for key, value in state.items() if value is not None}
    assert flatten("weight", built) == flat


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"b": [1, "x"]}, r"keys of the first step, \['a'\]: got \['b'\]"),
        ({"a": (1, "x")}, r"the first step, \[\*, 'x'\]: got \(\*, 'x'\)"),
        ({"a": [1, "y"]}, r"the first step, \[\*, 'x'\]: got \[\*, 'y'\]"),
        ({"a": [1, 2]}, r"the first step, \[\*, 'x'\]: got \[\*, \*\]"),
        ({"a": 1}, r"the first step, \[\*, 'x'\]: got \*"),
    ],
)
def test_another_form_is_refused(made: dict[str, Any], message: str) -> None:
    kept = flatten("weight", {"a": [1, "x"]}).forms
    check_forms("weight", kept, flatten("weight", {"a": [2, "x"]}).forms)

    with pytest.raises(UserCodeError, match=message):
        check_forms("weight", kept, flatten("weight", made).forms)


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(UserCodeError, match=r"'a\[0\]' of weight is there twice"):
        flatten("weight", {"a": [1], "a[0]": 2})


@pytest.mark.parametrize("together", [True, False])
def test_tensors_that_have_changed_places_are_not_mixed_up(together: bool) -> None:
    memory = torch.arange(12.0)
    parts = memory.view(3, 2, 2).unbind()
    places = {f"a[{k}]": p if together else p.clone() for k, p in enumerate(parts)}
    first, second, third = (place.clone() for place in places.values())

    moved = keep_leaves(
        "weight",
        {"a[0]": places["a[1]"], "a[1]": places["a[0]"], "a[2]": places["a[2]"].T},
        places,
    )

    assert list(moved) == list(places)
    assert torch.equal(places["a[0]"], second)
    assert torch.equal(places["a[1]"], first)
    assert torch.equal(places["a[2]"], third.T)
    assert keep_leaves("weight", places, places) == {}
