"""What other programs read of a job: ``spottrain export``, its weights, and
``spottrain profile``, traces of what its ranks do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from spottrain.errors import ConfigError, SpottrainError
from spottrain.storage.open import open_store
from spottrain.varuna_manager.cli.arguments import NameArgument
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.format import size, step_time
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import Follower
from spottrain.varuna_manager.jobs.manager_location import own_vm
from spottrain.varuna_manager.jobs.traces import RankTrace, Traces, TraceSet
from spottrain.varuna_manager.launch import control, weights
from spottrain.wire.model import ExportFormat

POLL_S = 0.5
COMPARED = 10
"""Mini-batches before a profile that its own are compared with."""


class ProfileBrokenError(SpottrainError):
    """Ranks are gone, or could not record what they do."""


def export(
    name: Annotated[
        str,
        typer.Argument(help="Name of a job, or the URL of its checkpoints."),
    ],
    to: Annotated[Path, typer.Option(help="Folder to write; missing or empty.")],
    kind: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors or torch: a state dict. hf: what from_pretrained loads.",
        ),
    ] = "safetensors",
    step: Annotated[
        int | None,
        typer.Option(help="Step of the checkpoint; by default the newest."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Name of the checkpoint's folder.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best checkpoint by evaluation.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Frozen parameters, too (as with LoRA).")
    ] = False,
    ema: Annotated[
        bool,
        typer.Option("--ema", help="The moving average of the weights (keep_ema)."),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a checkpoint's weights as PyTorch or transformers load them.

    Of a model with frozen parameters, safetensors and torch hold what was trained.
    """
    if (step is not None) + (checkpoint is not None) + best > 1:
        raise ConfigError("--step, --checkpoint and --best name one each; give one")
    done = weights.export(
        name,
        to,
        kind,
        step=step,
        checkpoint=checkpoint,
        best=best,
        full=full,
        ema=ema,
    )
    if output is Output.JSON:
        show_json(_document(done))
    else:
        _show_table(done, kind)


def _show_table(done: weights.Export, kind: ExportFormat) -> None:
    files = done.weights.files
    what = files[0] if len(files) == 1 else f"{len(files)} files"
    show(f"step {done.checkpoint.step} of {done.job}: {what}, {size(done.num_bytes)}")
    show(*(f"    {line}" for line in done.load))
    if left_out := done.weights.left_out:
        base = f" of {done.weights.base}" if done.weights.base else ""
        hint = "" if kind == "hf" else "; --full writes them, too"
        say(f"{len(left_out)} frozen parameters{base} are not in it{hint}")


def _document(done: weights.Export) -> dict[str, object]:
    return {
        "job": done.job,
        "checkpoint": done.checkpoint.name,
        "step": done.checkpoint.step,
        "folder": str(done.folder),
        "files": done.weights.files,
        "bytes": done.num_bytes,
        "left_out": done.weights.left_out,
        "base": done.weights.base,
        "load": done.load,
    }


def profile(
    name: NameArgument,
    minibatches: Annotated[
        int,
        typer.Option("--minibatches", "-n", min=1, max=100, help="To be recorded."),
    ] = 3,
    output: OutputOption = Output.TABLE,
) -> None:
    """Record what each rank of a running job does in its next mini-batches.

    With torch.profiler, as Chrome traces. Training goes on to the same weights; the
    mini-batches that are recorded are slower.
    """
    job = find(name)
    begun = control.begin_traces(job, minibatches)
    say(
        f"recording {minibatches} mini-batches on {len(begun.vm_ids)} ranks of generation "
        f"{begun.generation}"
    )
    with closing(Follower(job, from_now=True)) as follower:
        done = _await_traces(job, begun, follower)
        document = _trace_document(job, done, follower)
    if output is Output.JSON:
        show_json(document)
    else:
        show(*_trace_lines(document))
    if not any(trace.file for trace in done.traces):
        raise ProfileBrokenError(f"no rank has a trace: {done.traces[0].reason}")


def _await_traces(job: JobDir, begun: TraceSet, follower: Follower) -> TraceSet:
    """Wait for the traces of all ranks.

    Raises:
        ProfileBrokenError: The generation has ended before all had come.
    """
    traces = Traces(job.traces)
    while True:
        # Before the folder is read: what has come by then is all there will be.
        over = not job.is_managed() or _has_ended(follower, begun.generation)
        found = traces.read(begun.number) or begun
        if not found.missing:
            return found
        if over:
            missing, ranks = len(found.missing), len(found.vm_ids)
            raise ProfileBrokenError(
                f"job {job.name}: generation {begun.generation} ended before {missing} of "
                f"its {ranks} ranks had sent a trace; profile the next one once it "
                f"trains: 'spottrain status {job.name}'"
            )
        time.sleep(POLL_S)


def _has_ended(follower: Follower, generation: int) -> bool:
    for _ in follower.advance():
        pass
    runs = follower.state.generation
    return runs is None or runs.number != generation


def _trace_document(job: JobDir, done: TraceSet, follower: Follower) -> dict[str, Any]:
    """Return what was recorded, where it is, and how long the mini-batches took."""
    first = min(trace.first_step for trace in done.traces)
    last = max(trace.last_step for trace in done.traces)
    newest = max(follower.state.progress.step, last)
    rows = [
        row
        for row in follower.measurements().minibatches(last=newest - first + COMPARED)
        if row.generation == done.generation
    ]
    recorded = [row.step_s for row in rows if first < row.step <= last]
    before = [row.step_s for row in rows if first - COMPARED < row.step <= first]
    return {
        "schema_version": 1,
        "name": job.name,
        "generation": done.generation,
        "first_minibatch": first + 1,
        "last_minibatch": last,
        "step_s": _median(recorded),
        "step_s_before": _median(before),
        "folder": _keep(job, done),
        "traces": [_rank_document(trace) for trace in done.traces],
    }


def _median(times: list[float | None]) -> float | None:
    known = [one for one in times if one is not None]
    return statistics.median(known) if known else None


def _rank_document(trace: RankTrace) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "file": trace.file or None,
        "bytes": trace.num_bytes,
        "reason": trace.reason or None,
    }


def _keep(job: JobDir, done: TraceSet) -> str:
    """Return the folder of the traces; from a manager's VM, which will be gone, they
    are copied to the checkpoint store.
    """
    folder = Traces(job.traces).folder_of(done.number)
    place = job.config().checkpoint.path
    if own_vm(job) is None or place is None:
        return str(folder)
    store, prefix = open_store(place), f"traces/{job.name}/{done.number}"
    for trace in done.traces:
        if trace.file:
            store.put(f"{prefix}/{trace.file}", folder / trace.file)
    return f"{store.place.rstrip('/')}/{prefix}"


def _trace_lines(document: dict[str, Any]) -> Iterator[str]:
    first, last = document["first_minibatch"], document["last_minibatch"]
    took, before = document["step_s"], document["step_s_before"]
    line = f"mini-batches {first} to {last}: {step_time(took)} each"
    yield line if before is None else f"{line}, {step_time(before)} before"
    yield f"in {document['folder']}:"
    for trace in document["traces"]:
        if trace["file"] is None:
            yield f"    rank {trace['rank']}: no trace: {trace['reason']}"
        else:
            yield f"    {trace['file']}  {size(trace['bytes'])}"
    yield "open them at https://ui.perfetto.dev or in chrome://tracing"
