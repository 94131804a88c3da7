"""Sections come from repeated blocks or CutPoints."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import CutPoint
from spottrain.pipeline.model.sections import (
    Crossing,
    Cut,
    TensorSpec,
    find_cuts,
    parameter_slots,
)


def linears(number: int, width: int = 4) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(number)]


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def choices(model: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.blocks, one.cuts) for one in find_cuts(model) if not one.is_guess]


def guesses(model: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    assert not choices(model)
    return [(one.blocks, one.cuts) for one in find_cuts(model)]


class Attention(nn.Linear):
    """A block of its own class."""


class Mixer(nn.Linear):
    """One of another."""


def unlike(number: int) -> list[nn.Module]:
    return [(Mixer, Attention)[k % 2](4, 4) for k in range(number)]


def stage(*widths: int) -> nn.Module:
    return nn.Sequential(*[each for width in widths for each in linears(1, width)])


def test_cuts_are_the_blocks_but_the_last() -> None:
    model = Model(embed=nn.Linear(1, 1), h=nn.ModuleList(linears(3)))
    assert choices(model) == [("h", ("h.0", "h.1"))]
    assert find_cuts(model)[0].units == ("h.0", "h.1", "h.2")


def test_all_lists_go_before_those_of_one_class_and_the_largest() -> None:
    small, large = nn.ModuleList(linears(5, 2)), nn.ModuleList(linears(2, 50))
    other = nn.ModuleList([nn.LayerNorm(2), nn.LayerNorm(2)])
    model = Model(a=small, other=other, b=Model(layers=large))
    names = [places.blocks for places in find_cuts(model)]
    assert names == ["a, other, b.layers", "a, b.layers", "b.layers"]


def test_blocks_of_one_class_may_be_alone_in_their_list() -> None:
    class Block(nn.Linear):
        pass

    lists = [nn.Sequential(*[Block(4, 4) for _ in range(number)]) for number in (1, 3, 1)]
    model = Model(a=lists[0], b=lists[1], c=lists[2], head=nn.Linear(4, 4))
    assert choices(model) == [
        ("a, b, c", ("a.0", "b.0", "b.1", "b.2")),
        ("b", ("b.0", "b.1")),
    ]


def test_an_outer_list_wins_over_the_lists_inside_equal_blocks() -> None:
    outer = nn.ModuleList([nn.Sequential(*linears(2)) for _ in range(3)])
    assert [name for name, _ in choices(Model(stages=outer))] == ["stages"]


def test_lists_inside_unequal_stages_win_over_the_list_of_stages() -> None:
    outer = nn.ModuleList([stage(2, 2), stage(3, 3, 3)])
    assert choices(Model(stages=outer)) == [
        (
            "stages.0, stages.1",
            ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"),
        ),
        ("stages", ("stages.0",)),
    ]


def test_a_model_that_is_itself_a_sequence_of_blocks_is_cut() -> None:
    assert choices(nn.Sequential(*linears(3))) == [("", ("0", "1"))]


@pytest.mark.parametrize(
    ("model", "blocks", "cuts"),
    [
        (Model(e=nn.Linear(4, 4), h=nn.ModuleList(unlike(3))), "h", ("h.0", "h.1")),
        (
            nn.Sequential(nn.Linear(4, 4), *unlike(3), nn.ReLU(), nn.Linear(4, 1)),
            "",
            ("1", "2"),
        ),
        (
            Model(h=nn.ModuleDict({"b": Mixer(4, 4), "a": Attention(4, 4)})),
            "h",
            ("h.b",),
        ),
        (
            Model(e=nn.Linear(4, 4), b0=Mixer(4, 4), n=Attention(4, 4), b1=Mixer(4, 4)),
            "",
            ("b0",),
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(), nn.LayerNorm(4)),
            "",
            ("2",),
        ),
    ],
    ids=[
        "unlike blocks",
        "ends around them",
        "a dictionary",
        "attributes",
        "torch's own",
    ],
)
def test_modules_side_by_side_are_tried_last(
    model: nn.Module, blocks: str, cuts: tuple[str, ...]
) -> None:
    assert guesses(model)[0] == (blocks, cuts)


def test_siblings_are_tried_all_together_then_the_largest_alone() -> None:
    small, large = (nn.ModuleList([Mixer(n, n), Attention(n, n)]) for n in (2, 9))
    names = [name for name, _ in guesses(Model(a=small, b=large))]
    assert names == ["a, b", "b", "a"]


def test_named_blocks_keep_their_names() -> None:
    blocks = nn.Sequential(OrderedDict(zip("ab", linears(2), strict=True)))
    assert choices(Model(body=blocks)) == [("body", ("body.a",))]


def test_cut_points_win_over_blocks() -> None:
    model = Model(h=nn.ModuleList(linears(3)), one=CutPoint(), two=CutPoint())
    assert choices(model) == [("CutPoint", ("one", "two"))]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        Model(h=nn.ModuleList(linears(1))),
        Model(h=nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])),
        Model(h=nn.ModuleList([nn.Dropout(), nn.Dropout()])),
    ],
    ids=["no list", "one block", "different blocks", "blocks without parameters"],
)
def test_a_model_without_repeated_blocks_is_refused(model: nn.Module) -> None:
    with pytest.raises(UserCodeError, match="no repeated blocks and no CutPoint: got"):
        find_cuts(model)


def test_a_tied_parameter_goes_by_its_first_name() -> None:
    model = Model(embed=nn.Linear(3, 3), head=nn.Linear(3, 3, bias=False))
    model.get_submodule("head").weight = model.get_parameter("embed.weight")
    slots = parameter_slots(model)
    assert list(slots) == ["embed.weight", "embed.bias"]
    assert [attribute for _, attribute in slots["embed.weight"]] == ["weight", "weight"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 50))
def test_an_activation_grows_with_the_micro_batch_in_its_batch_dimension_alone(
    sizes: list[int], examples: int
) -> None:
    crossing = Crossing(
        name="h.0",
        shape_of_1=(1, *sizes),
        shape_of_2=(2, *sizes),
        dtype=torch.bfloat16,
        has_gradient=True,
    )
    cut = Cut(ends={}, crossing=(crossing,))
    assert crossing.shape(examples) == (examples, *sizes)
    whole = TensorSpec(shape=(examples, *sizes), dtype=torch.bfloat16)
    assert cut.num_bytes(examples) == whole.num_bytes == examples * cut.num_bytes(1)
