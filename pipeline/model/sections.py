"""Cuts of a model, and the contents of its sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.blank import BlankBatch
from spottrain.pipeline.model.job import CutPoint
from spottrain.wire.model import TiedParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and type of a tensor to be allocated."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    number_type: type[bool | int | float] | None = None
    """Of a Python number of the optimizer's state, kept as a tensor of no dimension."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a contiguous tensor of this kind."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The end of a section: the output of ``module`` is the activation that crosses.

    ``module`` is a block, or a CutPoint.
    """

    module: str
    shape_of_1: tuple[int, ...]
    """The activation's shape for a micro-batch of one example."""
    shape_of_2: tuple[int, ...]
    dtype: torch.dtype
    rest: tuple[object, ...] | None
    """None if the block returns the activation itself, else what follows it in the
    tuple that the block returns (tensors there are read by no later section)."""
    keeps_shape: bool
    """The block's first tensor argument has the shape and dtype of the activation."""
    must_run: bool
    """The block computes something besides the activation that a later section needs,
    from inputs and buffers alone; so later stages run it too."""

    def shape(self, examples: int) -> tuple[int, ...]:
        """Return the activation's shape for a micro-batch of ``examples``.

        Holds where examples all have one size.
        """
        pairs = zip(self.shape_of_1, self.shape_of_2, strict=True)
        return tuple(one + (two - one) * (examples - 1) for one, two in pairs)

    def num_bytes(self, examples: int) -> int:
        """Return the activation's bytes for a micro-batch of ``examples``."""
        return math.prod(self.shape(examples)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """Result of the tracer: sections, their parameters, activations at the cuts.

    Parameters go by the first of their names in ``model.named_parameters()``.
    """

    blocks: str
    """Name of the module list that was cut, or ``"CutPoint"``."""
    cuts: tuple[Cut, ...]
    """Cut ``k`` ends section ``k``; the last section has none."""
    parameters: tuple[tuple[str, ...], ...]
    """Names of each section's parameters, in the model's order; a tied one is in every
    section that uses it."""
    specs: Mapping[str, TensorSpec]
    """Every parameter of the model, in the model's order."""
    matrices: frozenset[str]
    """Parameters that autocast converts before anything else is done with them."""
    tied: tuple[TiedParameter, ...]
    skippable: Mapping[str, int]
    """Modules with parameters that stages after them need not run, and the first
    section that does; none lies within another."""
    batch: tuple[TensorSpec, ...]
    """The tensors of a micro-batch of one example."""
    flops_per_example: tuple[int, ...]
    """Of each section's forward, see ``morphing.plan.flops``."""
    metrics: tuple[str, ...] = ()
    """What the loss measures besides the loss, sorted."""
    reads_batch: frozenset[int] = frozenset()
    """Sections that use values of the batch."""
    blank: BlankBatch | None = None
    """Stands in for the batch in other sections; ``None``: nothing can."""
    base: str = ""
    """What transformers calls the weights that the model begins with; empty: unknown."""

    def blank_for(self, sections: Iterable[int]) -> BlankBatch | None:
        """Return what these sections can do with instead of a batch, if they can."""
        return None if self.reads_batch & {*sections} else self.blank

    @property
    def num_sections(self) -> int:
        """Sections of the whole model."""
        return len(self.parameters)

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters that are not trained."""
        return frozenset(n for n, spec in self.specs.items() if not spec.requires_grad)

    def param_bytes(self, section: int) -> int:
        """Return the bytes of a section's parameters, tied ones included."""
        return sum(self.specs[name].num_bytes for name in self.parameters[section])

    def lowered_bytes(self, section: int) -> int:
        """Return the bytes of those of a section's parameters that autocast converts."""
        own = set(self.parameters[section]) & self.matrices
        specs = (self.specs[name] for name in own)
        return sum(spec.num_bytes for spec in specs if spec.dtype is torch.float32)

    def gradient_bytes(self, section: int) -> int:
        """Return the bytes of those of a section's parameters that are trained."""
        specs = (self.specs[name] for name in self.parameters[section])
        return sum(spec.num_bytes for spec in specs if spec.requires_grad)


def find_cuts(model: nn.Module) -> tuple[str, tuple[str, ...]]:
    """Find the places where the model may be cut.

    CutPoint modules win; else it is the list of two or more modules of one class that
    holds the most parameters, cut after each of its modules but the last.

    Returns:
        The list's name (or ``"CutPoint"``) and the modules that end a section, in the
        order of the model's definition.

    Raises:
        UserCodeError: There are neither.
    """
    points = [name for name, m in model.named_modules() if isinstance(m, CutPoint)]
    if points:
        return "CutPoint", tuple(points)
    best, most = "", 0
    for name, module in model.named_modules():
        size = sum(p.numel() for p in module.parameters())
        if size > most and _is_block_list(module):
            best, most = name, size
    if most == 0:
        raise UserCodeError(
            "model has no repeated blocks and no CutPoint: got "
            f"{type(model).__name__}; keep its blocks in a torch.nn.ModuleList or put "
            "spottrain.CutPoint() modules where it may be cut"
        )
    children = [name for name, _ in model.get_submodule(best).named_children()]
    prefix = f"{best}." if best else ""
    return best, tuple(f"{prefix}{child}" for child in children[:-1])


def _is_block_list(module: nn.Module) -> bool:
    blocks = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(blocks) > 1
        and len({type(block) for block in blocks}) == 1
        and all(any(True for _ in block.parameters()) for block in blocks)
    )


ParameterSlots = dict[str, list[tuple[nn.Module, str]]]
"""For every parameter's first name, all (module, attribute) that hold it."""


_CONVERTED = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Modules whose operation is in autocast's list of lower precision."""


def is_matrix(slots: list[tuple[nn.Module, str]]) -> bool:
    """Return whether autocast converts a parameter before anything is done with it.

    So it is with the weights of linear layers and convolutions of torch's own classes;
    of subclasses and of other modules nobody knows.

    Args:
        slots: The modules that hold the parameter.
    """
    return all(type(m) in _CONVERTED and name == "weight" for m, name in slots)


def parameter_slots(model: nn.Module) -> ParameterSlots:
    """Return the modules that hold each parameter; tied parameters have several."""
    first_names: dict[int, str] = {}
    slots: ParameterSlots = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        owner, _, attribute = name.rpartition(".")
        slots.setdefault(first, []).append((model.get_submodule(owner), attribute))
    return slots
