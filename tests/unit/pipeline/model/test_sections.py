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


def test_cuts_are_the_blocks_but_the_last() -> None:
    model = Model(embed=nn.Linear(1, 1), h=nn.ModuleList(linears(3)))
    assert find_cuts(model) == ("h", ("h.0", "h.1"))


def test_the_list_with_the_most_parameters_wins() -> None:
    small, large = nn.ModuleList(linears(5, 2)), nn.ModuleList(linears(2, 50))
    inner = Model(layers=large)
    assert find_cuts(Model(a=small, b=inner))[0] == "b.layers"


def test_an_outer_list_wins_over_the_lists_inside_its_blocks() -> None:
    outer = nn.ModuleList([nn.Sequential(*linears(2)) for _ in range(3)])
    assert find_cuts(Model(stages=outer))[0] == "stages"


def test_a_model_that_is_itself_a_sequence_of_blocks_is_cut() -> None:
    assert find_cuts(nn.Sequential(*linears(3))) == ("", ("0", "1"))


def test_named_blocks_keep_their_names() -> None:
    blocks = nn.Sequential(OrderedDict(zip("ab", linears(2), strict=True)))
    assert find_cuts(Model(body=blocks)) == ("body", ("body.a",))


def test_cut_points_win_over_blocks() -> None:
    model = Model(h=nn.ModuleList(linears(3)), one=CutPoint(), two=CutPoint())
    assert find_cuts(model) == ("CutPoint", ("one", "two"))


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
    cut = Cut(
        module="h.0",
        shape_of_1=(1, *sizes),
        shape_of_2=(2, *sizes),
        dtype=torch.bfloat16,
        rest=None,
        keeps_shape=True,
        must_run=False,
    )
    assert cut.shape(examples) == (examples, *sizes)
    whole = TensorSpec(shape=(examples, *sizes), dtype=torch.bfloat16)
    assert cut.num_bytes(examples) == whole.num_bytes == examples * cut.num_bytes(1)
