"""The loss, run once without values over a model whose modules report when they are called.

It runs on the meta device, so that a model of any size is traced in seconds and without memory.
A value is *computed* if it depends on parameters, on an activation or on random numbers. A stage
that begins later than the section that made it does not have it: it passes every cut up to the
last section that uses it, if the user's code gets it where a stage can put it in (``naming``).
At every cut what the block returns is replaced by fresh copies, as if these had been received.
Values that depend on inputs and buffers alone (masks, rotary tables) may be used anywhere: each
stage computes them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.containers import know_classes_in
from spottrain.pipeline.base.heap import mmap_large_blocks
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.pipeline.model.loss import loss_sums
from spottrain.pipeline.model.naming import Naming, leaf_name
from spottrain.pipeline.model.recorder import (
    Recorder,
    TraceFacts,
    cut_facts,
    strided_tensors,
)
from spottrain.pipeline.model.sections import (
    Attached,
    CutPlaces,
    Trunk,
    Wave,
    parameter_slots,
)
from spottrain.pipeline.model.skeleton import (
    build_skeleton,
    of_any_size,
    on_device,
    replaced,
    run_eagerly,
)
from spottrain.pipeline.model.stage import NotReentrant

_NO_HOOKS = "saved tensor hooks"
"""In what torch says where they are not permitted."""


class RunsAgainError(UserCodeError):
    """A block runs again in one run of the loss."""


class DryRun:
    """The loss, run once over a model whose modules report when they are called.

    Args:
        job: The job.
        places: Where the model is cut.
        on_meta: Whether it runs on the meta device.
        tied: Parameters that several sections share.
        whole: Modules that stages run whole or skip, besides those that end a section;
            ``None``: they are not known yet.
        changed: Buffers that forwards change, as far as that is known: what is made from
            them is computed.
        counts_saved: Whether what autograd saves is counted.
    """

    def __init__(
        self,
        job: TrainingJob,
        places: CutPlaces,
        *,
        on_meta: bool,
        tied: frozenset[str],
        whole: Collection[str] | None,
        changed: Collection[str] = (),
        counts_saved: bool = False,
    ) -> None:
        self._job, self._counts_saved = job, counts_saved
        self._device = torch.device("meta" if on_meta else "cpu")
        self.model = build_skeleton(job.model)
        self.slots = parameter_slots(self.model)
        self.places, self._cut_names = places, places.cuts
        recorder = self._recorder = Recorder(names=whole is not None)
        self._naming = Naming(
            recorder.take,
            lambda: recorder.section,
            recorder.to_change,
            recorder.before,
            recorder.after,
        )
        self._whole = whole or ()
        self._changed = changed
        self._outputs: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
        self._fill()
        stand_in = self._stand_in
        numbers = range(1, places.num_cuts + 1)
        first = {name: self.model.get_parameter(name) for name in tied}
        self._swaps = [first, *({name: stand_in(name) for name in tied} for _ in numbers)]
        self._trunk: Trunk | None = None
        for name, module in list(self.model.named_modules()):
            module.forward = self._reporting(name, module.forward)

    @mmap_large_blocks()
    def run(self, batch: Batch, *, training: bool = True) -> TraceFacts:
        """Run the loss on one micro-batch, or evaluate it."""
        batch = tree_map_only(torch.Tensor, self._moved, batch)
        for tensor in strided_tensors(batch):
            self._recorder.register(tensor, batch=True)
        self.model.train(training)
        with (
            torch.random.fork_rng(devices=[]),
            torch.set_grad_enabled(training),
            run_eagerly(),
            replaced(checkpoint, "CheckpointFunction", NotReentrant),
            of_any_size(),
            self._counting(),
            self._recorder,
            self._naming,
            user_code("loss"),
        ):
            result = self._job.loss(self.model, batch)
            self._recorder.returned(result)
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise UserCodeError(
                "loss calls backward, so that gradients would count twice: remove the call, and "
                "return the sum of losses, whose backward runs stage by stage"
            )
        facts, number = self._recorder.facts, self.places.num_cuts
        facts.metrics = tuple(sorted(loss_sums(result).metrics))
        passed = len({section for section, _ in facts.cuts})
        if passed != number or self._recorder.section != number:
            raise UserCodeError(
                f"model ran {passed} of the {number} modules that end a "
                "section: run each once in every forward pass"
            )
        for name, buffer in self.model.named_buffers():
            before = self.buffers.get(name)
            if before is None or before.shape != buffer.shape:
                raise UserCodeError(
                    f"model gives its buffer {name} the shape {tuple(buffer.shape)} in forward: "
                    "register it with that shape when the model is built"
                )
            if before is not buffer:
                self._recorder.replaced(name, buffer)
        self._recorder.check_writes()
        return facts

    def _counting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which what autograd saves is counted, if it is to be."""
        if not self._counts_saved:
            return contextlib.nullcontext()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._recorder.saved, lambda kept: kept)
        return cast("contextlib.AbstractContextManager[None]", hooks)

    def _fill(self) -> None:
        """Move the model's tensors to the run's device, and register them."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._moved(buffer)
        self.buffers = dict(self.model.named_buffers())
        """As they were before the run."""
        for name, buffer in self.buffers.items():
            parameter = name if name in self._changed else None
            self._recorder.register(buffer, buffer=name, parameter=parameter)
        for name in self.slots:
            self._attach_parameter(name, self._stand_in(name), 0)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the run's device; its values stay known."""
        moved = on_device(tensor, self._device)
        if tensor.layout == torch.strided:
            self._recorder.known.add(moved, tensor)
        return moved

    def _stand_in(self, name: str) -> nn.Parameter:
        """Make a parameter that takes no memory, whatever the device."""
        module, attribute = self.slots[name][0]
        meta = getattr(module, attribute)
        number = torch.full((), 0.02, device=self._device).to(meta.dtype)
        return Attached.of(meta).parameter(number.expand(meta.shape), meta.requires_grad)

    def _attach_parameter(self, name: str, parameter: nn.Parameter, section: int) -> None:
        self._recorder.register(parameter, parameter=name, section=section)
        for module, attribute in self.slots[name]:
            setattr(module, attribute, parameter)

    def _reporting(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        recorder, naming = self._recorder, self._naming
        is_cut, is_whole = name in self._cut_names, name in self._whole
        is_inner = not is_cut and name in self.places.units
        trunk = next((one for one in self.places.trunks if one.module == name), None)

        def run(*args: Any, **kwargs: Any) -> Any:
            if trunk is not None:
                self._begin_wave(trunk)
            begin = recorder.section
            given = next(filter(torch.is_tensor, (*args, *kwargs.values())), None)
            made_by = "" if given is None else self._outputs.get(given, "")
            recorder.facts.fed_by.setdefault(name, made_by)
            recorder.stack.append(name)
            recorder.facts.runs.append((*recorder.stack,))
            try:
                with naming.inside() if is_cut or is_whole else contextlib.nullcontext():
                    output = forward(*args, **kwargs)
            finally:
                recorder.stack.pop()
            recorder.facts.calls.setdefault(name, set()).add((begin, recorder.section))
            if isinstance(output, torch.Tensor):
                self._outputs[output] = name
            if is_cut:
                with torch._C.DisableTorchFunction():
                    return self._cut(name, args, kwargs, output)
            if is_inner:
                with contextlib.suppress(UserCodeError):  # what it returns is left as it is
                    recorder.facts.inner[name] = cut_facts(name, "", args, kwargs, output)
            return naming.named(name, output) if is_whole else output

        return run

    def _begin_wave(self, trunk: Trunk) -> None:
        """Go to the section in which a wave begins."""
        facts, recorder = self._recorder.facts, self._recorder
        number = self.places.num_cuts
        if facts.waves and recorder.section != number:
            raise UserCodeError(
                f"model cannot be cut: it ran {trunk.module or 'itself'} before all blocks of "
                f"{facts.waves[-1].module or 'the model'} had run: run each once in every call"
            )
        recorder.wave, recorder.section = len(facts.waves), number - len(trunk.cuts)
        facts.waves.append(Wave(trunk.module, recorder.section))
        self._trunk = trunk
        self._swap(recorder.section)

    def _swap(self, section: int) -> None:
        for tied, parameter in self._swaps[section].items():
            self._attach_parameter(tied, parameter, section)

    def _cut(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """End a section; return the block's output as a later stage would see it."""
        recorder, section = self._recorder, self._recorder.section
        by_hand, trunk = self.places.is_by_hand, self._trunk
        in_order = self._cut_names if trunk is None else trunk.cuts
        passed = section if trunk is None else section - self.places.num_cuts + len(in_order)
        expected = in_order if by_hand else in_order[passed:][:1]
        cuts = recorder.facts.cuts
        seen = [cut.module for (_, wave), cut in cuts.items() if wave == recorder.wave]
        if name in seen and not self.places.trunks:
            raise RunsAgainError(
                f"block {name} must run once in each call of a model: it ran again after "
                f"{seen[-1]}; run all blocks once each, in the order of their list"
            )
        if name in seen or name not in expected:
            advice = ""
            if name in seen:
                advice = "; a model may be called again once all of its blocks have run"
            elif not by_hand:
                advice = (
                    "; a model that leaves layers out at random must not (LayerDrop: set "
                    "layerdrop to 0 in its config)"
                )
            after = f"it ran after {seen[-1]}" if seen else "it ran first"
            raise UserCodeError(
                f"block {name} must run once, in order: {after}; run all blocks once "
                f"each, in the order of their list{advice}"
            )
        know_classes_in(output)
        leaves, structure = tree_flatten(output)
        activation = _activation_among(name, leaves)
        output_name = f"{name}@{recorder.wave}" if recorder.wave else name
        cuts[section, recorder.wave] = cut_facts(name, output_name, args, kwargs, output)
        begun = section + 1
        makers = frozenset([name])
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                # No leaf of autograd's: blocks may write to what they are given (``x += f(x)``).
                recorder.given = [leaf]
                copy = leaf.detach().clone()
                if leaf.requires_grad:
                    copy = copy.requires_grad_().clone()
                leaves[index] = copy
                is_activation = index == activation
                recorder.register(
                    copy,
                    section=begun if is_activation else section,
                    computed=True,
                    makers=makers,
                    received=is_activation,
                )
                recorder.made(copy, leaf_name(output_name, index), section)
        recorder.section = begun
        recorder.cross(leaves[activation])
        self._swap(begun)
        return tree_unflatten(leaves, structure)


def _activation_among(block: str, leaves: Sequence[Any]) -> int:
    """Return which leaf of a block's output is its activation: its first one of numbers."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return index
    got = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "nothing"
    raise UserCodeError(
        f"block {block} must return a floating-point tensor, or tuples, lists, dictionaries or "
        f"dataclasses with one: got {got}"
    )


def first_run(
    job: TrainingJob,
    places: CutPlaces,
    batch: Batch,
    whole: Collection[str] | None = None,
    *,
    changed: Collection[str] = (),
    counts_saved: bool = True,
) -> tuple[DryRun, TraceFacts, bool]:
    """Run on the meta device if the user's code permits it, else on the CPU.

    What autograd saves is counted unless the code takes gradients by ``torch.func``, which
    permits no hooks.
    """

    def run(*, on_meta: bool) -> tuple[DryRun, TraceFacts, bool]:
        made = DryRun(
            job,
            places,
            on_meta=on_meta,
            tied=frozenset(),
            whole=whole,
            changed=changed,
            counts_saved=counts_saved,
        )
        return made, made.run(batch), on_meta

    try:
        return run(on_meta=True)
    except UserCodeError as error:
        if error.__cause__ is None:
            raise
        if counts_saved and _NO_HOOKS in str(error.__cause__):
            return first_run(job, places, batch, whole, changed=changed, counts_saved=False)
    return run(on_meta=False)
