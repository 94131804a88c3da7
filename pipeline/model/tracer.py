"""Finds each section's parameters and what passes its cuts by a dry run.

The loss runs on the meta device, so that a model of any size is traced in seconds and
without memory. A value is *computed* if it depends on parameters, on an activation or on
random numbers. A stage that begins later than the section that made it does not have it: it
passes every cut up to the last section that uses it, if the user's code gets it where a stage
can put it in (``naming``). At every cut what the block returns is replaced by fresh copies,
as if these had been received. Values that depend on inputs and buffers alone (masks, rotary
tables) may be used anywhere: each stage computes them again.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections import deque
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.blank import blank_of
from spottrain.pipeline.base.containers import know_classes_in
from spottrain.pipeline.base.heap import mmap_large_blocks
from spottrain.pipeline.model.checks.factory import check_buffers, check_factory, refuse_layer_drop
from spottrain.pipeline.model.data import check_datasets, collated
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, Helper, TrainingJob
from spottrain.pipeline.model.libraries import base_name
from spottrain.pipeline.model.loss import loss_sums
from spottrain.pipeline.model.naming import Naming, leaf_name
from spottrain.pipeline.model.recorder import (
    CrossingFacts,
    CutFacts,
    Recorder,
    TraceFacts,
    cut_facts,
    strided_tensors,
)
from spottrain.pipeline.model.sections import (
    WHOLE,
    Attached,
    Crossing,
    Cut,
    CutPlaces,
    End,
    ModelLayout,
    ParameterSlots,
    Running,
    TensorSpec,
    Trunk,
    Wave,
    find_cuts,
    helper_names,
    in_waves,
    is_matrix,
    parameter_slots,
    without_helpers,
)
from spottrain.pipeline.model.skeleton import (
    build_skeleton,
    of_any_size,
    on_device,
    replaced,
    run_eagerly,
)
from spottrain.pipeline.model.stage import NotReentrant
from spottrain.steps import at_step
from spottrain.wire.model import TiedParameter

_NO_HOOKS = "saved tensor hooks"
"""In what torch says where they are not permitted."""


class _RunsAgainError(UserCodeError):
    """A block runs again in one run of the loss."""


_LEAST_END_BYTES = 16_000_000
"""Parameters before all blocks, or after them, that are worth a section of their own."""


class _DryRun:
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
        self._model = build_skeleton(job.model)
        self._slots = parameter_slots(self._model)
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
        first = {name: self._model.get_parameter(name) for name in tied}
        self._swaps = [first, *({name: stand_in(name) for name in tied} for _ in numbers)]
        self._trunk: Trunk | None = None
        for name, module in list(self._model.named_modules()):
            module.forward = self._reporting(name, module.forward)

    @mmap_large_blocks()
    def run(self, batch: Batch, *, training: bool = True) -> TraceFacts:
        """Run the loss on one micro-batch, or evaluate it."""
        batch = tree_map_only(torch.Tensor, self._moved, batch)
        for tensor in strided_tensors(batch):
            self._recorder.register(tensor, batch=True)
        self._model.train(training)
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
            result = self._job.loss(self._model, batch)
            self._recorder.returned(result)
        if any(parameter.grad is not None for parameter in self._model.parameters()):
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
        for name, buffer in self._model.named_buffers():
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
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._moved(buffer)
        self.buffers = dict(self._model.named_buffers())
        """As they were before the run."""
        for name, buffer in self.buffers.items():
            parameter = name if name in self._changed else None
            self._recorder.register(buffer, buffer=name, parameter=parameter)
        for name in self._slots:
            self._attach_parameter(name, self._stand_in(name), 0)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the run's device; its values stay known."""
        moved = on_device(tensor, self._device)
        if tensor.layout == torch.strided:
            self._recorder.known.add(moved, tensor)
        return moved

    def _stand_in(self, name: str) -> nn.Parameter:
        """Make a parameter that takes no memory, whatever the device."""
        module, attribute = self._slots[name][0]
        meta = getattr(module, attribute)
        number = torch.full((), 0.02, device=self._device).to(meta.dtype)
        return Attached.of(meta).parameter(number.expand(meta.shape), meta.requires_grad)

    def _attach_parameter(self, name: str, parameter: nn.Parameter, section: int) -> None:
        self._recorder.register(parameter, parameter=name, section=section)
        for module, attribute in self._slots[name]:
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
            raise _RunsAgainError(
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


# --- The layout ----------------------------------------------------------------------


def trace(job: TrainingJob) -> ModelLayout:
    """Find the sections of a job's model by dry runs of its loss.

    Runs the loss on micro-batches of one and two examples (the first one of the data
    set), on the meta device or, where the code reads values, on the CPU with parameters
    that take no memory.

    Raises:
        UserCodeError: The model cannot be cut at its CutPoints, buffers change in forward
            or are random, or the user's code raised.
    """
    check_datasets(job)
    with at_step(0):
        models = check_factory(job)
        layout = _trace_first_choice(job, models[0])
        check_buffers(*models, layout)
        return layout


def _trace_first_choice(job: TrainingJob, model: nn.Module) -> ModelLayout:
    """Trace the model cut at the first places that suit its code, else whole.

    Places where one tensor passes each cut go first, unless they leave most of it uncut; before
    these, places where helpers are cut beside the model.
    """
    with user_code("data set or collate"):
        example = job.dataset[0]
        batches = [collated(job, [example] * number) for number in (1, 2)]
    refused: UserCodeError | None = None
    try:
        refuse_layer_drop(model)
        choices = find_cuts(model)
    except UserCodeError as error:
        refused, choices = error, []
    over_several: ModelLayout | None = None
    calls = functools.cache(lambda: _calls(job, batches[0]))
    waiting = deque([*_beside_helpers(job, model, batches[0]), *choices])
    while waiting:
        places = waiting.popleft()
        try:
            layout = _cut_at(job, places, batches)
            layout = _with_ends(job, places, layout, batches)
        except UserCodeError as error:
            if (sorted_ones := places.sorted_by(calls())) != places:
                waiting.appendleft(sorted_ones)
            # The model's code does not run these one after another, once each.
            if refused is None or not places.is_guess:
                refused = error
            continue
        if layout.waves and not (places.is_guess and _is_lopsided(layout)):
            return layout
        if not _passes_several(layout):
            if over_several is None or not _is_lopsided(layout):
                return layout
        elif over_several is None and not (places.is_guess and _is_lopsided(layout)):
            over_several = layout
    if over_several is not None:
        return over_several
    if refused is None:
        refused = UserCodeError(
            "model cannot be cut: several tensors would pass wherever it can be, and one section "
            "would still hold most of it"
        )
    whole = _trace(job, WHOLE, batches)  # what is wrong without cuts, too, is raised here
    if any(places.is_by_hand for places in choices):
        raise UserCodeError(
            f"{refused}; without CutPoint modules the model would train, as one section",
            refused.traceback,
        ) from refused
    return replace(whole, uncut=str(refused))


def _calls(job: TrainingJob, batch: Batch) -> list[str]:
    """Return the model's modules in the order in which it runs them; empty where it does not run."""
    try:
        return [*_first_run(job, WHOLE, batch)[1].calls]
    except UserCodeError:
        return []


def _beside_helpers(job: TrainingJob, model: nn.Module, batch: Batch) -> list[CutPlaces]:
    """Return places where a model is cut and its helpers beside it, if it has any."""
    helpers = {name: cast("Helper", model.get_submodule(name)) for name in helper_names(model)}
    if not helpers:
        return []
    try:
        choices = find_cuts(without_helpers(build_skeleton(job.model)))
        runs = _first_run(job, WHOLE, batch)[1].runs
    except UserCodeError:
        return []  # the one that says what is wrong comes from the model as it is
    found = (in_waves(places, runs, helpers) for places in choices)
    return [places for places in found if places is not None]


def _cut_at(job: TrainingJob, places: CutPlaces, batches: list[Batch]) -> ModelLayout:
    """Trace a model; in waves where its blocks run several times."""
    try:
        return _trace(job, places, batches)
    except _RunsAgainError:
        runs = _first_run(job, WHOLE, batches[0])[1].runs
        if (waves := in_waves(places, runs)) is None:
            raise
        return _trace(job, waves, batches)


def _with_ends(
    job: TrainingJob, places: CutPlaces, layout: ModelLayout, batches: list[Batch]
) -> ModelLayout:
    """Return a layout in which what comes before the blocks and after them, such as an embedding
    and a head, are sections of their own, where they hold more than a block and can be."""
    sizes = [layout.param_bytes(k) for k in range(layout.num_sections)]
    block = statistics.median_low(sizes)
    heavy = block + max(block, _LEAST_END_BYTES)
    if places.is_by_hand or places.is_guess or layout.waves or max(sizes[0], sizes[-1]) <= heavy:
        return layout
    ends = [(*places.cuts, places.units[-1])] if sizes[-1] > heavy else []
    if sizes[0] > heavy:
        before = _before(job, places.units[0], batches[0])
        ends = [(one, *cuts) for cuts in (*ends, places.cuts) for one in before] + ends
    for cuts in ends:
        with contextlib.suppress(UserCodeError):
            found = _trace(job, places._replace(cuts=cuts), batches)
            if _passes_several(layout) or not _passes_several(found):
                return found
    return layout


def _before(job: TrainingJob, block: str, batch: Batch) -> list[str]:
    """Return modules behind which a section may end that comes before the first block: that
    whose output the block is given, and that with the most parameters of its own."""
    run, facts, _ = _first_run(job, WHOLE, batch)
    names = [stack[-1] for stack in facts.runs]
    sizes = {
        name: sum(p.numel() for p in run._model.get_submodule(name).parameters(recurse=False))
        for name in names[: names.index(block)]
    }
    largest = max(sizes, key=sizes.__getitem__)
    return [name for name in dict.fromkeys((facts.fed_by[block], largest)) if name]


def _passes_several(layout: ModelLayout) -> bool:
    return any(len(cut.crossing) > 1 for cut in layout.cuts)


def _is_lopsided(layout: ModelLayout) -> bool:
    """Return whether one section holds more than half of the parameters."""
    num_bytes = [layout.param_bytes(k) for k in range(layout.num_sections)]
    return 2 * max(num_bytes) > sum(num_bytes)


def _trace(job: TrainingJob, places: CutPlaces, batches: list[Batch]) -> ModelLayout:
    run, first, on_meta = _first_run(job, places, batches[0])
    if changed := frozenset(first.changed):
        run, first, on_meta = _first_run(job, places, batches[0], changed=changed)
    whole: Collection[str] = ()
    if first.passes_over:
        whole = _skippable(run._model, first.calls, first.needed, places.cuts)
        run, first, on_meta = _first_run(job, places, batches[0], whole, changed=changed)
    _check_changes(first)
    tied = {name: tuple(sorted(s)) for name, s in first.uses.items() if len(s) > 1}
    again = _DryRun(
        job, places, on_meta=on_meta, tied=frozenset(tied), whole=whole, changed=changed
    )
    second = again.run(batches[1])
    for name in sorted(second.changed.keys() ^ changed):
        raise UserCodeError(
            f"model must change the same buffers for every micro-batch: {name} is changed for one "
            "example or for two, not for both; change it whatever the batch"
        )
    for name in sorted(tied.keys() & second.captured.keys()):
        raise UserCodeError(
            f"model cannot be cut: {second.captured[name]} uses parameter {name}, which "
            "several sections share, as it was seen in an earlier section; fetch it "
            "from its module where it is used"
        )
    layout = _layout(run, first, second, tied, batches[0])
    if first.passes_over and layout.skippable.keys() != set(whole):
        raise UserCodeError(
            "model cannot be cut: for micro-batches of two examples later sections use other "
            "values than for those of one; let its code be the same for all"
        )
    layout = replace(layout, needs_values=not on_meta)
    if on_meta and not (first.checks_batch or second.checks_batch):
        # Else values were read in ways that no recorder sees.
        reads = frozenset(first.reads_batch | second.reads_batch)
        layout = replace(layout, blank=blank_of(*batches), reads_batch=reads)
    spares_batches = layout.blank is not None and len(layout.reads_batch) < layout.num_sections
    if not (_passes_several(layout) or spares_batches):
        return layout
    evaluated = _evaluated(job, layout, places, whole)
    if evaluated is None or any(facts.checks_batch for facts in evaluated):
        return layout
    reads = frozenset().union(*(facts.reads_batch for facts in evaluated))
    return replace(layout, heldout_reads=reads)


def _evaluated(
    job: TrainingJob, layout: ModelLayout, places: CutPlaces, whole: Collection[str]
) -> list[TraceFacts] | None:
    """Evaluate an example of each held-out set; ``None``: that does not run here.

    What does not run here is refused by ``checks.rehearsal``.

    Raises:
        UserCodeError: Other tensors pass cuts than in training.
    """
    found: list[TraceFacts] = []
    try:
        for name, heldout in job.heldout_sets.items():
            with user_code(f"held-out set {name} or collate"):
                examples = [heldout[0]] if len(heldout) else []
                batch = collated(job, examples) if examples else None
            if examples:
                on_meta = not layout.needs_values
                run = _DryRun(
                    job,
                    places,
                    on_meta=on_meta,
                    tied=frozenset(),
                    whole=whole,
                    changed=layout.running,
                )
                found.append(run.run(batch, training=False))
    except UserCodeError:
        return None
    if other := [*set().union(*(one.crossing.keys() ^ layout.crossing for one in found))]:
        raise UserCodeError(
            "model cannot be cut: in evaluations other values pass from section to section than "
            f"in training ({min(other)}); let both run the same code between blocks"
        )
    return found


def _first_run(
    job: TrainingJob,
    places: CutPlaces,
    batch: Batch,
    whole: Collection[str] | None = None,
    *,
    changed: Collection[str] = (),
    counts_saved: bool = True,
) -> tuple[_DryRun, TraceFacts, bool]:
    """Run on the meta device if the user's code permits it, else on the CPU.

    What autograd saves is counted unless the code takes gradients by ``torch.func``, which
    permits no hooks.
    """

    def run(*, on_meta: bool) -> tuple[_DryRun, TraceFacts, bool]:
        made = _DryRun(
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
            return _first_run(job, places, batch, whole, changed=changed, counts_saved=False)
    return run(on_meta=False)


def _layout(
    run: _DryRun,
    first: TraceFacts,
    second: TraceFacts,
    tied: dict[str, tuple[int, ...]],
    batch: Batch,
) -> ModelLayout:
    calls, needed = first.calls, first.needed | second.needed
    slots = run._slots
    crossing = _crossing(first.crossing, second.crossing)
    if (first.waves, [*first.cuts]) != (second.waves, [*second.cuts]):
        raise UserCodeError(
            "model cannot be cut: loss must call it equally often for every micro-batch: got "
            f"{len(first.waves)} calls for one example and {len(second.waves)} for two"
        )
    cuts = tuple(
        Cut(
            ends={
                wave: _end(one, second.cuts[section, wave], needed)
                for (section, wave), one in first.cuts.items()
                if section == k
            },
            crossing=tuple(one for one, across in crossing if k in across),
        )
        for k in range(run.places.num_cuts)
    )
    uses = first.uses
    sections = {n: uses.get(n) or _section_of_unused(n, calls) for n in slots}
    specs = {name: _spec(slots, name) for name in slots}
    for name in filter(first.changed.__contains__, run.buffers):
        sections[name] = first.changed[name]
        specs[name] = _running_spec(run._model, name, run.buffers[name], first.writes[name])
    return ModelLayout(
        blocks=run.places.blocks,
        units=run.places.units,
        cuts=cuts,
        parameters=tuple(
            tuple(name for name in specs if k in sections[name]) for k in range(len(cuts) + 1)
        ),
        specs=specs,
        matrices=frozenset(name for name, own in slots.items() if is_matrix(own)),
        tied=tuple(
            TiedParameter(name=name, sections=tied[name], param_bytes=specs[name].num_bytes)
            for name in slots
            if name in tied
        ),
        skippable=_skippable(run._model, calls, needed, run.places.cuts),
        batch=tuple(
            TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for t in strided_tensors(batch)
        ),
        flops_per_example=tuple(first.flops[k] for k in range(len(cuts) + 1)),
        saved_bytes_per_example=(
            tuple(first.saved_bytes[k] for k in range(len(cuts) + 1)) if first.saved_bytes else None
        ),
        metrics=tuple(sorted({*first.metrics, *second.metrics})),
        base=base_name(run._model),
        helpers=tuple(first.helpers.values()),
        writes_input=frozenset(first.writes_input | second.writes_input),
        inner={
            name: _end(one, second.inner[name], needed)
            for name, one in first.inner.items()
            if name in second.inner and one.output == second.inner[name].output
        },
        waves=tuple(first.waves),
    )


def _crossing(
    first: dict[str, CrossingFacts], second: dict[str, CrossingFacts]
) -> list[tuple[Crossing, range]]:
    """Combine the findings of two runs; return what crosses, and the cuts that it passes."""
    if first.keys() != second.keys():
        raise UserCodeError(
            "model cannot be cut: micro-batches of one and of two examples pass other values from "
            f"section to section ({min(first.keys() ^ second.keys())}); let both run the same code"
        )
    found = []
    for name, one in first.items():
        a, b = one.tensor, second[name].tensor
        if a.dim() != b.dim():
            raise UserCodeError(
                f"model cannot be cut: {name}, which passes from section to section, must have the "
                f"same dimensions for every micro-batch: got shape {tuple(a.shape)} for one "
                f"example and {tuple(b.shape)} for two"
            )
        crossing = Crossing(
            name=name,
            shape_of_1=tuple(a.shape),
            shape_of_2=tuple(b.shape),
            dtype=a.dtype,
            has_gradient=one.made.has_gradient,
        )
        found.append((crossing, range(one.made.section, max(one.last, second[name].last))))
    return found


def _end(one: CutFacts, two: CutFacts, needed: set[str]) -> End:
    """Combine the findings of the runs over one and over two examples at a cut."""
    if (one.module, one.output) != (two.module, two.output):
        raise UserCodeError(
            f"block {one.module} must return the same structure for every micro-batch: got "
            f"{one.output} for one example and, from block {two.module}, {two.output} for two"
        )
    return End(
        module=one.module,
        name=one.name,
        output=one.output,
        leaves=one.leaves,
        like=tuple(min(a & b, default=None) for a, b in zip(one.like, two.like, strict=True)),
        must_run=one.module in needed,
    )


def _spec(slots: ParameterSlots, name: str) -> TensorSpec:
    module, attribute = slots[name][0]
    tensor = getattr(module, attribute)
    return TensorSpec(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        attached=Attached.of(tensor),
    )


def _running_spec(model: nn.Module, name: str, buffer: torch.Tensor, writes: int) -> TensorSpec:
    """Return how a buffer that forwards change, so often each, is committed.

    Raises:
        UserCodeError: No rule says how the changes of several virtual nodes are put together.
    """
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    keeps, counter = None, ""
    if not buffer.is_floating_point():
        if buffer.is_complex() or buffer.dtype is torch.bool:
            raise UserCodeError(
                f"model changes its buffer {name} in forward, which is of {buffer.dtype}: changes "
                "of micro-batches are added up; keep numbers there, such as a count"
            )
        keeps = 1.0
    elif isinstance(module, _NormBase) and attribute in ("running_mean", "running_var"):
        if module.momentum is not None:
            keeps = (1 - module.momentum) ** max(writes, 1)
        elif isinstance(module, _BatchNorm):
            counter = "num_batches_tracked"
            if writes > 1:
                raise UserCodeError(
                    f"{owner} ({type(module).__name__}) must have a number as momentum where a loss "
                    "runs it several times: got None; give it one, such as 0.1"
                )
    return TensorSpec(
        shape=tuple(buffer.shape),
        dtype=buffer.dtype if buffer.is_floating_point() else torch.float64,
        requires_grad=True,
        running=Running(buffer.dtype, keeps, counter),
    )


def _check_changes(facts: TraceFacts) -> None:
    """Refuse to cut a model where a section uses what another one changes."""
    for name, changed in facts.changed.items():
        used = sorted(changed | facts.uses.get(name, set()))
        if len(used) > 1:
            raise UserCodeError(
                f"model cannot be cut: sections {' and '.join(map(str, used))} use buffer {name}, "
                "which forwards change: let one block change it and use it"
            )


def _section_of_unused(name: str, calls: dict[str, set[tuple[int, int]]]) -> set[int]:
    """Return the section of a parameter that no operation used.

    It is that of the innermost module around it that ran within one section (think of
    an expert that no example chose), else section 0.
    """
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        spans = {section for call in calls.get(owner, ()) for section in call}
        if len(spans) == 1:
            return spans
    return {0}


def _skippable(
    model: nn.Module,
    calls: dict[str, set[tuple[int, int]]],
    needed: set[str],
    cuts: Collection[str],
) -> dict[str, frozenset[int]]:
    """Return outermost modules with parameters that other stages need not run."""
    chosen: dict[str, frozenset[int]] = {}
    for name, module in model.named_modules():
        spans = calls.get(name)
        inside = name.startswith(tuple(f"{other}." for other in chosen))
        if (
            spans
            and name
            and not inside
            and name not in needed
            and name not in cuts
            and all(begin == end for begin, end in spans)
            and any(True for _ in module.parameters())
            and not any(cut.startswith(f"{name}.") for cut in cuts)
        ):
            chosen[name] = frozenset(begin for begin, _ in spans)
    return chosen
