"""A mini-batch as a timeline, simulated or measured: Chrome's trace format, or a picture.

The picture is drawn as Varuna's Figure 7: a line for each stage, forwards, recomputes,
backwards and the sum of gradients at the end; between them waits, and messages from line
to line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from spottrain.errors import ConfigError
from spottrain.morphing.schedules.schedule import Work
from spottrain.morphing.simulate.replica import MessageSpan, PipelineTrace, TaskSpan
from spottrain.wire.timeline import Phase

NAMES = {
    Work.FORWARD: "forward",
    Work.RECOMPUTE: "recompute",
    Work.BACKWARD: "backward",
}
COLOURS = {
    "forward": "#d62728",
    "recompute": "#ff9f1c",
    "backward": "#2ca02c",
    "reduction": "#7b3fa0",
    "commit": "#1f77b4",
    "update": "#8c564b",
    "wait": "#e8e8e8",
}
"""As in the paper's figure, as far as that has them."""
PHASE_NAMES: dict[Phase, str] = {
    "reduction": "all-reduce",
    "commit": "commit",
    "update": "update",
}
MICROSECONDS = 1_000_000
LINE = 18
"""Height of a stage's line in the picture, in pixels."""
WIDTH, LEFT, TOP = 1200, 90, 34
LABELLED = 16
"""Minimum width of a task that shows its name, in pixels."""
MAX_DRAWN_TASKS = 50_000
MAX_DRAWN_MESSAGES = 2_000
"""More would hide the tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """What a stage does besides its tasks."""

    stage: int
    phase: Phase
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchTimeline:
    """All that happened in a mini-batch, simulated or measured.

    Numbers of stages count those of all replicas.
    """

    names: tuple[str, ...]
    """Of the stages."""
    tasks: tuple[TaskSpan, ...]
    """Those of a stage in the order in which they ran."""
    messages: tuple[MessageSpan, ...]
    phases: tuple[PhaseSpan, ...]

    @property
    def end_s(self) -> float:
        """When the last of it ended."""
        ends_s = [span.end_s for span in self.tasks]
        return max(ends_s + [span.end_s for span in self.phases])

    def waits(self) -> Iterator[tuple[int, float, float]]:
        """Yield every stage's pauses before its last task: stage, start, end."""
        free_s = [0.0] * len(self.names)
        for span in self.tasks:
            if span.start_s > free_s[span.stage]:
                yield span.stage, free_s[span.stage], span.start_s
            free_s[span.stage] = span.end_s


def simulated(
    trace: PipelineTrace, names: Sequence[str], allreduce_s: float
) -> MinibatchTimeline:
    """Return a simulated mini-batch as a timeline.

    Args:
        trace: The mini-batch.
        names: Of the stages.
        allreduce_s: Of the sum of gradients, on every stage once it has drained.
    """
    ends_s = trace.run.finish_s if allreduce_s > 0 else ()
    return MinibatchTimeline(
        names=tuple(names),
        tasks=trace.tasks,
        messages=trace.messages,
        phases=tuple(
            PhaseSpan(
                stage=stage, phase="reduction", start_s=at_s, end_s=at_s + allreduce_s
            )
            for stage, at_s in enumerate(ends_s)
        ),
    )


def write_timeline(path: Path, timeline: MinibatchTimeline) -> None:
    """Write a timeline, an SVG or JSON by the file's name.

    Args:
        path: Where to; it is replaced.
        timeline: The mini-batch.

    Raises:
        ConfigError: It is neither ``.svg`` nor ``.json``, cannot be written, or has too
            many tasks for a picture.
    """
    if path.suffix == ".svg":
        if (count := len(timeline.tasks)) > MAX_DRAWN_TASKS:
            raise ConfigError(
                f"a picture has at most {MAX_DRAWN_TASKS:,} tasks: got {count:,}; take "
                "fewer micro-batches or write .json"
            )
        text = svg(timeline)
    elif path.suffix == ".json":
        events = list(chrome_events(timeline))
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    else:
        raise ConfigError(
            f"--timeline must end in .json (Chrome, Perfetto) or .svg: got {path.name}"
        )
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(
            f"--timeline {path} cannot be written: {error.strerror}; choose another"
        ) from error


def chrome_events(timeline: MinibatchTimeline) -> Iterator[dict[str, Any]]:
    """Yield events of Chrome's trace format, which Perfetto reads too.

    A stage is a process of three threads: its tasks and waits, and its messages of either
    kind.
    """
    for stage, name in enumerate(timeline.names):
        yield _named("process_name", stage, 0, f"stage {name}")
        yield _named("thread_name", stage, 0, "tasks")
        yield _named("thread_name", stage, 1, "activations sent")
        yield _named("thread_name", stage, 2, "gradients sent")
    for stage, start_s, end_s in timeline.waits():
        yield _event("wait", "wait", stage, 0, start_s, end_s)
    for span in timeline.tasks:
        kind = NAMES[span.task.work]
        yield _event(str(span.task), kind, span.stage, 0, span.start_s, span.end_s)
    for message in timeline.messages:
        kind = "gradient" if message.is_gradient else "activation"
        yield _event(
            f"{kind} {message.microbatch} to {timeline.names[message.receiver]}",
            kind,
            message.sender,
            2 if message.is_gradient else 1,
            message.start_s,
            message.end_s,
        )
    for phase in timeline.phases:
        name = PHASE_NAMES[phase.phase]
        yield _event(name, phase.phase, phase.stage, 0, phase.start_s, phase.end_s)


def _named(kind: str, stage: int, thread: int, name: str) -> dict[str, Any]:
    return {
        "name": kind,
        "ph": "M",
        "pid": stage,
        "tid": thread,
        "args": {"name": name},
    }


def _event(
    name: str, kind: str, stage: int, thread: int, start_s: float, end_s: float
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "pid": stage,
        "tid": thread,
        "ts": start_s * MICROSECONDS,
        "dur": (end_s - start_s) * MICROSECONDS,
    }


def svg(timeline: MinibatchTimeline) -> str:
    """Return the picture."""
    names, end_s = timeline.names, timeline.end_s
    scale = (WIDTH - LEFT - 10) / end_s
    height = TOP + LINE * len(names) + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
    head += 'font-family="sans-serif" font-size="11">'
    parts = [head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>']
    for k, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + 110 * k
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="20">{kind}</text>')
    for stage, name in enumerate(names):
        y = TOP + LINE * stage
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
        )
    for stage, start_s, stop_s in timeline.waits():
        parts += _bar(stage, start_s, stop_s, scale, "wait", "wait")
    for span in timeline.tasks:
        kind, name = NAMES[span.task.work], str(span.task)
        parts += _bar(span.stage, span.start_s, span.end_s, scale, kind, name)
    for phase in timeline.phases:
        name = PHASE_NAMES[phase.phase]
        parts += _bar(phase.stage, phase.start_s, phase.end_s, scale, phase.phase, name)
    if len(timeline.messages) <= MAX_DRAWN_MESSAGES:
        parts += (_arrow(message, scale) for message in timeline.messages)
    base = TOP + LINE * len(names) + 16
    parts.append(f'<text x="{LEFT}" y="{base}">0 s</text>')
    parts.append(
        f'<text x="{WIDTH - 10}" y="{base}" text-anchor="end">{end_s:.4g} s</text>'
    )
    return "\n".join([*parts, "</svg>"])


def _bar(
    stage: int, start_s: float, end_s: float, scale: float, kind: str, name: str
) -> Iterator[str]:
    x, width, y = LEFT + start_s * scale, (end_s - start_s) * scale, TOP + LINE * stage
    yield (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LINE - 2}" '
        f'fill="{COLOURS[kind]}" stroke="#fff" stroke-width="0.3">'
        f"<title>{name}: {start_s:.6g} to {end_s:.6g} s</title></rect>"
    )
    if kind != "wait" and width >= max(LABELLED, 7 * len(name)):
        yield (
            f'<text x="{x + width / 2:.2f}" y="{y + 12}" text-anchor="middle" '
            f'fill="#fff">{name}</text>'
        )


def _arrow(message: MessageSpan, scale: float) -> str:
    middle = TOP + LINE / 2
    x1, x2 = (LEFT + at_s * scale for at_s in (message.start_s, message.end_s))
    y1, y2 = (middle + LINE * stage for stage in (message.sender, message.receiver))
    kind = "gradient" if message.is_gradient else "activation"
    return (
        f'<line x1="{x1:.2f}" y1="{y1:g}" x2="{x2:.2f}" y2="{y2:g}" stroke="#000" '
        f'stroke-width="0.6" stroke-opacity="0.5"><title>{kind} {message.microbatch}: '
        f"{message.start_s:.6g} to {message.end_s:.6g} s</title></line>"
    )
