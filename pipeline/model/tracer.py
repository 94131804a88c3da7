"""Finds each section's parameters and what passes its cuts by dry runs, and chooses the cuts."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from spottrain.errors import UserCodeError
from spottrain.morphing.plan.transformer import heavy_ends
from spottrain.pipeline.base.blank import blank_of
from spottrain.pipeline.model.checks.factory import check_buffers, check_factory, refuse_layer_drop
from spottrain.pipeline.model.data import check_datasets, collated
from spottrain.pipeline.model.dry_run import DryRun, RunsAgainError, first_run
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, Helper, TensorStyle, TrainingJob
from spottrain.pipeline.model.libraries import base_name
from spottrain.pipeline.model.recorder import (
    CrossingFacts,
    CutFacts,
    TraceFacts,
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
    find_cuts,
    helper_names,
    in_waves,
    is_matrix,
    without_helpers,
)
from spottrain.pipeline.model.skeleton import (
    build_skeleton,
)
from spottrain.pipeline.model.tensor_parallel import find_styles
from spottrain.steps import at_step
from spottrain.wire.model import TiedParameter


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
        styles, undivided = _tensor_styles(job, models[0], layout)
        return replace(layout, tensor_styles=styles, undivided=undivided)


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
        return [*first_run(job, WHOLE, batch)[1].calls]
    except UserCodeError:
        return []


def _beside_helpers(job: TrainingJob, model: nn.Module, batch: Batch) -> list[CutPlaces]:
    """Return places where a model is cut and its helpers beside it, if it has any."""
    helpers = {name: cast("Helper", model.get_submodule(name)) for name in helper_names(model)}
    if not helpers:
        return []
    try:
        choices = find_cuts(without_helpers(build_skeleton(job.model)))
        runs = first_run(job, WHOLE, batch)[1].runs
    except UserCodeError:
        return []  # the one that says what is wrong comes from the model as it is
    found = (in_waves(places, runs, helpers) for places in choices)
    return [places for places in found if places is not None]


def _cut_at(job: TrainingJob, places: CutPlaces, batches: list[Batch]) -> ModelLayout:
    """Trace a model; in waves where its blocks run several times."""
    try:
        return _trace(job, places, batches)
    except RunsAgainError:
        runs = first_run(job, WHOLE, batches[0])[1].runs
        if (waves := in_waves(places, runs)) is None:
            raise
        return _trace(job, waves, batches)


def _with_ends(
    job: TrainingJob, places: CutPlaces, layout: ModelLayout, batches: list[Batch]
) -> ModelLayout:
    """Return a layout in which what comes before the blocks and after them, such as an embedding
    and a head, are sections of their own, where they hold more than a block and can be."""
    first, last = heavy_ends([layout.param_bytes(k) for k in range(layout.num_sections)])
    if places.is_by_hand or places.is_guess or layout.waves or not (first or last):
        return layout
    ends = [(*places.cuts, places.units[-1])] if last else []
    if first:
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
    run, facts, _ = first_run(job, WHOLE, batch)
    names = [stack[-1] for stack in facts.runs]
    sizes = {
        name: sum(p.numel() for p in run.model.get_submodule(name).parameters(recurse=False))
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
    run, first, on_meta = first_run(job, places, batches[0])
    if changed := frozenset(first.changed):
        run, first, on_meta = first_run(job, places, batches[0], changed=changed)
    whole: Collection[str] = ()
    if first.passes_over:
        whole = _skippable(run.model, first.calls, first.needed, places.cuts)
        run, first, on_meta = first_run(job, places, batches[0], whole, changed=changed)
    _check_changes(first)
    tied = {name: tuple(sorted(s)) for name, s in first.uses.items() if len(s) > 1}
    again = DryRun(job, places, on_meta=on_meta, tied=frozenset(tied), whole=whole, changed=changed)
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
                run = DryRun(
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


def _layout(
    run: DryRun,
    first: TraceFacts,
    second: TraceFacts,
    tied: dict[str, tuple[int, ...]],
    batch: Batch,
) -> ModelLayout:
    calls, needed = first.calls, first.needed | second.needed
    slots = run.slots
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
        specs[name] = _running_spec(run.model, name, run.buffers[name], first.writes[name])
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
        skippable=_skippable(run.model, calls, needed, run.places.cuts),
        batch=tuple(
            TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for t in strided_tensors(batch)
        ),
        flops_per_example=tuple(first.flops[k] for k in range(len(cuts) + 1)),
        saved_bytes_per_example=(
            tuple(first.saved_bytes[k] for k in range(len(cuts) + 1)) if first.saved_bytes else None
        ),
        metrics=tuple(sorted({*first.metrics, *second.metrics})),
        base=base_name(run.model),
        helpers=tuple(first.helpers.values()),
        writes_input=frozenset(first.writes_input | second.writes_input),
        inner={
            name: _end(one, second.inner[name], needed)
            for name, one in first.inner.items()
            if name in second.inner and one.output == second.inner[name].output
        },
        waves=tuple(first.waves),
    )


def _tensor_styles(
    job: TrainingJob, model: nn.Module, layout: ModelLayout
) -> tuple[dict[str, TensorStyle], str]:
    """Return how modules are divided, or why none is."""
    try:
        styles = find_styles(model, job.tensor_plan, {tied.name for tied in layout.tied})
    except UserCodeError as error:
        if job.tensor_plan is not None:
            raise
        return {}, str(error)
    return styles, "" if styles else "the model has no tensor_plan"


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
