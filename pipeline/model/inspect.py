"""``python -m spottrain.pipeline.model.inspect``: prints a model's facts as JSON.

Runs in a child of the manager or the CLI, which never import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spottrain.codec import encode
from spottrain.errors import SpottrainError, UserCodeError
from spottrain.pipeline.model.checks.division import can_divide, try_divided
from spottrain.pipeline.model.checks.rehearsal import (
    changing_state,
    check_schedule,
    rehearse,
    schedule_factors,
)
from spottrain.pipeline.model.checks.repetition import is_small, try_loss
from spottrain.pipeline.model.checks.trial import try_optimizer
from spottrain.pipeline.model.data import (
    Digests,
    check_datasets,
    digests,
    digests_of,
    helper_digests,
    other_process,
    refuse_differing,
    second_command,
    why_unmovable,
    why_unsendable,
)
from spottrain.pipeline.model.entrypoint import load_job, user_code
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.loaded import Derived, derive, keep
from spottrain.pipeline.model.optimizer import (
    any_optimizer,
    optimizer_class,
    rate_factor,
)
from spottrain.pipeline.model.sections import ModelLayout, TensorSpec
from spottrain.pipeline.model.selective import check_selective
from spottrain.pipeline.model.tensor_parallel import Shards
from spottrain.pipeline.model.tensor_ranks import Absent
from spottrain.pipeline.model.tracer import trace
from spottrain.redaction import redacted
from spottrain.wire.model import (
    CodeDetails,
    Detail,
    LearningRates,
    ModelFacts,
    SectionFacts,
)

_PLAIN = (bool, int, float, str, tuple)
"""Types of values that are the same text in any process."""

_STEPS, _MANY_STEPS = "SPOTTRAIN_STEPS", 100_000
"""Environment variable with the job's steps; how many are assumed without it."""


def model_facts(job: TrainingJob, layout: ModelLayout) -> ModelFacts:
    """Return what planning needs to know of a traced job.

    Raises:
        UserCodeError: The optimizer or the length of a data set raised.
    """
    return facts_of(job, derive(job, layout))


def facts_of(job: TrainingJob, derived: Derived) -> ModelFacts:
    """Return ``model_facts`` of what has been derived from a job."""
    layout = derived.layout
    saved = layout.saved_bytes_per_example
    sections = tuple(
        SectionFacts(
            index=k,
            param_bytes=layout.param_bytes(k),
            optimizer_bytes=kept.num_bytes,
            activation_bytes_per_example=(
                layout.cuts[k].num_bytes(1) if k < len(layout.cuts) else 0
            ),
            gradient_bytes=layout.gradient_bytes(k),
            integer_bytes=layout.integer_bytes(k),
            lowered_bytes=layout.lowered_bytes(k),
            flops_per_example=layout.flops_per_example[k],
            saved_bytes_per_example=None if saved is None else saved[k],
            divided_share=layout.divided_share(k),
            divided_bytes=_divided_bytes(layout, k),
            divided_sums=layout.divided_sums(k),
            divided_gathers=layout.divided_gathers(k),
        )
        for k, kept in enumerate(derived.states)
    )
    with user_code("length of the data set"):
        lengths = len(job.dataset), sum(map(len, job.heldout_sets.values()))
    return ModelFacts(
        fingerprint=derived.fingerprint,
        num_parameters=sum(
            spec.num_bytes // spec.dtype.itemsize
            for spec in layout.specs.values()
            if spec.running is None
        ),
        blocks=layout.blocks,
        sections=sections,
        tied=layout.tied,
        dataset_len=lengths[0],
        heldout_len=lengths[1],
        heldout_sets=tuple(job.heldout_sets),
        metrics=layout.metrics,
        helper_bytes=sum(one.nbytes for one in layout.helpers),
        uncut=layout.uncut,
        normalises_batches=layout.normalises_batches,
        callbacks=tuple(job.callbacks.asked),
        callback_limit_s=float(job.callbacks.limit_s),
    )


def _divided_bytes(layout: ModelLayout, section: int) -> int:
    """Return the bytes of those of a section's parameters that ranks may divide."""
    shards = Shards(layout.tensor_styles, Absent(2))
    own = layout.named_parameters(section)
    return sum(spec.num_bytes for name, spec in own if shards.dimension(name) is not None)


def code_details(job: TrainingJob, layout: ModelLayout, step: int) -> CodeDetails:
    """Return what a checkpoint depends on, and the learning rate of a mini-batch.

    Args:
        job: The user's.
        layout: Its model's.
        step: The mini-batch, from 0.

    Raises:
        UserCodeError: The user's code raised.
    """
    derived = derive(job, layout)
    facts, kept = facts_of(job, derived), derived.states
    tensors = {
        f"{name}/{key}": _in_words(spec)
        for section in kept
        for name, keys in section.state.items()
        for key, spec in keys.items()
    }
    groups = {
        f"group of {name}": f"{num_bytes} bytes"
        for section in kept
        for name, num_bytes in section.group_bytes.items()
        if num_bytes
    }
    groups_of = _param_groups(job, layout)
    first = groups_of[0] if groups_of else {}
    settings = _settings(first)
    rate = first.get("lr")
    if rate is not None and job.lr_schedule is not None:
        rate = rate * rate_factor(job.lr_schedule, step)
    return CodeDetails(
        fingerprint=facts.fingerprint,
        sections=layout.parameters,
        parameters=_listed({k: _in_words(spec) for k, spec in layout.specs.items()}),
        optimizer_state=_listed(tensors | groups),
        optimizer=optimizer_class(job, layout),
        optimizer_settings=_listed({"param_groups": str(len(groups_of)), **settings}),
        batch=tuple(_in_words(spec) for spec in layout.batch),
        dataset_len=facts.dataset_len,
        heldout_sets=facts.heldout_sets,
        metrics=facts.metrics,
        learning_rate=None if rate is None else float(rate),
    )


def _param_groups(job: TrainingJob, layout: ModelLayout) -> list[dict[str, Any]]:
    """Return the groups of parameters of the first optimizer that there is."""
    optimizer = any_optimizer(job, layout)
    return [] if optimizer is None else optimizer.param_groups


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    return {k: repr(v) for k, v in group.items() if isinstance(v, _PLAIN)}


def optimizer_in_words(job: TrainingJob, layout: ModelLayout) -> str:
    """Return the optimizer as one would write it, such as ``torch.optim.adamw.AdamW(lr=0.001)``,
    with the settings of its first group of parameters; empty: nothing is trained.

    Raises:
        UserCodeError: As ``build_optimizer``.
    """
    settings = {
        name: text
        for group in _param_groups(job, layout)[:1]
        for name, text in _settings(group).items()
    }
    name = optimizer_class(job, layout)
    return name and f"{name}({', '.join(f'{k}={v}' for k, v in settings.items())})"


def learning_rates(job: TrainingJob, layout: ModelLayout, num_steps: int) -> LearningRates | None:
    """Return what the job's schedule makes of its learning rate; None: it has none.

    Args:
        job: The user's.
        layout: Its model's.
        num_steps: Mini-batches of the whole job.

    Raises:
        UserCodeError: The user's code raised.
    """
    groups, schedule = _param_groups(job, layout), job.lr_schedule
    rate = groups[0].get("lr") if groups else None
    if rate is None:
        return None
    if schedule is None:
        return LearningRates(base=float(rate), schedule="")
    first, highest, last = schedule_factors(schedule, num_steps)
    return LearningRates(
        base=float(rate),
        schedule=getattr(schedule, "__name__", type(schedule).__name__),
        first_factor=first,
        highest_factor=highest,
        last_factor=last,
    )


def _listed(texts: Mapping[str, str]) -> tuple[Detail, ...]:
    return tuple(Detail(name=name, text=text) for name, text in texts.items())


def _in_words(spec: TensorSpec) -> str:
    kind = str(spec.dtype).removeprefix("torch.")
    if spec.running is not None:
        return f"{tuple(spec.shape)} {kind} changed in forward"
    return f"{tuple(spec.shape)} {kind}" + " trained" * spec.requires_grad


def answer(compute: Callable[[], object]) -> int:
    """Print the message that ``compute`` returns as one line of JSON; return the exit code.

    With an error that is raised on purpose the line is ``{"error": ..., "traceback":
    ...}``, the code the error's. What the user's code prints goes to stderr.
    """
    with os.fdopen(os.dup(1), "w") as stdout:
        sys.stdout.flush()
        os.dup2(2, 1)
        torch.set_num_threads(1)
        try:
            line, code = encode(compute()), 0
        except SpottrainError as error:
            traceback = error.traceback if isinstance(error, UserCodeError) else ""
            told = {"error": redacted(str(error)), "traceback": redacted(traceback)}
            line = json.dumps(told)
            code = error.exit_code
        stdout.write(line + "\n")
    return code


def _check_helpers(helpers: Sequence[torch.Tensor], second: Sequence[str]) -> None:
    """Check that the models that the loss uses besides are the same in every process.

    Args:
        helpers: Their parameters here.
        second: Runs a process that hashes them as well.

    Raises:
        UserCodeError: They differ.
    """
    with other_process(second) as other:
        if digests_of(other) != helper_digests(helpers):
            raise UserCodeError(
                "loss uses another model, such as a teacher, that has other weights in "
                "every process: load them from a file, or call torch.manual_seed before "
                "it is built"
            )


def main(arguments: list[str] | None = None) -> int:
    """Print the facts of a job's model; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spottrain.pipeline.model.inspect")
    parser.add_argument("entrypoint", help="module:function")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--details-at", type=int, help="Details at a step instead.")
    parser.add_argument("--digests", action="store_true", help="print hashes of examples instead")
    parser.add_argument(
        "--helpers", action="store_true", help="print a hash of helper models instead"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks to divide it")
    parser.add_argument("--sequence-parallel", action="store_true", help="they divide sequences")
    parser.add_argument("--selective", action="store_true", help="blocks recompute selectively")
    parser.add_argument(
        "--tensor-sizes", type=int, nargs="*", default=[], help="ranks that might divide it"
    )
    parser.add_argument("--layout", type=Path, help="where to keep it for supervisors")
    chosen = parser.parse_args(arguments)
    for name in ("workdir", "layout"):
        if (path := getattr(chosen, name)) is not None:
            setattr(chosen, name, path.resolve())

    def facts() -> ModelFacts | CodeDetails:
        job = load_job(chosen.entrypoint, chosen.workdir)
        imported = frozenset(sys.modules)
        check_datasets(job)
        if chosen.details_at is not None:
            return code_details(job, trace(job), chosen.details_at)
        # A process that loads the job anew, as the workers of another VM do.
        with other_process(second_command(chosen.entrypoint, chosen.workdir)) as other:
            examples = digests(job)
            layout = trace(job)
            derived = derive(job, layout)
            found = facts_of(job, derived)
            if chosen.layout is not None:
                keep(chosen.layout, chosen.entrypoint, derived, imported)
            steps = int(os.environ.get(_STEPS, _MANY_STEPS))
            check_schedule(job.lr_schedule, steps)
            rates = learning_rates(job, layout, steps)
            optimizer = optimizer_in_words(job, layout)
            evaluated = rehearse(job, layout)
            if chosen.selective:
                check_selective(job)
            if chosen.tensor_parallel > 1:
                try_divided(job, layout, chosen.tensor_parallel, sequence=chosen.sequence_parallel)
            divisible = [
                n
                for n in chosen.tensor_sizes
                if can_divide(job, layout, n, sequence=chosen.sequence_parallel)
            ]
            try_optimizer(job, layout)
            refuse_differing(examples, digests_of(other))
            small = is_small(layout)
            carried = try_loss(job, layout) if small else ""
            changing = "" if small else changing_state(job, layout)
        if layout.helpers:
            where = chosen.entrypoint, chosen.workdir
            _check_helpers(layout.helpers, second_command(*where, "--helpers"))
        return replace(
            found,
            evaluated=evaluated,
            tensor_sizes=tuple(divisible),
            optimizer=optimizer,
            learning_rates=rates,
            carried=carried,
            changing=changing,
            unsendable=why_unsendable(job),
            unmovable=why_unmovable(job),
        )

    def others() -> Digests:
        return digests(load_job(chosen.entrypoint, chosen.workdir), backwards=True)

    def helpers() -> Digests:
        return helper_digests(trace(load_job(chosen.entrypoint, chosen.workdir)).helpers)

    # As on VMs: a file that is named from there is found or missed here, too.
    there = chosen.workdir if chosen.workdir.is_dir() else Path.cwd()
    with contextlib.chdir(there):
        if chosen.helpers:
            return answer(helpers)
        return answer(others if chosen.digests else facts)


if __name__ == "__main__":
    sys.exit(main())
