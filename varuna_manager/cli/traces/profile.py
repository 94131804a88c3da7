"""``spottrain profile``: traces of what a job's ranks do."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any

import typer

from spottrain.varuna_manager.cli.arguments import NameArgument
from spottrain.varuna_manager.cli.console import Output, OutputOption, show, show_json
from spottrain.varuna_manager.cli.traces.recorded import (
    TracesBrokenError,
    keep,
    record,
)
from spottrain.varuna_manager.format import size, step_time
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import Follower
from spottrain.varuna_manager.jobs.traces import RankTrace, TraceSet

COMPARED = 10
"""Mini-batches before a profile that its own are compared with."""


def profile(
    name: NameArgument,
    minibatches: Annotated[
        int,
        typer.Option("--minibatches", "-n", min=1, max=100, help="Mini-batches to record."),
    ] = 3,
    output: OutputOption = Output.TABLE,
) -> None:
    """Record what each rank of a running job does in its next mini-batches.

    With torch.profiler, as Chrome traces. Training goes on to the same weights; the
    mini-batches that are recorded are slower.
    """
    job = find(name)
    with closing(Follower(job, from_now=True)) as follower:
        done = record(job, minibatches, "profile", follower)
        document = _trace_document(job, done, follower)
    if output is Output.JSON:
        show_json(document)
    else:
        show(*_trace_lines(document))
    if not any(trace.file for trace in done.traces):
        raise TracesBrokenError(f"no rank has a trace: {done.traces[0].reason}")


def _trace_document(job: JobDir, done: TraceSet, follower: Follower) -> dict[str, Any]:
    """Return what was recorded, where it is, and how long the mini-batches took."""
    first = min(trace.first_step for trace in done.traces)
    last = max(trace.last_step for trace in done.traces)
    newest = max(follower.state.history.progress.step, last)
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
        "folder": keep(job, done, [one.file for one in done.traces if one.file]),
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
