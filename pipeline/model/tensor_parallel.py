"""Tensor parallelism: matrices that ranks of one VM divide among them.

As in Megatron-LM (Shoeybi et al., section 3; Narayanan's dissertation, 4.2.3): of a ``colwise``
layer each rank computes a part of the outputs, of a ``rowwise`` layer the part of the sum that
its part of the inputs gives. Between the two each rank goes on with its part, such as its heads
of an attention. All else every rank computes as one alone would, from the same inputs, to the
same bits; or, in blocks with sequence parallelism (``sequence_parallel``), its part of it.

What is committed are whole matrices: updates, checkpoints, handovers do not depend on how many
ranks divide them. These share the state of their stage, and each computes with copies of its parts
(``train.working``). DTensor is not used: it needs torch's default group, which is the user's code's
(``comm.groups.World``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import TensorStyle
from spottrain.pipeline.model.libraries import pretrained_in
from spottrain.pipeline.model.sections import ModelLayout, parameter_slots
from spottrain.pipeline.model.sequence_parallel import (
    UNSPLIT,
    Entry,
    SplitBlocks,
    entering,
    split_blocks,
    sum_scattered,
)
from spottrain.pipeline.model.tensor_ranks import NOBODY, TensorRanks, conjugate, gathered, lowered

_WHOLE = ("embedding_rowwise", "replicate", "sequence_parallel")
"""Styles of transformers that save memory or messages alone: such modules stay whole."""
_PARTIAL: TensorStyle = "replicated_with_grad_allreduce"
_MAKING: tuple[TensorStyle, ...] = ("colwise", "colwise_gather_output")
"""Those whose layers make parts of features."""
_DIMENSIONS: Mapping[TensorStyle, Mapping[str, int]] = {
    "colwise": {"weight": 0, "bias": 0},
    "colwise_gather_output": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1},
    _PARTIAL: {},
}
"""In which parameters of a module are divided; those that are missing stay whole."""


@dataclass(frozen=True, slots=True)
class Shards:
    """What one rank has of matrices that several divide."""

    styles: Mapping[str, TensorStyle] = field(default_factory=dict)
    """Of modules, by name; see ``find_styles``."""
    ranks: TensorRanks = NOBODY
    """Those that divide them."""
    split: SplitBlocks = UNSPLIT
    """Blocks that divide the sequence."""

    @classmethod
    def of(cls, layout: ModelLayout, ranks: TensorRanks, *, sequence: bool) -> Self:
        """Return what one of ``ranks`` has of a model.

        Args:
            layout: Of the model.
            ranks: Those that divide its matrices.
            sequence: Whether they divide the sequence in blocks, too.

        Raises:
            UserCodeError: The model does not let them.
        """
        return cls(layout.tensor_styles, ranks, split_blocks(layout) if sequence else UNSPLIT)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.size

    @property
    def index(self) -> int:
        """Of this one."""
        return self.ranks.index

    @property
    def is_first(self) -> bool:
        """Whether sums over all ranks take from this one what each of them has computed."""
        return self.index == 0

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place, to the same bits at all of them."""
        self.ranks.sum(tensor)

    def dimension(self, parameter: str) -> int | None:
        """Return in which dimension a parameter is divided; None: it is whole."""
        module, _, attribute = parameter.rpartition(".")
        if self.size == 1 or module not in self.styles:
            return None
        return _DIMENSIONS[self.styles[module]].get(attribute)

    def shape_of(self, parameter: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a parameter."""
        divided = self.dimension(parameter)
        return tuple(n // self.size if k == divided else n for k, n in enumerate(shape))

    def part_of(self, parameter: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's part of a parameter, or of a tensor of its shape."""
        parts = self.parts_of(parameter, tensor)
        return parts[self.index] if len(parts) > 1 else tensor

    def parts_of(self, parameter: str, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views of the parts of all ranks; of what is whole, the tensor alone."""
        dimension = self.dimension(parameter)
        return (tensor,) if dimension is None else tensor.chunk(self.size, dimension)

    def own_parts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's part of each parameter, by name, without gaps as a worker has it."""
        return {name: self.part_of(name, one).contiguous() for name, one in tensors.items()}

    def is_repeated(self, parameter: str) -> bool:
        """Return whether all ranks have the same gradient of a parameter, so that it counts
        once: it is whole, and not used with parts."""
        module = parameter.rpartition(".")[0]
        is_whole = self.dimension(parameter) is None and self.styles.get(module) != _PARTIAL
        return is_whole and not self._is_in_sequence(module)

    def is_counted(self, parameter: str) -> bool:
        """Return whether sums over all ranks take this one's gradient of a parameter: if all have
        the same, the first one's."""
        return self.is_first or not self.is_repeated(parameter)

    def _is_in_sequence(self, module: str) -> bool:
        """Return whether a module that is not divided computes with a part of the sequence."""
        if self.split.around(module) is None:
            return False
        inside = any(f"{module}.".startswith(f"{name}.") for name in self._entered())
        return not inside or self.styles.get(module) == "rowwise"

    def _entered(self) -> frozenset[str]:
        """Return the modules in blocks that are given a part of the sequence, and get all of it:
        those around layers that make parts of features, or within a block these layers."""
        makers = (name for name, style in self.styles.items() if style in _MAKING)
        owners = ((name, name.rpartition(".")[0]) for name in makers if self.split.around(name))
        return frozenset(name if own in self.split.names else own for name, own in owners)

    def divide(self, model: nn.Module, modules: Collection[str]) -> None:
        """Let modules compute with parts; their parameters are to be replaced by these.

        Args:
            model: The user's.
            modules: Names of those whose parameters are there.
        """
        if self.size == 1:
            return
        whole, split = _Region(self.ranks), _SequenceRegion(self.ranks)
        divided = {name for name in self.styles.keys() & modules if self.styles[name] != _PARTIAL}
        for name in divided:
            module, region = model.get_submodule(name), split if self.split.around(name) else whole
            module.forward = functools.partial(_FORWARDS[self.styles[name]], module, region)
        for name in self._entered():
            if any(f"{one}.".startswith(f"{name}.") for one in divided):
                module = model.get_submodule(name)
                module.forward = entering(module.forward, split.enter)


ALONE = Shards()
"""Every matrix is whole."""


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


class _Region:
    """Where divided layers follow one another, such as those for queries, keys and values.

    Layers that make parts of one input share the sum of its gradient.
    """

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks
        self._given: torch.Tensor | None = None
        self._shared: torch.Tensor | None = None

    def linear(self, module: nn.Linear, given: torch.Tensor) -> torch.Tensor:
        """Return parts of what a layer makes of an input that all ranks have."""
        if self._shared is None or given is not self._given:
            self._given = given
            self._shared = conjugate(lowered(given), _same, self._sum)
        return F.linear(self._shared, module.weight, module.bias)

    def gathered(self, made: torch.Tensor) -> torch.Tensor:
        """Return what all ranks have made, one after the other."""
        self.end()

        def own(whole: torch.Tensor) -> torch.Tensor:
            return whole.chunk(self.ranks.size, -1)[self.ranks.index]

        return conjugate(made, lambda part: gathered(part, self.ranks, -1), own)

    def summed(self, made: torch.Tensor) -> torch.Tensor:
        """Return the sum of what all ranks have made."""
        self.end()
        return conjugate(made, self._sum, _same)

    def end(self) -> None:
        """Let go of the last input: parts have become something whole."""
        self._given = self._shared = None

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        self.ranks.sum(total)
        return total


class _SequenceRegion(_Region):
    """The same in a block where each rank has a part of the sequence."""

    def __init__(self, ranks: TensorRanks) -> None:
        super().__init__(ranks)
        self._entry: Entry | None = None

    def enter(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence, for layers that make parts of features."""
        if self._entry is None or part is not self._entry.part:
            self._entry = Entry(part, self.ranks)
        return self._entry.whole

    def linear(self, module: nn.Linear, given: torch.Tensor) -> torch.Tensor:
        """See ``_Region``."""
        if self._entry is not None and given is self._entry.whole:
            return self._entry.linear(module.weight, module.bias)
        return super().linear(module, given)

    def summed(self, made: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sequence of the sum."""
        self.end()
        return sum_scattered(made, self.ranks)

    def end(self) -> None:
        """See ``_Region``."""
        super().end()
        self._entry = None


def _colwise(module: nn.Linear, region: _Region, given: torch.Tensor) -> torch.Tensor:
    return region.linear(module, given)


def _colwise_gather_output(module: nn.Linear, region: _Region, given: torch.Tensor) -> torch.Tensor:
    return region.gathered(region.linear(module, given))


def _rowwise(module: nn.Linear, region: _Region, given: torch.Tensor) -> torch.Tensor:
    total = region.summed(F.linear(given, module.weight))
    return total if module.bias is None else total + module.bias


_FORWARDS: Mapping[TensorStyle, Callable[..., torch.Tensor]] = {
    "colwise": _colwise,
    "colwise_gather_output": _colwise_gather_output,
    "rowwise": _rowwise,
}


def find_styles(
    model: nn.Module, plan: Mapping[str, TensorStyle] | None, tied: Iterable[str]
) -> dict[str, TensorStyle]:
    """Return how the modules of a model are divided, by name; empty: it has no plan.

    Args:
        model: The user's.
        plan: The job's own; None: that of a transformers model, if there is one.
        tied: Parameters that several sections share. Their modules stay whole.

    Raises:
        UserCodeError: The plan names no module, an unknown style, or what cannot be divided.
    """
    own, prefix = plan is not None, ""
    if plan is None:
        found = pretrained_in(model)
        if found is None:
            return {}
        prefix = found[0]
        plan = getattr(found[1], "_tp_plan", None) or {}
    shared = {
        module
        for name, slots in parameter_slots(model).items()
        if name in {*tied} or len(slots) > 1
        for module, _ in slots
    }
    styles: dict[str, TensorStyle] = {}
    modules = dict(model.named_modules())
    for pattern, style in plan.items():
        named = [name for name in modules if _matches(prefix + pattern, name)]
        if not own and (style in _WHOLE or not named):
            continue
        if style not in _DIMENSIONS:
            raise UserCodeError(
                f"tensor_plan has styles {', '.join(_DIMENSIONS)}: got {style} for {pattern}"
                + ("" if own else "; give TrainingJob(tensor_plan={...}) for this model")
            )
        if not named:
            raise UserCodeError(
                f"tensor_plan must name modules of the model: got {pattern}, which none is called; "
                f"write e.g. {next(_linear_names(modules), 'blocks.*.up')}"
            )
        for name in named:
            if modules[name] in shared:
                if own:
                    raise UserCodeError(
                        f"tensor_plan must not name modules whose weights are tied: got {name}; "
                        "leave it out"
                    )
            elif style != _PARTIAL and type(modules[name]).forward is not nn.Linear.forward:
                raise UserCodeError(
                    f"tensor_plan must name torch.nn.Linear for {style}: got {name}, a "
                    f"{type(modules[name]).__name__}; leave it out, or use torch.nn.Linear"
                )
            else:
                styles[name] = style
    return styles


def _matches(pattern: str, name: str) -> bool:
    """Return whether a name is of a pattern, in which ``*`` stands for one part of a name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None


def _linear_names(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    return (name for name, module in modules.items() if isinstance(module, nn.Linear))
