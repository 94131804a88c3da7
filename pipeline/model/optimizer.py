"""The user's optimizer over one section, and the state that it keeps.

What it keeps is found out by letting it take one step. Committed are its state and the
values of its parameter groups that steps change, but for learning rates, which the job's
schedule sets. All else is configuration, which its factory sets in every process anew.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from spottrain.errors import UserCodeError, shortened
from spottrain.pipeline.base.heap import trim_heap
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import NamedParameters, TrainingJob
from spottrain.pipeline.model.sections import Attached, ModelLayout, TensorSpec
from spottrain.pipeline.model.state import (
    Forms,
    OptimizerSpec,
    StateSpec,
    check_forms,
    flatten,
    keep_leaves,
    number,
    spec_of_leaf,
)
from spottrain.pipeline.model.values import (
    GroupValues,
    attributes,
    differing,
    learning_rates,
    tensors_of,
)
from spottrain.units import counted

_FUSED: Mapping[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adagrad: ("cpu",),
    torch.optim.Adam: ("cpu", "cuda"),
    torch.optim.AdamW: ("cpu", "cuda"),
    torch.optim.SGD: ("cpu", "cuda"),
}
"""Optimizers that torch has fused kernels for, and on which devices."""


class UpdatedMemory(Protocol):
    """A section's memory as its optimizer sees it."""

    with_state: frozenset[str]
    """Parameters for which the optimizer has made its state, which it does when one has
    its first gradient."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Tensors by name, of all parameters."""

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Of those that are trained; of buffers that forwards change, their changes."""

    @property
    def lacking(self) -> frozenset[str]:
        """Those of them that no backward gave a gradient: theirs are None, as in torch."""

    @property
    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """By parameter and leaf, of those that are trained."""

    @property
    def state_spec(self) -> StateSpec:
        """Of ``state``."""

    @property
    def forms(self) -> Mapping[str, Forms]:
        """How ``state`` is nested, by parameter."""

    @property
    def attached(self) -> Mapping[str, Attached]:
        """By parameter, buffers left out, what the user's code has attached to it."""

    @property
    def numbers(self) -> UpdatedNumbers:
        """What is kept beside tensors."""


class UpdatedNumbers(Protocol):
    """Numbers of a section's memory that its optimizer sets."""

    group_values: bytes
    """``GroupValues.text`` after the last update."""


def optimizer_state_spec(
    job: TrainingJob, named: Sequence[tuple[str, TensorSpec]]
) -> OptimizerSpec:
    """Return what the job's optimizer keeps for parameters like these.

    One step is taken on the meta device, by torch's own optimizers without the fused kernels that
    it lacks, or, where the optimizer refuses that (those that look at values do), on the CPU, with
    random parameters and gradients.
    A number in the state counts as a 0-dimensional float64; what is None is left out.

    Raises:
        UserCodeError: The optimizer raised, or keeps something else for each parameter
            than tensors, numbers, and lists or dictionaries of them.
    """
    with contextlib.suppress(UserCodeError):
        return _step(job, named, "meta")
    return _step(job, named, "cpu")


def section_state_spec(job: TrainingJob, layout: ModelLayout, section: int) -> OptimizerSpec:
    """Return ``optimizer_state_spec`` of one section's parameters."""
    return optimizer_state_spec(job, layout.named_parameters(section))


def any_optimizer(job: TrainingJob, layout: ModelLayout) -> torch.optim.Optimizer | None:
    """Return the optimizer of the first section that trains; ``None``: nothing is trained.

    Raises:
        UserCodeError: As ``build_optimizer``.
    """
    for section in range(layout.num_sections):
        named = [
            (name, spec.attached.parameter(zeros, spec.requires_grad))
            for name, spec in layout.named_parameters(section)
            for zeros in [torch.zeros(()).expand(spec.shape)]
        ]
        optimizer = build_optimizer(job.optimizer, named)
        if optimizer is not None:
            return optimizer
    return None


def optimizer_class(job: TrainingJob, layout: ModelLayout) -> str:
    """Return the full name of the optimizer's class; empty if nothing is trained.

    Raises:
        UserCodeError: As ``build_optimizer``.
    """
    optimizer = any_optimizer(job, layout)
    if optimizer is None:
        return ""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


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
    try:
        with user_code("optimizer"):
            optimizer = factory(wanted)
    except UserCodeError as error:
        if "empty parameter list" not in str(error):
            raise
        raise UserCodeError(
            f"{error}: every section of the model has an optimizer of its own, and this one "
            f"ignored all parameters of the section with {wanted[0][0]}; pass every parameter "
            "that it receives, and set requires_grad=False in model for what is not trained",
            error.traceback,
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(
            f"optimizer must return a torch.optim.Optimizer: got {type(optimizer).__name__}"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if extra := held - {id(p) for _, p in wanted}:
        raise UserCodeError(
            f"optimizer holds {counted(len(extra), 'parameter')} that it was not given: build it "
            "over the (name, parameter) pairs of its argument"
        )
    return optimizer


def rate_factor(schedule: Callable[[int], float], step: int) -> float:
    """Return a schedule's factor on the learning rates.

    Raises:
        UserCodeError: It raised, or returned something else than a number of zero or more.
    """
    with user_code(f"lr_schedule({step})"):
        factor = schedule(step)
        is_number = isinstance(factor, numbers.Real | torch.Tensor)
        number = float(factor) if is_number else math.nan
    if not 0 <= number < math.inf:
        raise UserCodeError(
            f"lr_schedule must return a finite factor on the learning rates, of zero or "
            f"more: got {shortened(factor)} for step {step}"
        )
    return number


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


def _do_without_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's own optimizers, which keep the same either way, use no fused kernels."""
    for group in optimizer.param_groups if type(optimizer) in _FUSED else ():
        group["fused"] = False


@contextlib.contextmanager
def _fused_where_possible(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Do without torch's fused SGD where some parameters have momentum and others have
    their first gradient: it takes momentum of all or of none."""
    mixed = []
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        states = (optimizer.state[p] for p in group["params"] if p.grad is not None)
        if len({state.get("momentum_buffer") is None for state in states}) > 1:
            mixed.append((group, group["fused"]))
            group["fused"] = False
    yield
    for group, fused in mixed:
        group["fused"] = fused


class SectionOptimizer:
    """The user's optimizer over one section, parameters, gradients and state in memory.

    Args:
        job: Builds the optimizer.
        memory: The section; one that was never updated has no optimizer state.
        lr_schedule: Factor on learning rates; may be another than the job's.

    Raises:
        UserCodeError: As ``build_optimizer``; what was kept does not fit.
    """

    def __init__(
        self,
        job: TrainingJob,
        memory: UpdatedMemory,
        lr_schedule: Callable[[int], float] | None = None,
    ) -> None:
        self._memory = memory
        self._schedule = lr_schedule or job.lr_schedule
        self.parameters: list[tuple[str, nn.Parameter]] = []
        """Those that are trained."""
        for name, gradient in memory.gradients.items():
            if name not in memory.attached:  # a buffer
                continue
            # It counts its own changes (``data``): those that it makes after ``point_at``
            # are not changes of this memory, which autograd may have in use.
            data = memory.parameters[name].data
            parameter = memory.attached[name].parameter(data)
            parameter.grad = gradient
            self.parameters.append((name, parameter))
        self.optimizer = build_optimizer(job.optimizer, self.parameters)
        """The user's; ``None`` where nothing is trained."""
        self._attributes: dict[str, object] | None = None
        if self.optimizer is not None:
            use_fused_kernels(self.optimizer)
            self._rates = [group.get("lr") for group in self.optimizer.param_groups]
            self._groups = GroupValues(self.optimizer)
            self._group_values = memory.numbers.group_values
            self._groups.restore(self._group_values)
            self._load(self.optimizer)
        forms = memory.forms
        self._places = {
            name: {key: _place(tensor) for key, tensor in state.items()}
            for name, state in memory.state.items()
            if state.keys() == forms.get(name, {}).keys()
        }
        """Where the state of each parameter is, if that is tensors alone."""

    def point_at(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Update other memory from now on; state stays where it is."""
        for name, parameter in self.parameters:
            parameter.grad = None
            parameter.data = parameters[name]

    def learning_rate(self, step: int) -> float | None:
        """Return the first group's rate in a mini-batch; ``None``: there is none."""
        if self.optimizer is None or self._rates[0] is None:
            return None
        return float(self._rates[0] * self._factor(step))

    def _factor(self, step: int) -> float:
        return 1.0 if self._schedule is None else rate_factor(self._schedule, step)

    def step(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Update the parameters as mini-batch ``step`` does.

        Args:
            step: The mini-batch.
            gradients: Its mean gradients; the optimizer may write to them.

        Raises:
            UserCodeError: The optimizer raised, or changes what is not kept.
        """
        if self.optimizer is None:
            return
        lacking = self._memory.lacking
        for name, parameter in self.parameters:
            parameter.grad = None if name in lacking else gradients[name]
        with user_code(f"optimizer in mini-batch {step}"):
            factor = self._factor(step)
            groups = self.optimizer.param_groups
            for group, rate in zip(groups, self._rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * factor
            rates = learning_rates(self.optimizer)
            with _fused_where_possible(self.optimizer):
                self.optimizer.step()
        self._check(self.optimizer, rates)
        self._keep(self.optimizer)

    def _check(self, optimizer: torch.optim.Optimizer, rates: list[object]) -> None:
        """Refuse changes that a successor would not know of."""
        kind = type(optimizer).__name__
        if learning_rates(optimizer) != rates:
            raise UserCodeError(
                f"optimizer {kind} sets 'lr' of its param_groups in its step, which only "
                "lr_schedule may: give it a constant learning rate, its schedule to "
                "TrainingJob as lr_schedule"
            )
        # Before the first step there may be less, such as a flag that it sets once.
        now = attributes(optimizer)
        if self._attributes is not None and (names := differing(self._attributes, now)):
            raise UserCodeError(
                f"optimizer {kind} changes its attribute {names[0]!r} from step to step, "
                "which a machine that takes over would not have: keep it in "
                "optimizer.state or param_groups"
            )
        self._attributes = now

    def _load(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = dict(self.parameters)
        for name in self._memory.with_state:
            forms, kept = self._memory.forms[name], self._memory.state[name]
            leaves = {
                leaf: number(kept[leaf], spec.number_type) if spec.number_type else kept[leaf]
                for leaf, spec in self._memory.state_spec[name].items()
            }
            for key, form in forms.items():
                optimizer.state[parameters[name]][key] = form.build(leaves)

    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Move state that the optimizer has made into the memory, to stay there."""
        brought = False
        before = with_state = self._memory.with_state
        for name, parameter in self.parameters:
            if name not in with_state and not optimizer.state.get(parameter):
                continue  # it has had no gradient yet
            with_state |= {name}
            if not self._is_kept(name, optimizer.state[parameter]):
                brought |= self._bring(name, optimizer.state[parameter])
        if (group_values := self._groups.text()) != self._group_values:
            self._memory.numbers.group_values = self._group_values = group_values
        if with_state != before:
            self._memory.with_state = with_state
        if brought:
            trim_heap()

    def _is_kept(self, name: str, state: Mapping[str, object]) -> bool:
        """Return whether a parameter's state is tensors of the memory, all of them in place."""
        places = self._places.get(name)
        return (
            places is not None
            and state.keys() == places.keys()
            and all(
                isinstance(value, torch.Tensor) and _place(value) == places[key]
                for key, value in state.items()
            )
        )

    def _bring(self, name: str, state: dict[str, object]) -> bool:
        """Move a parameter's state into the memory; return whether there was any elsewhere."""
        brought = False
        made = flatten(name, state)
        check_forms(name, self._memory.forms.get(name, {}), made.forms)
        moved = keep_leaves(name, made.leaves, self._memory.state.get(name, {}))
        for key, form in made.forms.items():
            if moved.keys() & form.leaves:
                state[key] = form.build({**made.leaves, **moved})
                brought = True
        return brought


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a tensor has in common with all others that are the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@contextlib.contextmanager
def _no_gpu_in_sight() -> Iterator[None]:
    """Let torch find no GPU, and make no CUDA call to find that out.

    Adam asks of any GPU whether a graph is being captured, which makes a context there:
    in a supervisor no worker that is forked afterwards could use CUDA.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _step(job: TrainingJob, named: Sequence[tuple[str, TensorSpec]], device: str) -> OptimizerSpec:
    # Repeated: it takes seconds to draw as many numbers as a large model has.
    values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) - 0.5
    parameters = []
    for name, spec in named:
        filled = _filled(spec, values, device)
        parameter = spec.attached.parameter(filled, spec.requires_grad)
        if spec.requires_grad:
            parameter.grad = _filled(spec, values.flip(0), device)
        parameters.append((name, parameter))
    optimizer = build_optimizer(job.optimizer, parameters)
    if optimizer is None:
        return OptimizerSpec({}, {}, {})
    if device == "meta":
        _do_without_fused_kernels(optimizer)
    with user_code("step of the optimizer"), _no_gpu_in_sight():
        optimizer.step()
    names = {id(parameter): name for name, parameter in parameters}
    states = {
        name: flatten(name, optimizer.state[p]) for name, p in parameters if p in optimizer.state
    }
    return OptimizerSpec(
        state={
            name: {leaf: spec_of_leaf(value) for leaf, value in state.leaves.items()}
            for name, state in states.items()
        },
        forms={name: state.forms for name, state in states.items()},
        group_bytes={
            names[id(group["params"][0])]: sum(t.nbytes for t in tensors)
            for group in optimizer.param_groups
            if group["params"] and (tensors := tensors_of(group))
        },
    )


def _filled(spec: TensorSpec, values: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor of these values, over and over; on the meta device of none."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    if device != "meta":
        count = -(-tensor.numel() // values.numel())
        tensor.view(-1).copy_(values.repeat(count)[: tensor.numel()])
    return tensor
