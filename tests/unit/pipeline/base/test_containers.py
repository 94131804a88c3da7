"""Batches in classes that torch's pytree does not know."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_structure

from spottrain.pipeline.base.blank import blank_of
from spottrain.pipeline.base.containers import know_classes_in, opaque_class


class Tokens(UserDict[str, Any]):
    """As transformers' BatchEncoding: more attributes, and those by key."""

    def __init__(self, data: dict[str, Any], kind: str) -> None:
        super().__init__(data)
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class Pair:
    """As users write them."""

    x: torch.Tensor
    more: Any


class Other:
    """Neither a dictionary nor a dataclass."""

    def __init__(self, x: torch.Tensor) -> None:
        self.parts = [x]


def test_tensors_in_dictionaries_of_other_kinds_and_in_dataclasses_are_leaves() -> None:
    batch = Pair(torch.ones(2), [Tokens({"ids": torch.zeros(3), "n": 4}, "text")])
    know_classes_in(batch)
    know_classes_in(batch)  # it may be seen again
    made = tree_map(lambda leaf: leaf + 1, batch)
    assert isinstance(made, Pair)
    assert made.x.tolist() == [2, 2]
    (tokens,) = made.more
    assert (type(tokens), tokens.kind, tokens["n"]) == (Tokens, "text", 5)
    assert tokens.ids.tolist() == [1, 1, 1]
    assert batch.more[0]["n"] == 4


def test_structures_of_equal_batches_are_equal() -> None:
    one, two = (Tokens({"ids": torch.zeros(n)}, "text") for n in (1, 2))
    know_classes_in(one)
    assert tree_structure(one) == tree_structure(two)
    assert repr(tree_structure(one)) == repr(tree_structure(two))
    other = Tokens({"labels": torch.zeros(1)}, "text")
    assert tree_structure(one) != tree_structure(other)


@pytest.mark.rotated
def test_a_stand_in_is_made_in_a_process_that_has_seen_no_such_batch() -> None:
    one, two = (Tokens({"ids": torch.zeros(n, 3)}, "text") for n in (1, 2))
    know_classes_in(one)
    blank = blank_of(one, two)
    assert blank is not None
    code = (
        "import pickle, sys; blank = pickle.load(sys.stdin.buffer); "
        "batch = blank.make(5); print(type(batch).__name__, *batch.ids.shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(blank),
        stdout=subprocess.PIPE,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.split() == [b"Tokens", b"5", b"3"]


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"x": Other(torch.ones(1))}, "Other"),
        ([torch.ones(1), 3, "text", None], ""),
        (torch.ones(1), ""),
    ],
)
def test_what_hides_its_tensors_is_named(batch: Any, name: str) -> None:
    know_classes_in(batch)
    assert opaque_class(batch) == name


def test_an_object_that_is_no_container_stays_a_leaf() -> None:
    other = Other(torch.ones(1))
    know_classes_in([other])
    assert tree_leaves([other]) == [other]
    assert tree_flatten(Pair)[0] == [Pair]  # the class itself is none
