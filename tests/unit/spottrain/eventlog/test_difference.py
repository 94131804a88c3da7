"""The difference of two values leads from one to the other, order included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.codec import from_data, to_data
from spottrain.errors import WireError
from spottrain.eventlog.difference import apply, difference


class Place(NamedTuple):
    zone: str
    number: int


class Mood(StrEnum):
    CALM = "calm"
    WILD = "wild"


@dataclass(frozen=True, slots=True)
class Leaf:
    name: str = ""
    value: float = 0.0
    mood: Mood = Mood.CALM


@dataclass(frozen=True, slots=True)
class Tree:
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    pairs: tuple[tuple[int, Leaf], ...] = ()
    named: Mapping[str, Leaf] = field(default_factory=dict)
    placed: Mapping[Place, tuple[int, ...]] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    memo: object = field(default=None, compare=False)


names = st.text(max_size=3)
leaves = st.builds(
    Leaf, names, st.floats(allow_nan=False) | st.integers(0, 3), st.sampled_from(Mood)
)
places = st.builds(Place, names, st.integers(0, 3))
trees = st.builds(
    Tree,
    leaf=st.none() | leaves,
    leaves=st.lists(leaves, max_size=6).map(tuple),
    pairs=st.lists(st.tuples(st.integers(0, 3), leaves), max_size=4).map(tuple),
    named=st.dictionaries(names, leaves, max_size=4),
    placed=st.dictionaries(places, st.lists(st.integers(), max_size=3).map(tuple), max_size=4),
    names=st.frozensets(names, max_size=3),
)


def through_json(value: object) -> object:
    return json.loads(json.dumps(value))


def led(before: Tree, after: Tree) -> Tree:
    """Return where the stored difference leads."""
    changes = difference(before, after)
    return apply(before, through_json(changes))  # type: ignore[arg-type]


@given(trees, trees)
def test_a_difference_leads_from_any_value_to_any_other(before: Tree, after: Tree) -> None:
    found = led(before, after)
    assert found == after
    assert list(found.named) == list(after.named)
    assert list(found.placed) == list(after.placed)


@given(trees, st.data())
def test_items_that_come_go_and_change_are_found(before: Tree, data: st.DataObject) -> None:
    kept = (
        data.draw(st.lists(st.sampled_from(before.leaves), unique_by=id)) if (before.leaves) else []
    )
    mixed = [*kept, *data.draw(st.lists(leaves, max_size=3))]
    after = replace(before, leaves=tuple(data.draw(st.permutations(mixed))))
    assert led(before, after) == after


@given(trees, st.data())
def test_entries_that_move_are_moved(before: Tree, data: st.DataObject) -> None:
    names = data.draw(st.permutations(list(before.named)))
    after = replace(before, named={name: before.named[name] for name in names})
    assert list(led(before, after).named) == names


@given(trees)
def test_a_value_is_read_back_as_it_was_written(tree: Tree) -> None:
    assert from_data(Tree, through_json(to_data(tree))) == tree


def test_a_difference_costs_what_has_changed() -> None:
    leaves = tuple(Leaf(f"leaf {number}", number) for number in range(1000))
    before = Tree(leaves=leaves, named={leaf.name: leaf for leaf in leaves})
    rest = {leaf.name: leaf for leaf in leaves if leaf.value != 7}
    moved = replace(before, named={**rest, "leaf 7": leaves[7]})
    assert list(led(before, moved).named)[-1] == "leaf 7"
    assert len(json.dumps(difference(before, moved))) < 100
    changed = (*leaves[1:500], Leaf("new"), *leaves[501:], Leaf("last"))
    after = replace(before, leaves=changed, named={**before.named, "leaf 7": Leaf("x")})
    assert len(json.dumps(difference(before, after))) < 400
    assert difference(before, replace(before)) is None
    assert difference(before, replace(before, memo=1)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"other": ["=", 1]},
        ["?", 1],
        {"leaf": ["=", {"color": "red"}]},
        {"leaf": {}, "x": 1},
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(WireError):
        apply(Tree(), changes)
