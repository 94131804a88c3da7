"""The tracer offers a cut only where it knows all that crosses it."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import costly
from tests.unit.pipeline.blocks import WIDTH, Blocks, linear, make_job, plain
from torch import nn

from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.recorder import Recorder
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.model.tracer import trace


def loss_in_stages(job: TrainingJob, layout: ModelLayout) -> torch.Tensor:
    """Run the job's model with one section a stage."""
    model, batch = materialise(job, 0), job.collate([job.dataset[0], job.dataset[1]])
    received: Any = []
    for section, names in enumerate(layout.parameters):
        tensors = {section: {n: model.get_parameter(n).detach() for n in names}}
        stage = StageModel(job, layout, range(section, section + 1), tensors)
        received = stage.forward(batch, received, int)
        if section < layout.num_sections - 1:
            received = [one.detach() for one in received]
    return received[0].detach()  # type: ignore[no-any-return]


def loss_as_a_whole(job: TrainingJob) -> torch.Tensor:
    batch = job.collate([job.dataset[0], job.dataset[1]])
    return job.loss(materialise(job, 0), batch)[0].detach()


def assert_uncut(job: TrainingJob, reason: str) -> None:
    layout = trace(job)
    assert layout.num_sections == 1
    assert re.search(reason, layout.uncut), layout.uncut


# --- Parameters -----------------------------------------------------------------------


def test_each_parameter_is_in_the_section_that_uses_it() -> None:
    layout = trace(make_job(plain))
    assert layout.blocks == "blocks"
    assert [cut.ends[0].module for cut in layout.cuts] == ["blocks.0", "blocks.1", "blocks.2"]
    assert layout.parameters[1] == ("blocks.1.weight", "blocks.1.bias")
    assert layout.parameters[3][:2] == ("blocks.3.weight", "blocks.3.bias")
    assert layout.parameters[3][2:4] == ("head.weight", "head.bias")
    assert layout.tied == ()


def test_a_parameter_that_nothing_uses_is_in_section_0() -> None:
    layout = trace(make_job(plain))
    assert {"norm.weight", "norm.bias"} <= set(layout.parameters[0])


def test_an_expert_that_no_example_chose_is_in_the_section_of_its_block() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([linear(), linear()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts[0](x)  # type: ignore[no-any-return]

    layout = trace(make_job(plain, Experts))
    assert "blocks.2.experts.1.weight" in layout.parameters[2]


def test_a_parameter_used_at_both_ends_is_tied_and_in_both_sections() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = plain(self, x) @ self.embed.weight + self.blocks[1].bias
        return both

    layout = trace(make_job(body))
    assert [(t.name, t.sections) for t in layout.tied] == [
        ("embed.weight", (0, 3)),
        ("blocks.1.bias", (1, 3)),
    ]
    assert "embed.weight" in layout.parameters[0]
    assert "embed.weight" in layout.parameters[3]
    job = make_job(body)
    assert torch.equal(loss_in_stages(job, layout), loss_as_a_whole(job))


def test_a_tied_parameter_fetched_early_keeps_a_model_whole_since_stages_hold_copies() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        early: torch.Tensor = self.embed.weight
        return plain(self, x) @ early

    assert_uncut(make_job(body), "uses parameter embed.weight, which several")


def test_a_parameter_of_one_section_may_be_fetched_early() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        early: torch.Tensor = self.norm.weight
        return plain(self, x) * early

    job = make_job(body)
    layout = trace(job)
    assert layout.tied == ()
    assert torch.equal(loss_in_stages(job, layout), loss_as_a_whole(job))


# --- What crosses ---------------------------------------------------------------------


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3))
@costly
def test_a_skip_passes_every_cut_on_its_way(
    skips: set[tuple[int, int]],
) -> None:
    """A skip (i, j) adds what went into block i to what goes into block j."""

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        x, inputs = self.embed(x), []
        for index, block in enumerate(self.blocks):
            inputs.append(x)
            for start, end in skips:
                if end == index and start <= index:
                    x = x + inputs[start]
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    job = make_job(body)
    layout = trace(job)
    for index, cut in enumerate(layout.cuts):
        # What goes into block 0 was made in section 0, as block 0 is; into others, before them.
        passing = {start for start, end in skips if start <= index < end}
        assert len(cut.crossing) == 1 + len(passing), cut
    assert torch.equal(loss_in_stages(job, layout), loss_as_a_whole(job))


def test_values_that_depend_on_inputs_and_buffers_alone_may_cross() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 1).float() * self.table
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) * mask
        return self.head(x)  # type: ignore[no-any-return]

    job = make_job(body)
    assert torch.equal(loss_in_stages(job, trace(job)), loss_as_a_whole(job))


def test_values_made_from_an_activations_shape_alone_may_cross() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones_like(self.embed(x))
        return plain(self, x) + ones

    job = make_job(body)
    assert torch.equal(loss_in_stages(job, trace(job)), loss_as_a_whole(job))


def test_a_module_that_also_makes_a_mask_runs_on_every_stage() -> None:
    class Preparing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), (x > 1).float()

    class Model(Blocks):
        def __init__(self) -> None:
            super().__init__(body, linear)
            self.prepare = Preparing()

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        x, mask = self.prepare(x)
        for block in self.blocks:
            x = block(x) * (1 - mask)
        return x

    job = make_job(body, model=Model)
    layout = trace(job)
    assert "prepare" not in layout.skippable
    assert "prepare.inner" in layout.skippable
    assert torch.equal(loss_in_stages(job, layout), loss_as_a_whole(job))


def test_a_block_that_makes_a_mask_for_later_ones_runs_on_every_stage() -> None:
    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: torch.Tensor, notes: dict[str, Any]) -> torch.Tensor:
            if "mask" not in notes:
                notes["mask"] = notes["input"] > 1
            return self.inner(x) * notes["mask"]  # type: ignore[no-any-return]

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        notes = {"input": x}
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, notes)
        return self.head(x)  # type: ignore[no-any-return]

    job = make_job(body, Masking)
    layout = trace(job)
    assert [cut.ends[0].must_run for cut in layout.cuts] == [True, False, False]
    assert torch.equal(loss_in_stages(job, layout), loss_as_a_whole(job))


def test_random_numbers_cross() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(WIDTH)
        return plain(self, x) + noise.to(x.device)

    layout = trace(make_job(body))
    for cut in layout.cuts:
        _, noise = cut.crossing
        assert noise.shape(3) == (WIDTH,)
        assert not noise.has_gradient


def test_blocks_that_change_the_shape_are_cut() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).repeat(2, 1)  # type: ignore[no-any-return]

    job = make_job(plain, Doubling)
    layout = trace(job)
    assert [cut.ends[0].like for cut in layout.cuts] == [(None,)] * 3
    assert layout.cuts[1].crossing[0].shape(3) == (12, WIDTH)
    assert layout.cuts[1].num_bytes(3) == 4 * 12 * WIDTH
    assert torch.equal(loss_in_stages(job, layout), loss_as_a_whole(job))


def test_blocks_whose_dimensions_depend_on_the_micro_batch_are_not_cut() -> None:
    job = make_job(plain, lambda: Returning(lambda x: x.squeeze()))
    assert_uncut(job, "must have the same dimensions for every micro-batch")


# --- What blocks return ---------------------------------------------------------------


class Pair(NamedTuple):
    hidden: torch.Tensor
    attention: torch.Tensor


class Returning(nn.Module):
    """A block whose output is made by ``wrap``."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.wrap = linear(), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.inner(x))


def first_of(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = block(x)[0]
    return self.head(x)  # type: ignore[no-any-return]


def test_a_tuple_with_the_activation_first_is_cut() -> None:
    job = make_job(first_of, lambda: Returning(lambda x: (x, None, 3, x * 2)))
    layout = trace(job)
    assert layout.cuts[0].ends[0].leaves[1:3] == (None, 3)
    assert [one.name for one in layout.cuts[0].crossing] == ["blocks.0"]
    assert torch.equal(loss_in_stages(job, layout), loss_as_a_whole(job))


def test_values_after_the_activation_in_the_tuple_cross_if_they_are_used_later() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        sides = []
        for block in self.blocks:
            x, side = block(x)
            sides.append(side)
        return x + torch.stack(sides).sum()

    job = make_job(body, lambda: Returning(lambda x: (x, x.mean())))
    layout = trace(job)
    assert [one.name for one in layout.cuts[1].crossing] == [
        "blocks.1",
        "blocks.0[1]",
        "blocks.1[1]",
    ]
    assert torch.equal(loss_in_stages(job, layout), loss_as_a_whole(job))


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda x: (x.long(),), r"must return a floating-point tensor, or .*: got Tensor"),
        (lambda x: (x, object()), "returns a object besides its activation: return tensors"),
    ],
)
def test_blocks_with_other_outputs_are_not_cut(wrap: Any, message: str) -> None:
    assert_uncut(make_job(first_of, lambda: Returning(wrap)), message)


@dataclass
class Hidden:
    states: torch.Tensor
    kind: str

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.states


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: {0: x},
        lambda x: [x, (x, x)],
        lambda x: Pair(x, x),
        lambda x: Hidden(x, "hidden"),
    ],
)
def test_a_block_may_return_any_pytree(wrap: Any) -> None:
    job = make_job(first_of, lambda: Returning(wrap))
    layout = trace(job)
    assert [len(cut.crossing) for cut in layout.cuts] == [1, 1, 1]
    assert torch.equal(loss_in_stages(job, layout), loss_as_a_whole(job))


# --- Values of the batch -----------------------------------------------------------------


def masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.where(x > 0, 1.0, 0.0)
    x = self.embed(x)
    for number, block in enumerate(self.blocks):
        x = block(x) * mask if number == 1 else block(x)
    return self.head(x)  # type: ignore[no-any-return]


def test_sections_that_read_values_of_the_batch_are_known() -> None:
    blind = trace(make_job(plain))
    assert blind.reads_batch == {0}
    assert blind.blank_for([1, 2]) is not None
    assert blind.blank_for([0, 1]) is None
    seeing = trace(make_job(masked))
    assert seeing.reads_batch == {0, 2}
    assert seeing.blank_for([2]) is None


def test_sections_that_read_values_in_evaluations_only_are_known() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) if self.training else masked(self, x)

    for heldout, reads in ((None, []), (make_job(body).dataset, [0, 2])):
        layout = trace(replace(make_job(body), heldout=heldout))
        assert layout.blank_for([2]) is not None
        assert sorted(layout.heldout_reads or ()) == reads
        assert (layout.blank_for([2], heldout=True) is None) == bool(reads)
        assert layout.blank_for([1], heldout=True) is not None


@pytest.mark.parametrize(
    "look", [lambda x: x.sum().item(), lambda x: torch._assert_async((x >= 0).all())]
)
def test_in_evaluations_that_look_at_values_nothing_stands_in(
    look: Callable[[torch.Tensor], object],
) -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            look(x)
        return plain(self, x)

    layout = trace(replace(make_job(body), heldout=make_job(body).dataset))
    assert layout.blank_for([1]) is not None
    assert layout.blank_for([1], heldout=True) is None


def test_shapes_are_no_values() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.zeros_like(x) + torch.arange(x.shape[1], device=x.device)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) + noise
        return self.head(x)  # type: ignore[no-any-return]

    assert trace(make_job(body)).reads_batch == {0}


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch._assert_async((x >= 0).all()),
    ],
)
def test_nothing_stands_in_for_a_batch_whose_values_are_looked_at(
    look: Callable[[torch.Tensor], object],
) -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        look(x)
        return plain(self, x)

    assert trace(make_job(body)).blank_for([1]) is None


# --- Values on the meta device ----------------------------------------------------------


def ends_at_zero(self: Any, x: torch.Tensor) -> bool:
    positions = torch.arange(4, device=x.device).expand(2, 4)
    starts = torch.zeros(2, 4, device=x.device, dtype=torch.long)
    starts[:, 1:] += positions.diff(dim=-1).ne(1)
    return bool((starts.cumsum(-1)[:, -1] == 0).all())


@pytest.mark.parametrize(
    ("look", "is_read"),
    [
        (ends_at_zero, False),  # as transformers does for packed sequences
        (lambda self, x: self.table.sum().item() == 6, False),
        (lambda self, x: torch.equal(self.table, self.table.clone()), False),
        (lambda self, x: x[:, 1:].nonzero().shape[1] == 2, True),
        (lambda self, x: (x.clone().fill_(2)[0, 0] == 2).item(), True),
    ],
)
def test_values_that_no_parameter_had_a_part_in_may_be_read_on_the_meta_device(
    look: Callable[[Any, torch.Tensor], bool], is_read: bool
) -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert look(self, x)
        return plain(self, x)

    layout = trace(make_job(body))
    assert not layout.needs_values
    assert (layout.blank is None) == is_read


@pytest.mark.parametrize(
    "look",
    [
        lambda self, x: self.embed(x).sum().item(),
        lambda self, x: torch.zeros_like(x).copy_(self.embed(x)).sum().item(),
        lambda self, x: torch.rand(1, device=x.device).item(),
    ],
)
def test_values_that_are_computed_are_read_on_the_cpu(
    look: Callable[[Any, torch.Tensor], float],
) -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert look(self, x) == pytest.approx(look(self, x), abs=1)
        return plain(self, x)

    assert trace(make_job(body)).needs_values


def test_values_take_no_memory_once_nobody_has_their_tensor() -> None:
    masks, mask_bytes = 16, 8 << 20
    resident_bytes: list[int] = []

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(masks):
            assert torch.ones(mask_bytes // 8, dtype=torch.int64, device=x.device).all()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident_bytes.append(pages * resource.getpagesize())
        return plain(self, x)

    assert not trace(make_job(body)).needs_values
    assert max(resident_bytes) - resident_bytes[0] < masks * mask_bytes


OPERATIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x[1:],
    lambda x: x.clone(),
    lambda x: x.add_(1),
    lambda x: x.mT,
    lambda x: x.cumsum(0),
    lambda x: torch.cat([x, x[:1].mul_(2)]),
]


@given(st.lists(st.sampled_from(OPERATIONS), max_size=6))
def test_values_on_the_meta_device_are_those_of_the_cpu(
    operations: list[Callable[[torch.Tensor], torch.Tensor]],
) -> None:
    def value(device: str) -> float:
        x = torch.arange(64.0, device=device).reshape(8, 8)
        for operation in operations:
            x = operation(x)
        return x.sum().item()

    with Recorder():
        assert value("meta") == value("cpu")
