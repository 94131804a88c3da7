"""What user code attaches to parameters is on those that stages train, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.chains import batch_of, run_chain, same_bits, tensors_of
from tests.unit.pipeline.blocks import WIDTH, Blocks, linear, make_job, plain
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import NamedParameters, TrainingJob
from spottrain.pipeline.model.loaded import derive
from spottrain.pipeline.model.optimizer import section_state_spec
from spottrain.pipeline.model.tracer import trace


class Marked(nn.Parameter):
    """A parameter of a class of the user's own."""


def halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def job_with(attach: Callable[[Any], object], **changes: Any) -> TrainingJob:
    def model() -> nn.Module:
        built = Blocks(plain, linear)
        attach(built)
        return built

    return make_job(plain, model=model, **changes)


def hooked(model: Any) -> None:
    model.embed.weight.register_hook(halve)


def hooked_before(model: Any) -> None:
    weight: Any = nn.Parameter(model.embed.weight.new_ones(WIDTH, WIDTH))
    weight.register_hook(halve)
    model.embed.weight = weight


def hooked_by_its_first_name(model: Any) -> None:
    weight: Any = nn.Parameter(torch.ones(WIDTH, WIDTH))
    model.embed.weight = weight
    weight.register_hook(halve)


@pytest.mark.parametrize("attach", [hooked, hooked_before, hooked_by_its_first_name])
@pytest.mark.parametrize("bounds", [[0, 4], [0, 1, 2, 3, 4]], ids=str)
def test_hooks_change_gradients_as_in_one_process(
    attach: Callable[[Any], object], bounds: list[int]
) -> None:
    job = job_with(attach)
    layout = trace(job)
    batch, tensors = batch_of(job, 2), tensors_of(job, layout)
    _, _, expected = run_chain(make_job(plain), layout, bounds, batch, tensors)

    _, _, gradients = run_chain(job, layout, bounds, batch, tensors)

    for (section, name), gradient in gradients.items():
        reference = expected[section, name]
        if reference is not None and name == "embed.weight":
            reference = reference * 0.5
        assert same_bits(gradient, reference), name


def test_a_hook_that_is_taken_away_runs_no_more() -> None:
    def loss(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        model.handle.remove()
        return model(batch).sum(), len(batch)

    def attach(model: Any) -> None:
        model.handle = model.embed.weight.register_hook(halve)

    job = job_with(attach, loss=loss)
    layout = trace(job)
    batch, tensors = batch_of(job, 2), tensors_of(job, layout)

    got = run_chain(job, layout, [0, 4], batch, tensors)[2]

    expected = run_chain(make_job(plain), layout, [0, 4], batch, tensors)[2]
    assert same_bits(got[0, "embed.weight"], expected[0, "embed.weight"])


def marked(model: Any) -> None:
    model.embed.bias._no_weight_decay = True
    model.head.weight = Marked(torch.ones(WIDTH, WIDTH))


def marked_by_its_first_name(model: Any) -> None:
    bias: Any = nn.Parameter(torch.ones(WIDTH))
    model.embed.bias = bias
    bias._no_weight_decay = True
    model.head.weight = Marked(torch.ones(WIDTH, WIDTH))


@pytest.mark.parametrize("attach", [marked, marked_by_its_first_name])
def test_optimizers_are_given_attributes_and_classes_of_parameters(
    attach: Callable[[Any], object],
) -> None:
    seen: set[str] = set()

    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        seen.update(
            name
            for name, parameter in named
            if getattr(parameter, "_no_weight_decay", False) or isinstance(parameter, Marked)
        )
        return torch.optim.SGD([p for _, p in named])

    job = job_with(attach, optimizer=optimizer)
    layout = trace(job)
    seen.clear()
    for section in range(layout.num_sections):
        section_state_spec(job, layout, section)

    assert seen == {"embed.bias", "head.weight"}


def test_forwards_see_attributes_on_every_stage() -> None:
    def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
        scale: float = 1 + self.embed.bias.factor
        return plain(self, x) * scale

    def attach(model: Any) -> None:
        model.embed.bias.factor = 3.0
        model.body = scaled

    job = job_with(attach)
    layout = trace(job)
    batch, tensors = batch_of(job, 2), tensors_of(job, layout)

    whole, _, _ = run_chain(job, layout, [0, 4], batch, tensors)
    assert torch.equal(run_chain(job, layout, [0, 2, 4], batch, tensors)[0], whole)


def accumulated(model: Any) -> None:
    model.embed.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def at_the_node(model: Any, before: bool) -> None:
    weight = model.embed.weight
    node: Any = weight.view_as(weight).grad_fn.next_functions[0][0]
    (node.register_prehook if before else node.register_hook)(lambda *_: None)
    model.node = node  # else its hooks end with it


def of_several(model: Any) -> None:
    parameters = [model.embed.weight, model.head.weight]
    torch.autograd.graph.register_multi_grad_hook(parameters, lambda grads: None)


def partner(model: Any) -> None:
    model.embed.weight.partners = [model.head.weight]


@pytest.mark.parametrize(
    "attach",
    [
        accumulated,
        functools.partial(at_the_node, before=True),
        functools.partial(at_the_node, before=False),
        of_several,
        partner,
    ],
)
def test_what_cannot_be_carried_over_is_refused_with_the_parameter(
    attach: Callable[[Any], object],
) -> None:
    with pytest.raises(UserCodeError, match=r"parameter embed\.weight"):
        trace(job_with(attach))


def test_what_is_attached_is_no_part_of_the_models_fingerprint() -> None:
    jobs = job_with(marked), job_with(lambda model: None)
    one, other = (derive(job, trace(job)).fingerprint for job in jobs)
    assert one == other
