"""The parameters and buffers with which a stage runs the user's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from spottrain.errors import SpottrainError
from spottrain.pipeline.model.sections import (
    Attached,
    ModelLayout,
    Running,
    TensorSpec,
    buffer_slots,
    parameter_slots,
)
from spottrain.pipeline.model.skeleton import on_device
from spottrain.pipeline.model.tensor_parallel import Shards

Parameters = Mapping[int, Mapping[str, nn.Parameter]]
"""Of each section, by name."""
Swap = tuple[nn.Module, str, nn.Parameter]
"""A module, its attribute, and what this is to be."""


def build_parameters(
    model: nn.Module,
    layout: ModelLayout,
    tensors: Mapping[int, Mapping[str, torch.Tensor]],
    sections: Iterable[int],
    lowered: torch.dtype | None,
    shards: Shards,
) -> Parameters:
    """Return the parameters of sections over the storage given for them.

    What is attached to what the user's code has built in their place, hooks on the gradient
    included, is attached to them.

    Args:
        model: As the user's code has built it.
        layout: Of the model.
        tensors: As for ``StageModel``.
        sections: The stage's.
        lowered: Another type that matrices may have.
        shards: Of which parameters have their part alone.

    Raises:
        SpottrainError: Tensors do not fit.
    """
    built = dict(model.named_parameters()) | dict(model.named_buffers())

    def make(section: int, name: str) -> nn.Parameter:
        spec, tensor = layout.specs[name], tensors.get(section, {}).get(name)
        got = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        shape = shards.shape_of(name, spec.shape)
        other = lowered if name in layout.matrices else None
        if tensor is None or got not in ((shape, spec.dtype), (shape, other)):
            raise SpottrainError(
                f"tensor of parameter {name} in section {section} must be {(shape, spec.dtype)}: "
                f"got {got}"
            )
        parameter = Attached.of(built[name]).parameter(tensor, spec.requires_grad)
        # The same dictionary: code that holds a handle can still take its hook away.
        parameter._backward_hooks = built[name]._backward_hooks
        return parameter

    return {
        section: {name: make(section, name) for name in layout.parameters[section]}
        for section in sections
    }


def place_parameters(
    model: nn.Module, layout: ModelLayout, parameters: Parameters, device: torch.device
) -> dict[int, list[Swap]]:
    """Set the model's parameters, those of other stages to placeholders.

    Returns:
        What is to be swapped where a section begins: tied parameters are another one in each.
    """
    tied = {t.name for t in layout.tied}
    swaps: dict[int, list[Swap]] = {}
    for name, slots in parameter_slots(model).items():
        module, attribute = slots[0]
        attached = Attached.of(getattr(module, attribute))
        outside = _placeholder(layout.specs[name], device, attached)
        own = {section: named[name] for section, named in parameters.items() if name in named}
        for module, attribute in slots:
            setattr(module, attribute, next(iter(own.values()), outside))
            if name in tied and own:
                for section, parameter in {0: outside, **own}.items():
                    swaps.setdefault(section, []).append((module, attribute, parameter))
    return swaps


def _placeholder(spec: TensorSpec, device: torch.device, attached: Attached) -> nn.Parameter:
    zero = torch.zeros((), dtype=spec.dtype, device=device)
    return attached.parameter(zero.expand(spec.shape), requires_grad=False)


def place_buffers(model: nn.Module, device: torch.device, known: dict[str, torch.Tensor]) -> None:
    """Put buffers on the device, once for all models: of those that forwards change, each
    forward has its own."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full = f"{prefix}.{name}"
                if full not in known:
                    known[full] = on_device(buffer, device)
                module._buffers[name] = known[full]


class RunningBuffer(NamedTuple):
    """A buffer that forwards change."""

    running: Running
    committed: nn.Parameter
    slots: list[tuple[nn.Module, str]]
    """The modules that hold it."""

    def begin(self) -> None:
        """Let the model have the committed value."""
        value = self.committed.detach().to(self.running.dtype, copy=True)
        for module, attribute in self.slots:
            module._buffers[attribute] = value

    def weight(self, node: int, nodes: int) -> float:
        """Return what the forward's change counts in the sum, see ``Running.weight``."""
        counted = self.slots[0][0]._buffers.get(self.running.counter)
        return self.running.weight(node, nodes, 0.0 if counted is None else float(counted))

    def change(self) -> torch.Tensor:
        """Return what the forward has added to it."""
        return self.value().detach().to(self.committed.dtype) - self.committed.detach()

    def value(self) -> torch.Tensor:
        """Return what it is now."""
        module, attribute = self.slots[0]
        value = module._buffers[attribute]
        assert value is not None
        return value


def running_buffers(
    model: nn.Module, layout: ModelLayout, parameters: Parameters
) -> list[RunningBuffer]:
    """Return the buffers of a stage that forwards change."""
    return [
        RunningBuffer(running, parameter, buffer_slots(model, name))
        for named in parameters.values()
        for name, parameter in named.items()
        if (running := layout.specs[name].running)
    ]
