"""Tries the user's optimizer on random gradients, before anything is rented.

Each section has an optimizer of its own, built again by every process that takes over. So
it must treat sections apart, and keep all it needs where it is kept for it. Some steps
are taken with the real shapes of two sections, by one optimizer over both, and by one of
each that is built again before every step: both must lead to the same bits.
"""

from __future__ import annotations

import gc
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.heap import mmap_large_blocks
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.optimizer import SectionOptimizer, optimizer_state_spec
from spottrain.pipeline.model.sections import ModelLayout, TensorSpec
from spottrain.pipeline.model.values import (
    Json,
    attributes,
    differing,
    group_of_each,
)

MAGNITUDES = (1e-6, 1.0, 1e3)
"""Of the gradients, step by step: their norms lie on both sides of any usual bound."""
_ROUNDS = ((1 << 20, 12), (17 << 20, 3))
"""Elements of a section that are tried at most, and steps: for any machine to have the
memory, and for half a minute to be enough."""

Named = Sequence[tuple[str, TensorSpec]]


def try_optimizer(job: TrainingJob, layout: ModelLayout) -> None:
    """Take some steps with the job's optimizer as training does.

    Raises:
        UserCodeError: The optimizer raised, draws random numbers, changes what is not
            kept, or leads to other bits over one section or when it is built again.
    """
    smallest = _smallest_sections(layout)
    tried: list[Named] = []
    with torch.random.fork_rng(devices=[]):
        for num_elements, num_steps in _ROUNDS:
            sections = [_portion(named, num_elements) for named in smallest]
            if sections != tried:
                _try_sections(job, sections, num_steps)
            tried = sections


@mmap_large_blocks()
def _try_sections(job: TrainingJob, sections: Sequence[Named], num_steps: int) -> None:
    difference = _compare(job, sections, num_steps, rebuild=True)
    gc.collect()  # a trial and its optimizer hold one another
    if difference is None:
        for named in sections:
            _Trial(job, named, zeros=True).step(0)
        return
    kind, what, changed = difference
    if _compare(job, sections, num_steps, rebuild=False) is None:
        hint = f" (it sets its attribute {changed[0]!r})" if changed else ""
        raise UserCodeError(
            f"optimizer {kind} {what} differently when it is rebuilt between steps, "
            f"as on a machine that takes over{hint}: keep all it needs in "
            "optimizer.state or param_groups"
        )
    raise UserCodeError(
        f"optimizer {kind} looks across sections: it {what} differently where it sees more "
        "parameters, and here every section has an optimizer of its own; use one that "
        "treats parameters apart, without a norm, count or list over all of them: "
        "clip_grad_norm of TrainingJob is global already"
    )


def _smallest_sections(layout: ModelLayout) -> list[Named]:
    """Return what is trained of the two smallest sections that differ."""
    candidates: list[Named] = []
    for section in range(layout.num_sections):
        named = [one for one in layout.named_parameters(section) if one[1].requires_grad]
        if named and named not in candidates:
            candidates.append(named)
    return sorted(candidates, key=_num_elements)[:2]


def _num_elements(named: Named) -> int:
    return sum(spec.num_bytes // spec.dtype.itemsize for _, spec in named)


def _portion(named: Named, num_elements: int) -> Named:
    """Return parameters of so many elements together, the largest of them first."""
    largest_first = sorted(named, key=lambda one: one[1].num_bytes, reverse=True)
    chosen: list[tuple[str, TensorSpec]] = []
    for one in largest_first:
        if _num_elements([*chosen, one]) <= num_elements:
            chosen.append(one)
    chosen = chosen or largest_first[-1:]
    return [one for one in named if one in chosen]


def _compare(
    job: TrainingJob, sections: Sequence[Named], num_steps: int, *, rebuild: bool
) -> tuple[str, str, list[str]] | None:
    """Take steps by one optimizer over all sections, and by one of each.

    Args:
        job: Builds the optimizers.
        sections: Names and specs of their parameters.
        num_steps: How many.
        rebuild: Whether the latter are built again before each step.

    Returns:
        ``None`` if all bits are the same; else the optimizer's class, what it does
        otherwise, and attributes that the former has set.
    """
    both = list({name: spec for named in sections for name, spec in named}.items())
    whole = _Trial(job, both)
    parts = [_Trial(job, named) for named in sections]
    unused = attributes(whole.optimizer, among_all=True)
    for step in range(num_steps):
        whole.step(step)
        for part in parts:
            if rebuild:
                part.build()
            part.step(step)
            if (what := _first_difference(part, whole)) is not None:
                changed = differing(unused, attributes(whole.optimizer, among_all=True))
                return type(whole.optimizer).__name__, what, changed
    return None


@dataclass
class _Numbers:
    group_values: bytes = b""


class _Trial:
    """Parameters with an optimizer over them, kept as sections are.

    Args:
        job: Builds the optimizer.
        named: Names and specs of the parameters.
        zeros: They are zeros, as many are in the beginning, not random.
    """

    def __init__(self, job: TrainingJob, named: Named, *, zeros: bool = False) -> None:
        self._job = job
        self.numbers = _Numbers()
        self.with_state = frozenset[str]()
        self.lacking = frozenset[str]()
        spec = optimizer_state_spec(job, named)
        self.state_spec, self.forms = spec.state, spec.forms
        self.attached = {name: spec.attached for name, spec in named}
        self.parameters = {
            name: _fill(torch.zeros(spec.shape, dtype=spec.dtype), name, not zeros)
            for name, spec in named
        }
        self.gradients = {
            name: torch.zeros_like(tensor) for name, tensor in self.parameters.items()
        }
        self.state = {
            name: {key: torch.zeros(spec.shape, dtype=spec.dtype) for key, spec in keys.items()}
            for name, keys in self.state_spec.items()
        }
        self.build()

    def build(self) -> None:
        """Build the optimizer from what is kept."""
        self._optimizer = SectionOptimizer(self._job, self, lambda step: 1 / (1 + step))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's."""
        assert self._optimizer.optimizer is not None
        return self._optimizer.optimizer

    def step(self, step: int) -> None:
        """Take one step.

        Raises:
            UserCodeError: As ``SectionOptimizer.step``; it draws random numbers.
        """
        magnitude = MAGNITUDES[step % len(MAGNITUDES)]
        for name, gradient in self.gradients.items():
            _fill(gradient, f"{step} {name}", magnitude)
        torch.manual_seed(step)
        before = _generators()
        self._optimizer.step(step, self.gradients)
        if _generators() != before:
            raise UserCodeError(
                f"optimizer {type(self.optimizer).__name__} draws random numbers in its "
                "step, which differ on machines that hold one section: use "
                "one without, or with a generator of each step's own seed"
            )

    def groups(self) -> dict[str, dict[str, Json]]:
        """Return the values of the group of each parameter."""
        return group_of_each(self.optimizer, self._optimizer.parameters)

    def contents(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield the parameter's name, the state's key or nothing, and the tensor."""
        for name, tensor in self.parameters.items():
            yield name, "", tensor
        for name, keys in self.state.items():
            for key, tensor in keys.items():
                yield name, key, tensor


def _first_difference(part: _Trial, whole: _Trial) -> str | None:
    """Return what ``part`` has done differently from ``whole``, if anything."""
    for name, key, tensor in part.contents():
        other = whole.state.get(name, {}).get(key) if key else whole.parameters[name]
        if other is None or not same_bits(tensor, other):
            return f"updates {name}"
    groups = whole.groups()
    for name, values in part.groups().items():
        for key in differing(values, groups[name]):
            return f"sets {key!r} of param_groups"
    return None


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same to the last bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def _fill(tensor: torch.Tensor, seed: str, magnitude: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return tensor.uniform_(-magnitude, magnitude, generator=generator)


def _generators() -> tuple[object, ...]:
    """Return the state of the generators that user code may draw from."""
    _, keys, *rest = np.random.get_state(legacy=True)
    torch_state = torch.get_rng_state().numpy().tobytes()
    return torch_state, random.getstate(), np.asarray(keys).tobytes(), *rest
