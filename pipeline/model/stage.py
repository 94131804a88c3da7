"""One stage of the user's model: its own forward, intercepted outside the stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only, tree_unflatten

from spottrain.errors import SpottrainError, UserCodeError
from spottrain.pipeline.base.containers import know_classes_of
from spottrain.pipeline.base.layout import as_sent, format_of
from spottrain.pipeline.model.data import seed_everything
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.pipeline.model.loss import LossSums, loss_sums
from spottrain.pipeline.model.naming import Naming, leaf_name
from spottrain.pipeline.model.order import random_seed
from spottrain.pipeline.model.parameters import (
    RunningBuffer,
    build_parameters,
    place_buffers,
    place_parameters,
    running_buffers,
)
from spottrain.pipeline.model.recorder import strided_tensors
from spottrain.pipeline.model.sections import (
    Crossing,
    Cut,
    End,
    ModelLayout,
)
from spottrain.pipeline.model.selective import recomputed_selectively
from spottrain.pipeline.model.skeleton import (
    build_skeleton,
    compile_blocks,
    replaced,
    run_eagerly,
)
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.wire.model import Precision

Activations = list[torch.Tensor]
"""What passes a cut, as ``Cut.crossing`` has it in order."""
Gradients = list[torch.Tensor | None]
"""Of activations; ``None`` where the loss does not depend on one, or nothing before it is
trained: what led to it gets no gradient, as where no stage ends there."""
StageOutput = Activations | LossSums
"""What the next stage receives; of the last one, what the loss has returned."""
Seeds = Callable[[int], int]
"""The seed of a section's random numbers, for the micro-batch at hand. Of a model of n sections
wave w asks for that of section s by the number w n + s."""

CHECK_FINITE = "SPOTTRAIN_CHECK_FINITE"
"""Environment variable of a job that lets every section's output be checked: slow."""
AUTOCAST_TYPES: Mapping[Precision, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Type that autocast converts to; ``None``: there is no autocast."""
_IDLE = -1


def _pass() -> None:
    """Check nothing."""


class _Unwind(BaseException):
    """Leaves the user's code after the stage's last section, with what passes the cut."""

    def __init__(self, activations: Activations) -> None:
        self.activations = activations


class NotReentrant:
    """Stands for ``torch.utils.checkpoint.CheckpointFunction``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng: bool, *args: Any) -> Any:
        """Checkpoint a call of ``function``."""
        return checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng
        )


class StageModel:
    """Consecutive sections of the user's model, run by the model's own code.

    Modules before the stage yield zeros of the right shape that take no memory; each received
    tensor is put in as the output of what has made it, such as of the block before the stage;
    after the stage's last block the user's code is left by an exception. Parameters that the
    stage does not own take no memory.

    Where the loss calls the model several times, each call is a wave that goes through all
    sections. The stage runs its sections of each; behind them, too, modules yield zeros,
    until the last wave that comes through the stage has left it.

    What passes a cut is laid out as if it had been sent where it is made, whether or not it
    leaves this stage, and so is the sum of its gradients. Autograd adds those of later sections
    first, in one stage and, since they come in as a sum, in several: with the same bits.

    Every forward begins with the committed values of the buffers that forwards change, in
    memory of its own: a recompute sees what the forward saw, and autograd may keep them.

    Args:
        job: The user's job.
        layout: What the tracer found out about it.
        sections: The stage's sections.
        tensors: Section to parameter name to storage. Parameters are built over just
            this storage, nothing is copied. Each section has its own parameter for a
            tied name. Of one that ranks divide it is that of this rank's part. Those of
            ``layout.matrices`` may be in the type of ``precision``.
        device: Where the tensors are; buffers are moved there.
        precision: Type that the loss computes matrix multiplications in (autocast).
        buffers: Of the whole model on ``device``, by name, where another stage model of
            this process has moved them there already; those that are missing are added.
        shards: What this rank has of matrices that several divide.
        selective: Whether blocks keep little for their backward (``selective``).
        check: Called between sections, forward and backward: what it raises ends the
            computation there, and is no error of the user's code if it is a
            SpottrainError.

    Raises:
        UserCodeError: The model cannot be built.
        SpottrainError: ``tensors`` does not fit ``layout``.
    """

    def __init__(
        self,
        job: TrainingJob,
        layout: ModelLayout,
        sections: range,
        tensors: Mapping[int, Mapping[str, torch.Tensor]],
        device: torch.device | str = "cpu",
        precision: Precision = "fp32",
        buffers: dict[str, torch.Tensor] | None = None,
        shards: Shards = ALONE,
        selective: bool = False,
        check: Callable[[], None] = _pass,
    ) -> None:
        self.sections = sections
        self._job = job
        self._layout = layout
        self._check = check
        self._device = torch.device(device)
        self._checks_finite = bool(os.environ.get(CHECK_FINITE))
        self._shards = shards
        self._autocast_type = AUTOCAST_TYPES[precision]
        self._model = build_skeleton(job.model).train()
        cuts = layout.cuts[sections[-1] : sections.stop]
        self._last_wave = max(cuts[0].ends) if cuts else len(layout.waves)
        skips = sections.start or (layout.waves and cuts)
        self._twin = build_skeleton(job.model).to("meta") if skips else None
        self._section = self._reached = _IDLE
        self._wave = 0
        self._writable_zeros = False
        self._seeds: Seeds = int
        self._received: dict[str, torch.Tensor] = {}
        self._held: dict[str, torch.Tensor] = {}
        """What passes cuts, of what has come in or was made so far."""
        self._crossing = layout.crossing
        self._naming: Naming | None = None
        if layout.names_calls:
            self._naming = Naming(self._take, lambda: self._section, self._to_change)
        for end in (end for cut in layout.cuts for end in cut.ends.values()):
            know_classes_of(end.output)
        place_buffers(self._model, self._device, {} if buffers is None else buffers)
        self._parameters = build_parameters(
            self._model, layout, tensors, sections, self._autocast_type, shards
        )
        self._running = running_buffers(self._model, layout, self._parameters)
        self._swaps = place_parameters(self._model, layout, self._parameters, self._device)
        owned = {name.rpartition(".")[0] for own in self._parameters.values() for name in own}
        shards.divide(self._model, owned)
        compile_blocks(self._model, layout.units)
        for block in map(self._model.get_submodule, layout.units if selective else ()):
            block.forward = recomputed_selectively(block.forward)
        shards.split.divide(self._model, owned, shards.ranks, self._seed)
        self._intercept()

    def parameters_of(self, section: int) -> list[tuple[str, nn.Parameter]]:
        """Return the (name, parameter) pairs of one of the stage's sections; those of buffers
        that forwards change have no part in computations but ``add_changes``."""
        return list(self._parameters[section].items())

    @property
    def module(self) -> nn.Module:
        """The user's model, as the stage runs it."""
        return self._model

    @property
    def section(self) -> int | None:
        """The section that runs, or ran when an error left it."""
        return None if self._reached == _IDLE else self._reached

    def train(self, mode: bool = True) -> None:
        """Switch the model to training mode (dropout on) or to evaluation mode."""
        self._model.train(mode)

    def eval(self) -> None:
        """Switch the model to evaluation mode."""
        self.train(False)

    @property
    def receives(self) -> tuple[Crossing, ...]:
        """What passes the cut before the stage."""
        start = self.sections.start
        return self._layout.cuts[start - 1].crossing if start else ()

    def require_gradients(self, received: Activations) -> None:
        """Let a backward leave the gradients of what has come in, where it goes on."""
        for one, tensor in zip(self.receives, received, strict=True):
            tensor.requires_grad_(one.has_gradient)

    def forward(self, batch: Batch, received: Activations, seeds: Seeds) -> StageOutput:
        """Run the stage on one micro-batch.

        Args:
            batch: The whole micro-batch, as ``collate`` made it.
            received: What the stage before sent; empty on the first stage.
            seeds: Called at the entry of each section for the seed of its random
                numbers; section 0's also covers all that runs before the blocks.

        Returns:
            What the next stage receives, or on the last stage what the loss has returned.

        Raises:
            UserCodeError: The user's code raised, swallowed the exception that leaves
                it, ran blocks out of order or returned something else than a loss.
        """
        names = [one.name for one in self.receives]
        if len(received) != len(names):
            raise SpottrainError(
                f"stage of sections {self.sections} must receive {len(names)} tensors: got "
                f"{len(received)}"
            )
        # Views, as of what is made here: autocast treats leaves of autograd's otherwise.
        views = (tensor.view_as(tensor) for tensor in received)
        self._seeds, self._received = seeds, dict(zip(names, views, strict=True))
        try:
            with user_code("loss"), self._autocast(), self._replaying_checkpoints():
                result = self._run_loss(batch)
        except _Unwind as unwind:
            return unwind.activations
        finally:
            reached, self._section, self._received = self._section, _IDLE, {}
            self._held = {}
        waves = self._layout.waves
        if waves and self._wave != len(waves) - 1:
            raise UserCodeError(
                f"loss called models {self._wave + 1} times, and {len(waves)} times for the first "
                "example: call them as often, and in the same order, for every micro-batch"
            )
        if reached != self._layout.num_sections - 1:
            raise UserCodeError(
                f"loss returned within section {reached}, before section "
                f"{self.sections[-1]} ended; let BaseException pass through the model "
                "and run all blocks in every forward pass"
            )
        sums = loss_sums(result)
        self._check_finite(reached, sums.loss)
        return sums

    def add_changes(self, nodes: range, num_nodes: int, scale: float) -> None:
        """Add to the gradients of buffers what the newest forward has changed in them.

        Args:
            nodes: Virtual nodes of the forward; each counts as if it had made that change.
            num_nodes: Of a mini-batch.
            scale: What gradients are multiplied by.
        """

        def weight(one: RunningBuffer) -> float:
            return scale * sum(one.weight(node, num_nodes) for node in nodes)

        if self._running:
            torch.autograd.backward(
                [one.committed for one in self._running],
                [one.change() * weight(one) for one in self._running],
            )

    def _run_loss(self, batch: Batch) -> Any:
        for one in self._running:
            one.begin()
        self._wave = -1 if self._layout.waves else 0
        self._enter(0)
        self._held = dict(self._received)
        if self._naming is not None:
            self._naming.calls.clear()
        own = tree_map(lambda leaf: leaf, batch)  # such code as batch.pop("labels") changes
        try:
            with self._naming or nullcontext():
                return self._job.loss(self._model, own)
        except RuntimeError as error:
            if self._writable_zeros or "written-to tensor" not in str(error):
                raise
        # It writes to the output of a skipped module, such as by an activation in place.
        self._writable_zeros = True
        return self._run_loss(batch)

    def _check_finite(self, section: int, output: torch.Tensor) -> None:
        """Name the first section whose output is not finite, if that was asked for."""
        if output.is_meta or not self._checks_finite:
            return
        if not bool(torch.isfinite(output.detach()).all()):
            raise UserCodeError(
                f"the output of section {section} is not finite, as the first one: its "
                f"blocks or their parameters make nan or inf ({CHECK_FINITE} is set)"
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_type is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._autocast_type)

    def _enter(self, section: int) -> None:
        """Begin a section: its random numbers, its copies of tied parameters."""
        self._check()
        self._section = self._reached = section
        if section == 0 or section in self.sections:
            is_split = self._shards.split.is_split_before(self._layout, section)
            self._seed(*([self._shards.index] if is_split else []))
        self._swap(section)

    def _seed(self, *parts: int) -> None:
        """Begin the random numbers of the section, or those of a part of it."""
        seed = self._seeds(max(self._wave, 0) * self._layout.num_sections + self._section)
        seed = random_seed(seed, *parts) if parts else seed
        seed_everything(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _swap(self, section: int) -> None:
        for module, attribute, parameter in self._swaps.get(section, ()):
            setattr(module, attribute, parameter)

    @contextmanager
    def _replaying_checkpoints(self) -> Iterator[None]:
        """Let ``torch.utils.checkpoint`` around blocks run them again as they ran first.

        A backward calls the checkpointed function outside ``forward``, so it is wrapped.
        Reentrant checkpoints become others: theirs would cut the graph at the activation
        that was received, which is no argument of the function.
        """
        plain = checkpoint._checkpoint_without_reentrant_generator

        def generate(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return plain(self._replaying(function), *args, **kwargs)

        with (
            replaced(checkpoint, "_checkpoint_without_reentrant_generator", generate),
            replaced(checkpoint, "CheckpointFunction", NotReentrant),
        ):
            yield

    def _replaying(self, function: Callable[..., Any]) -> Callable[..., Any]:
        section, seeds, received = self._section, self._seeds, self._received
        wave = self._wave
        changed = [one.value().clone() for one in self._running if wave > 0]
        naming, held = self._naming, self._held
        named_again: Callable[[], AbstractContextManager[None]] = nullcontext
        if naming is not None and not naming.is_inside:
            named_again = partial(naming.again, naming.calls.copy())

        def again(*args: Any, **kwargs: Any) -> None:
            self._section, self._seeds, self._received = section, seeds, received
            self._held, self._wave = dict(held), wave
            for one in self._running:
                one.begin()
            for one, value in zip(self._running, changed, strict=False):
                one.value().copy_(value)
            self._swap(section)
            try:
                with named_again():
                    function(*args, **kwargs)
            except _Unwind:
                pass
            finally:
                self._section, self._received, self._held = _IDLE, {}, {}

        return again

    def _intercept(self) -> None:
        """Replace ``forward`` of the modules where the stage begins and ends."""
        start, cuts, waves = self.sections.start, self._layout.cuts, self._layout.waves
        outside = [
            (section, end.module)
            for section, cut in enumerate(cuts)
            for end in cut.ends.values()
            if section not in self.sections and not end.must_run
        ]
        passed = tuple(f"{name}." for section, name in outside if section < start or waves)
        for section, cut in enumerate(cuts if waves else cuts[: self.sections.stop]):
            for name, end in {end.module: end for end in cut.ends.values()}.items():
                module = self._model.get_submodule(name)
                if (section, name) in outside and None in end.like and self._twin is not None:
                    module.forward = self._skipping_forward(name, module.forward)
                module.forward = self._cut_forward(section, name, module.forward)
        for name, sections in self._layout.skippable.items():
            module = self._model.get_submodule(name)
            skips = sections - {*self.sections} if waves else min(sections) < start
            if skips and not name.startswith(passed):
                module.forward = self._skipping_forward(name, module.forward)
            if self._naming is not None:
                module.forward = self._named_forward(name, module.forward, self._naming)
        for name, section in dict(waves).items():
            module = self._model.get_submodule(name)
            module.forward = self._wave_forward(name, section, module.forward)

    def _wave_forward(
        self, name: str, section: int, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the new ``forward`` of a module of which each call is a wave."""

        def run(*args: Any, **kwargs: Any) -> Any:
            wave, waves = self._wave + 1, self._layout.waves
            if wave >= len(waves) or waves[wave].module != name:
                raise UserCodeError(
                    f"loss called {name or 'the model'} as number {wave + 1}, and not so for the "
                    "first example: call models as often, and in the same order, for every "
                    "micro-batch"
                )
            self._wave = wave
            if wave or section:  # else what ran before is in the same section
                self._enter(section)
            return forward(*args, **kwargs)

        return run

    def _named_forward(
        self, name: str, forward: Callable[..., Any], naming: Naming
    ) -> Callable[..., Any]:
        """Return the new ``forward`` of a module that is run whole, or not at all."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with naming.inside():
                output = forward(*args, **kwargs)
            return naming.named(name, output)

        return run

    def _cut_forward(
        self, section: int, name: str, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the new ``forward`` of the block that ends ``section``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            end = self._layout.cuts[section].ends.get(self._wave)
            if self._section != section or end is None:
                _refuse_order(name, section, self._section)
            with self._inside():
                if section in self.sections:
                    leaves = self._end_section(section, end, forward(*args, **kwargs))
                else:
                    leaves = self._skip_section(section, end, forward, args, kwargs)
            return tree_unflatten(leaves, end.output)

        return run

    def _end_section(self, section: int, end: End, output: Any) -> list[Any]:
        """Return the leaves of what a block has returned, as the next section gets them."""
        made, own = tree_leaves(output), self._own_of(end)
        if len(made) != len(end.leaves) or not all(isinstance(made[k], torch.Tensor) for k in own):
            raise UserCodeError(
                f"block {end.module} must return tensors in the same places each time: got "
                f"{type(output).__name__} of {len(made)}, at first {len(end.leaves)}"
            )
        for index in own:
            self._check_finite(section, made[index])
        leaves: list[Any] = list(end.leaves)
        if section == self.sections[-1]:
            self._held |= {name: as_sent(made[index]) for index, name in own.items()}
            if self._wave == self._last_wave:
                raise _Unwind(self._to_send(self._layout.cuts[section]))
            self._enter(section + 1)
            for index in own:
                leaves[index] = self._zeros_like(made[index])
            return leaves
        self._enter(section + 1)
        for index, name in own.items():
            is_written = section + 1 in self._layout.writes_input
            one = made[index].clone() if is_written else made[index]
            leaves[index] = self._held[name] = _as_if_sent(one, self._check)
        return leaves

    def _to_send(self, cut: Cut) -> Activations:
        """Return what passes the cut behind the stage."""
        for one in cut.crossing:
            if one.name not in self._held:
                self._refuse_name(one.name)
        return [self._held[one.name] for one in cut.crossing]

    def _skip_section(
        self, section: int, end: End, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> list[Any]:
        """Return stand-ins for what a block outside of the stage returns, or what has come in."""
        is_next = section == self.sections.start - 1
        own = self._own_of(end)
        leaves: list[Any] = list(end.leaves)
        if is_next:
            if end.must_run:
                forward(*args, **kwargs)
            self._enter(section + 1)
        else:
            self._enter(section + 1)
            alike = None if end.must_run else _alike(end, own, args, kwargs)
            leaves = tree_leaves(forward(*args, **kwargs)) if alike is None else alike
        for index, name in own.items():
            leaves[index] = self._received.get(name, leaves[index])
            if is_next and section + 1 in self._layout.writes_input:
                leaves[index] = leaves[index].clone()  # what came is needed again
        return leaves

    def _own_of(self, end: End) -> dict[int, str]:
        """Return the leaves of a block's output that pass cuts, and their names."""
        names = (leaf_name(end.name, index) for index in range(len(end.leaves)))
        return {k: name for k, name in enumerate(names) if name in self._crossing}

    def _take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the user's code gets in place of what a call between blocks returns."""
        if (received := self._received.get(name)) is not None:
            if received.shape != tensor.shape:
                self._refuse_name(name)
            return received
        if name not in self._crossing or self._section not in self.sections:
            return tensor
        self._held[name] = _as_if_sent(tensor, self._check)
        return self._held[name]

    def _to_change(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of what passes cuts, for an operator such as ``+=`` to change."""
        passing = (*self._held.values(), *self._received.values())
        return tensor.clone() if any(tensor is one for one in passing) else tensor

    def _refuse_name(self, name: str) -> NoReturn:
        raise UserCodeError(
            f"model must run the same code between its blocks each time: {name}, which was passed "
            "on in the first training example, is now missing, or another one; code that depends "
            "on values or devices goes into a block"
        )

    def _inside(self) -> AbstractContextManager[None]:
        """Return a context in which calls have no names."""
        return nullcontext() if self._naming is None else self._naming.inside()

    def _skipping_forward(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the new ``forward`` of a module that the stage may not own."""
        assert self._twin is not None
        twin = self._twin.get_submodule(name)
        needs_values = False
        known: dict[Any, Any] = {}
        """What the twin has returned, by what it was given."""
        end = self._layout.inner.get(name)
        leaves = end.leaves if end else ()
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal needs_values
            if self._section in self.sections or needs_values:
                return forward(*args, **kwargs)
            if end is not None:
                alike = _alike(end, tensors, args, kwargs)
                if alike is not None:
                    return tree_unflatten(alike, end.output)
            if (given := _shapes_of(args, kwargs)) not in known:
                try:
                    with torch.no_grad(), run_eagerly():
                        meta_args, meta_kwargs = tree_map_only(
                            torch.Tensor, lambda t: t.to("meta"), (args, kwargs)
                        )
                        known[given] = twin(*meta_args, **meta_kwargs)
                except (NotImplementedError, RuntimeError):
                    # It reads values, which meta tensors lack: run it over zeros.
                    needs_values = True
                    return forward(*args, **kwargs)
            output = known[given] if given else known.pop(given)
            return tree_map_only(torch.Tensor, self._zeros_like, output)

        return run

    def _zeros_like(self, meta: torch.Tensor) -> torch.Tensor:
        if self._writable_zeros:
            return torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)
        zero = torch.zeros((), dtype=meta.dtype, device=self._device)
        return zero.expand(meta.shape)


def go_backward(out: Activations, gradients: Gradients) -> None:
    """Go backward from what a stage has sent, as far as it depends on what is trained."""
    ends = [
        (end, gradient)
        for end, gradient in zip(out, gradients, strict=True)
        if gradient is not None and end.requires_grad
    ]
    if ends:
        torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])


def _shapes_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return what shapes of results depend on; empty if that is not known."""
    parts: list[Any] = []
    for name, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, torch.Tensor):
            parts.append((name, value.shape, value.dtype))
        elif value is None or isinstance(value, bool | int | float | str):
            parts.append((name, type(value), value))
        else:
            return ()
    return tuple(parts)


def _alike(end: End, own: Iterable[int], args: Any, kwargs: Any) -> list[Any] | None:
    """Return stand-ins for what a block returns: what it was given of the same shapes.

    Args:
        end: What is known of the block.
        own: Leaves of its output that are tensors and matter.
        args: That it was given.
        kwargs: That it was given by name.

    Returns:
        ``None`` if it was given nothing like one of them.
    """
    given, leaves = strided_tensors((args, kwargs)), list(end.leaves)
    for index in own:
        if (alike := end.like[index]) is None:
            return None
        leaves[index] = given[alike]
    return leaves


def _as_if_sent(activation: torch.Tensor, check: Callable[[], None]) -> torch.Tensor:
    """Return an activation laid out as another stage would receive it.

    So too its gradient, as autograd lays out that of what was received.

    Args:
        activation: Of the section that has ended.
        check: Called when its gradient is known.
    """

    layout = format_of(activation)

    def arrive(gradient: torch.Tensor) -> torch.Tensor:
        check()
        return gradient.contiguous(memory_format=layout)

    received = activation.view_as(activation).contiguous(memory_format=layout)
    if received.requires_grad:
        received.register_hook(arrive)  # type: ignore[no-untyped-call]
    return received


def _refuse_order(block: str, section: int, current: int) -> NoReturn:
    if current == _IDLE:
        raise UserCodeError(
            f"block {block} ran outside loss: turn activation checkpointing off in the "
            "model, or use torch.utils.checkpoint; spottrain recomputes activations itself"
        )
    raise UserCodeError(
        f"block {block} must run once, as the end of section {section}: it ran in "
        f"section {current}; run all blocks once each, in order"
    )
