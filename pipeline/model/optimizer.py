"""The state that the user's optimizer keeps, found out by letting it take one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import NamedParameters, TrainingJob
from spottrain.pipeline.model.sections import ModelLayout, TensorSpec

_FUSED: Mapping[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adagrad: ("cpu",),
    torch.optim.Adam: ("cpu", "cuda"),
    torch.optim.AdamW: ("cpu", "cuda"),
    torch.optim.SGD: ("cpu", "cuda"),
}
"""Optimizers that torch has fused kernels for, and on which devices."""

StateSpec = dict[str, dict[str, TensorSpec]]
"""Parameter name to state key to tensor."""


def optimizer_state_spec(
    job: TrainingJob, named: Sequence[tuple[str, TensorSpec]]
) -> StateSpec:
    """Return the state that the job's optimizer keeps for parameters like these.

    One step is taken with zero gradients, on the meta device or, where the optimizer
    refuses that (fused ones do), on the CPU. A number in the state counts as a
    0-dimensional float64; what is None is left out.

    Raises:
        UserCodeError: The optimizer raised, or keeps something else than tensors and
            numbers for each parameter.
    """
    try:
        state = _step(job, named, "meta")
    except UserCodeError:
        state = _step(job, named, "cpu")
    return {
        name: {key: _spec(name, key, value) for key, value in values.items()}
        for name, values in state.items()
    }


def section_state_spec(
    job: TrainingJob, layout: ModelLayout, section: int
) -> StateSpec:
    """Return ``optimizer_state_spec`` of one section's parameters."""
    names = layout.parameters[section]
    return optimizer_state_spec(job, [(name, layout.specs[name]) for name in names])


def optimizer_class(job: TrainingJob, layout: ModelLayout) -> str:
    """Return the full name of the optimizer's class; empty if nothing is trained.

    Raises:
        UserCodeError: As ``build_optimizer``.
    """
    for names in layout.parameters:
        specs = [(name, layout.specs[name]) for name in names]
        named = [
            (name, nn.Parameter(torch.zeros(()).expand(spec.shape), spec.requires_grad))
            for name, spec in specs
        ]
        optimizer = build_optimizer(job.optimizer, named)
        if optimizer is not None:
            return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return ""


def build_optimizer(
    factory: Callable[[NamedParameters], torch.optim.Optimizer], named: NamedParameters
) -> torch.optim.Optimizer | None:
    """Call the job's optimizer factory; None where no parameter wants a gradient.

    Raises:
        UserCodeError: The factory raised, does not return an optimizer, or gave it
            parameters of its own.
    """
    wanted = [(name, p) for name, p in named if p.requires_grad]
    if not wanted:
        return None
    with user_code("optimizer"):
        optimizer = factory(wanted)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(
            "optimizer must return a torch.optim.Optimizer: got "
            f"{type(optimizer).__name__}"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if extra := held - {id(p) for _, p in wanted}:
        raise UserCodeError(
            f"optimizer holds {len(extra)} parameters that it was not given: build it "
            "over the (name, parameter) pairs of its argument"
        )
    return optimizer


def use_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's own optimizers take one pass over memory, unless the user chose.

    By default they take several on a CPU, which the update of a whole model, in the
    host's memory, would wait for.
    """
    devices = _FUSED.get(type(optimizer), ())
    for group in optimizer.param_groups if devices else ():
        chosen = group["fused"], group["foreach"]
        special = group.get("capturable") or group.get("differentiable")
        if chosen == (None, None) and not special:
            group["fused"] = all(
                parameter.is_floating_point() and parameter.device.type in devices
                for parameter in group["params"]
            )


def _step(
    job: TrainingJob, named: Sequence[tuple[str, TensorSpec]], device: str
) -> dict[str, dict[str, object]]:
    parameters = []
    for name, spec in named:
        data = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        parameters.append((name, nn.Parameter(data, spec.requires_grad)))
    optimizer = build_optimizer(job.optimizer, parameters)
    if optimizer is None:
        return {}
    for _, parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with user_code("step of the optimizer"):
        optimizer.step()
    return {
        name: {k: v for k, v in optimizer.state[p].items() if v is not None}
        for name, p in parameters
        if p in optimizer.state
    }


def _spec(name: str, key: str, value: object) -> TensorSpec:
    if isinstance(value, torch.Tensor):
        return TensorSpec(shape=tuple(value.shape), dtype=value.dtype)
    if isinstance(value, int | float):
        return TensorSpec(shape=(), dtype=torch.float64, is_number=True)
    raise UserCodeError(
        f"optimizer state {key!r} of {name} must be a tensor or a number: got "
        f"{type(value).__name__}; use an optimizer that keeps such state only"
    )
