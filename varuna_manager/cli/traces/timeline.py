"""``spottrain timeline``: a mini-batch of a running job, as its ranks have measured it."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from spottrain.codec import decode
from spottrain.morphing.schedules.schedule import Task, Work
from spottrain.morphing.simulate.replica import MessageSpan, TaskSpan
from spottrain.varuna_manager.cli.arguments import NameArgument
from spottrain.varuna_manager.cli.console import Output, OutputOption, show, show_json
from spottrain.varuna_manager.cli.simulate.timeline import (
    NAMES,
    MinibatchTimeline,
    PhaseSpan,
    write_timeline,
)
from spottrain.varuna_manager.cli.traces.recorded import (
    TracesBrokenError,
    keep,
    record,
)
from spottrain.varuna_manager.format import step_time
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import Follower
from spottrain.varuna_manager.jobs.traces import Traces, TraceSet
from spottrain.wire.timeline import ArrivedAt, RankTimeline, SentAt

FILES = ("timeline.svg", "timeline.json")
HEADING = "replica, stage"
COLUMNS = (*NAMES.values(), "wait", "reduction", "commit", "update")


def timeline(name: NameArgument, output: OutputOption = Output.TABLE) -> None:
    """Record when each stage of a running job did what in its next mini-batch.

    As a picture and as a Chrome trace: tasks, waits, messages, the sum of gradients, the
    commit and the update. Training goes on to the same weights.
    """
    job = find(name)
    with closing(Follower(job, from_now=True)) as follower:
        done = record(job, 1, "timeline", follower)
    ranks = _read(job, done)
    measured = merge(ranks)
    folder = Traces(job.traces).folder_of(done.number)
    for file in FILES:
        write_timeline(folder / file, measured)
    document = {
        "schema_version": 1,
        "name": job.name,
        "generation": done.generation,
        "minibatch": done.traces[0].last_step,
        "minibatch_s": measured.end_s,
        "folder": keep(job, done, FILES),
        "files": list(FILES),
        "stages": list(stage_times(measured)),
    }
    if output is Output.JSON:
        show_json(document)
    else:
        _show(document)


def _show(document: dict[str, Any]) -> None:
    table = Table(HEADING, *COLUMNS)
    for row in document["stages"]:
        times = (step_time(row[f"{column}_s"]) for column in COLUMNS)
        table.add_row(row["stage"], *times)
    show(
        f"mini-batch {document['minibatch']}: {step_time(document['minibatch_s'])}",
        table,
        f"in {document['folder']}:",
        *(f"    {file}" for file in document["files"]),
        "open timeline.json at https://ui.perfetto.dev or in chrome://tracing",
    )


def _read(job: JobDir, done: TraceSet) -> list[RankTimeline]:
    folder = Traces(job.traces).folder_of(done.number)
    for trace in done.traces:
        if not trace.file:
            raise TracesBrokenError(f"rank {trace.rank} has no record: {trace.reason}")
    return [
        decode(RankTimeline, gzip.decompress((folder / trace.file).read_bytes()))
        for trace in done.traces
    ]


@dataclass(frozen=True, slots=True)
class _Link:
    """What went one way between two ranks, in order."""

    sender: int
    receiver: int
    sent: Sequence[SentAt]
    arrived: Sequence[ArrivedAt]

    def shortest_s(self, begins_s: Sequence[float]) -> float:
        """Return the time of the fastest message, by the two VMs' clocks."""
        apart_s = begins_s[self.receiver] - begins_s[self.sender]
        pairs = zip(self.sent, self.arrived, strict=True)
        return min(to.at_s - since.at_s for since, to in pairs) + apart_s

    def messages(self, begins_s: Sequence[float]) -> Iterator[MessageSpan]:
        for since, to in zip(self.sent, self.arrived, strict=True):
            yield MessageSpan(
                sender=self.sender,
                receiver=self.receiver,
                is_gradient=since.is_gradient,
                microbatch=since.microbatch,
                start_s=since.at_s + begins_s[self.sender],
                end_s=to.at_s + begins_s[self.receiver],
            )


def merge(ranks: Sequence[RankTimeline]) -> MinibatchTimeline:
    """Return what all ranks have measured on one axis of time, from the first of it on.

    Links are first in, first out, so that the n-th message sent is the n-th to arrive. Where
    by the clocks of two neighbours' VMs a message comes before it was sent, they differ:
    the later stage's is shifted until the fastest message takes as long either way, as NTP
    does (RFC 5905, section 8).

    Args:
        ranks: In order.
    """
    depth = ranks[0].pipeline_depth
    links = [link for first in range(0, len(ranks), depth) for link in _links(ranks, first)]
    begins_s = _begins_s(ranks, links)
    tasks = [
        TaskSpan(
            stage=rank,
            task=Task(Work(one.work), one.microbatch, one.chunk),
            start_s=one.start_s + begins_s[rank],
            end_s=one.end_s + begins_s[rank],
        )
        for rank, of in enumerate(ranks)
        for one in of.tasks
    ]
    return MinibatchTimeline(
        names=tuple(f"{of.replica}, {of.stage}" for of in ranks),
        heading=HEADING,
        tasks=tuple(sorted(tasks, key=lambda span: span.end_s)),
        messages=tuple(one for link in links for one in link.messages(begins_s)),
        phases=tuple(
            PhaseSpan(
                stage=rank,
                phase=one.phase,
                start_s=one.start_s + begins_s[rank],
                end_s=one.end_s + begins_s[rank],
            )
            for rank, of in enumerate(ranks)
            for one in of.phases
        ),
    )


def _begins_s(ranks: Sequence[RankTimeline], links: Sequence[_Link]) -> list[float]:
    """Return when each rank's record begins, the earliest at 0."""
    begins_s = [of.wall_s - ranks[0].wall_s for of in ranks]
    between = {(link.sender, link.receiver): link for link in links}
    for rank, of in enumerate(ranks):
        there, back = between.get((rank - 1, rank)), between.get((rank, rank - 1))
        if of.stage and there is not None and back is not None:
            there_s, back_s = (one.shortest_s(begins_s) for one in (there, back))
            if min(there_s, back_s) < 0:
                begins_s[rank] -= (there_s - back_s) / 2
    earliest_s = min(begins_s)
    return [begin_s - earliest_s for begin_s in begins_s]


def _links(ranks: Sequence[RankTimeline], first: int) -> Iterator[_Link]:
    """Yield what went between neighbouring stages of a replica, either way.

    Args:
        ranks: Of all replicas.
        first: The replica's rank of stage 0.
    """
    depth = ranks[first].pipeline_depth
    for stage in range(depth):
        for is_gradient in (False, True):
            to = (stage + (-1 if is_gradient else 1)) % depth
            sender, receiver = ranks[first + stage], ranks[first + to]
            sent = [one for one in sender.sent if one.is_gradient == is_gradient]
            if sent:
                arrived = [one for one in receiver.arrived if one.is_gradient == is_gradient]
                yield _Link(first + stage, first + to, sent, arrived)


def stage_times(measured: MinibatchTimeline) -> Iterator[dict[str, Any]]:
    """Yield how long each stage of each replica did what."""
    spent = [dict.fromkeys(COLUMNS, 0.0) for _ in measured.names]
    for span in measured.tasks:
        spent[span.stage][NAMES[span.task.work]] += span.end_s - span.start_s
    for stage, start_s, end_s in measured.waits():
        spent[stage]["wait"] += end_s - start_s
    for phase in measured.phases:
        spent[phase.stage][phase.phase] += phase.end_s - phase.start_s
    for name, times in zip(measured.names, spent, strict=True):
        yield {"stage": name} | {f"{what}_s": took_s for what, took_s in times.items()}
