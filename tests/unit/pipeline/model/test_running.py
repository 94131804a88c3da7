"""Buffers that forwards change: found, begun from what is committed, added up once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_spec
from tests.chains import batch_of, seeds, tensors_of
from tests.unit.pipeline.blocks import WIDTH, Blocks, linear, make_job, plain
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.loaded import LoadedJob, derive, parameter_specs
from spottrain.pipeline.model.sections import ModelLayout, Running
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.model.tracer import trace
from spottrain.pipeline.weights.first import values_of_sections

STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def normalised(self: Any, x: torch.Tensor) -> torch.Tensor:
    return plain(self, self.norm(x))


def stage_of(job: TrainingJob, layout: ModelLayout) -> tuple[StageModel, dict[str, nn.Parameter]]:
    tensors = tensors_of(job, layout)
    stage = StageModel(job, layout, range(layout.num_sections), tensors)
    return stage, {n: p for k in stage.sections for n, p in stage.parameters_of(k)}


# --- What is found ----------------------------------------------------------------------


def test_running_statistics_belong_to_the_section_that_changes_them() -> None:
    layout = trace(make_job(normalised))

    assert layout.running == {*STATISTICS}
    assert layout.normalises_batches == "norm"
    assert layout.parameters[0][-3:] == STATISTICS
    assert all(not set(STATISTICS) & {*names} for names in layout.parameters[1:])
    mean, _, count = (layout.specs[name] for name in STATISTICS)
    assert mean.running == Running(torch.float32, 0.9)
    assert count.running == Running(torch.int64, 1.0)
    assert (mean.dtype, count.dtype) == (torch.float32, torch.float64)


def test_a_buffer_that_is_written_or_replaced_is_committed() -> None:
    def written(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.table.add_(1)
        return plain(self, x)

    def replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table + 1
        return plain(self, x)

    for body in (written, replaced):
        assert trace(make_job(body)).specs["table"].running == Running(torch.float32, None)


def without_momentum() -> nn.Module:
    built = Blocks(normalised, linear)
    built.norm = nn.BatchNorm1d(WIDTH, momentum=None)
    return built


def test_without_momentum_batch_norm_keeps_the_mean_of_all_micro_batches() -> None:
    job = make_job(plain, model=without_momentum)
    layout = trace(job)
    mean, _, count = (layout.specs[name].running for name in STATISTICS)
    assert mean == Running(torch.float32, None, "num_batches_tracked")
    assert count == Running(torch.int64, 1.0)
    assert layout.normalises_batches == "norm"
    stage, found = stage_of(job, layout)
    whole = materialise(job, seed=1).train()
    batches = [batch_of(job, 3).square() * number for number in range(1, 6)]

    for nodes in (batches[:2], batches[2:]):
        for node, batch in enumerate(nodes):
            stage.forward(batch, [], seeds)
            stage.add_changes(range(node, node + 1), len(nodes), scale=1.0)
            whole(batch)
        for name in STATISTICS:
            gradient, found[name].grad = found[name].grad, None
            assert gradient is not None
            found[name].data += gradient

    for name in STATISTICS:
        expected = whole.get_buffer(name).to(found[name].dtype)
        torch.testing.assert_close(found[name].detach(), expected)


def test_a_flag_that_forwards_change_is_refused_by_name() -> None:
    class Model(Blocks):
        def __init__(self) -> None:
            super().__init__(plain, linear)
            self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("seen").fill_(True)
            return super().forward(x)

    with pytest.raises(UserCodeError, match=r"changes its buffer seen in forward, .*bool"):
        trace(make_job(plain, model=Model))


def test_a_buffer_that_gets_its_shape_in_forward_is_refused_by_name() -> None:
    def registered(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("late", torch.zeros(3))
        return plain(self, x)

    def resized(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.zeros(len(x), WIDTH)
        return plain(self, x)

    for body, message in (
        (registered, r"its buffer late the shape \(3,\) in forward"),
        (resized, r"its buffer table the shape \(1, 4\) in forward"),
    ):
        with pytest.raises(UserCodeError, match=message):
            trace(make_job(body))


def test_a_model_whose_sections_share_a_changing_buffer_is_one_section() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(self.norm(x))
        for block in self.blocks:
            x = block(x) + self.norm.running_mean
        return self.head(x)  # type: ignore[no-any-return]

    layout = trace(make_job(body))

    assert layout.num_sections == 1
    assert "buffer norm.running_mean, which forwards change" in layout.uncut


def test_stale_gradients_with_changing_buffers_are_refused() -> None:
    job = make_job(normalised)
    layout, states, _ = derive(job, trace(job))

    with pytest.raises(UserCodeError, match=r"norm\.running_mean; use semantics synchronous"):
        parameter_specs(layout, layout.parameters[0], states[0], "stale_by_one")


# --- What a forward sees, and what it adds ----------------------------------------------


def test_every_forward_begins_with_what_is_committed() -> None:
    seen: list[float] = []

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(float(self.table.sum()))
        self.table.add_(1)
        return plain(self, x)

    job = make_job(body)
    stage, _ = stage_of(job, trace(job))
    seen.clear()

    for _ in range(2):
        stage.forward(batch_of(job, 2), [], seeds)
    stage.eval()
    stage.forward(batch_of(job, 2), [], seeds)

    assert seen == [6.0, 6.0, 6.0]


def test_changes_are_added_up_as_gradients_and_those_of_a_recompute_are_not() -> None:
    job = make_job(normalised)
    layout = trace(job)
    stage, found = stage_of(job, layout)
    batch = batch_of(job, 3)

    stage.forward(batch, [], seeds)
    stage.add_changes(range(1, 2), 3, scale=4.0)
    stage.forward(batch, [], seeds)  # recomputed

    mean, _, count = (found[name] for name in STATISTICS)
    assert mean.grad is not None
    assert count.grad is not None
    expected = 0.1 * torch.arange(float(WIDTH)) * 0.9 * 4.0
    torch.testing.assert_close(mean.grad, expected)
    assert count.grad == 4.0
    stage.forward(batch, [], seeds)
    stage.add_changes(range(1, 3), 3, scale=4.0)
    assert count.grad == 4.0 + 2 * 4.0  # of two virtual nodes at once
    assert torch.equal(mean, torch.zeros(WIDTH))


@given(
    keeps=st.floats(0, 1),
    begin=st.floats(-9, 9),
    added=st.lists(st.floats(-9, 9), min_size=1, max_size=9),
)
def test_weighted_changes_make_what_one_update_after_the_other_does(
    keeps: float, begin: float, added: list[float]
) -> None:
    expected = begin
    for one in added:
        expected = keeps * expected + one
    rule, nodes = Running(torch.float64, keeps), len(added)

    changes = (
        rule.weight(node, nodes) * (keeps * begin + one - begin) for node, one in enumerate(added)
    )

    assert begin + sum(changes) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=9))
def test_where_nothing_is_known_of_updates_the_mean_of_virtual_nodes_is_kept(
    values: list[float],
) -> None:
    rule, nodes, begin = Running(torch.float64, None), len(values), 2.5

    changes = (rule.weight(node, nodes) * (one - begin) for node, one in enumerate(values))

    assert begin + sum(changes) == pytest.approx(sum(values) / nodes, abs=1e-9)


# --- First values -----------------------------------------------------------------------


def test_first_values_are_those_of_the_whole_model_also_of_spectral_norm() -> None:
    def model() -> nn.Module:
        built = Blocks(normalised, linear)
        nn.utils.parametrizations.spectral_norm(built.blocks[1])
        return built

    job = make_job(plain, model=model)
    layout = trace(job)
    derived = derive(job, layout)
    loaded = LoadedJob(a_spec(seed=3), job, layout, derived.fingerprint, [])

    values: dict[str, torch.Tensor] = {}
    for section, made in values_of_sections(loaded, range(layout.num_sections)):
        values |= {name: made[name].clone() for name in layout.parameters[section]}

    whole = materialise(job, seed=3)
    vector = "blocks.1.parametrizations.weight.0._u"
    assert vector in layout.running
    for name in layout.running:
        expected = whole.get_buffer(name).to(layout.specs[name].dtype)
        assert torch.equal(values[name], expected), name
