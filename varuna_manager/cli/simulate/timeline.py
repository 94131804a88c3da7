"""A mini-batch as a timeline, simulated or measured: Chrome's trace format, or a picture.

The picture is drawn as Varuna's Figure 7: a line for each stage, forwards, recomputes,
backwards and the sum of gradients at the end; between them waits, and messages from line
to line.
"""

from __future__ import annotations

import json
import math
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
LINE, BAR = 28, 18
"""Height of a stage's line in the picture and of its tasks, in pixels: messages are in between."""
WIDTH, LEFT, RIGHT, TOP = 1200, 90, 48, 52
LANE, GRID = "#f6f6f6", "#c8c8c8"
MOMENTS = 10
"""At most so many are written below the picture."""
LABELLED = 16
"""Minimum width of a task that shows its name, in pixels."""
NARROW = 4
"""Maximum width of a task without a border, in pixels."""
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
    heading: str = "stage"
    """What the names say."""
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

    def busy_s(self) -> list[float]:
        """Return how long each stage was inside of tasks."""
        busy_s = [0.0] * len(self.names)
        for span in self.tasks:
            busy_s[span.stage] += span.end_s - span.start_s
        return busy_s


def simulated(trace: PipelineTrace, names: Sequence[str], allreduce_s: float) -> MinibatchTimeline:
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
            PhaseSpan(stage=stage, phase="reduction", start_s=at_s, end_s=at_s + allreduce_s)
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
        path.write_text(text + "\n", encoding="utf-8")
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
        yield _named("process_name", stage, 0, f"{timeline.heading} {name}")
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
    """Return the picture; at the right, the share of the time that each stage computes."""
    names, end_s = timeline.names, timeline.end_s
    right, bottom = WIDTH - RIGHT, TOP + LINE * len(names)
    scale, height = (right - LEFT) / end_s, bottom + 24
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
    head += 'font-family="sans-serif" font-size="11">'
    parts = [head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>']
    parts += _legend(timeline)
    parts.append(_text(LEFT - 6, TOP - 8, timeline.heading, "end"))
    parts.append(_text(right + 6, TOP - 8, "busy", "start"))
    for stage, (name, busy_s) in enumerate(zip(names, timeline.busy_s(), strict=True)):
        y = TOP + LINE * stage
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{right - LEFT}" height="{BAR}" fill="{LANE}"/>'
        )
        parts.append(_text(LEFT - 6, y + 13, name, "end"))
        parts.append(_text(right + 6, y + 13, f"{busy_s / end_s:.0%}", "start"))
    parts += _axis(end_s, scale, bottom)
    for stage, start_s, stop_s in timeline.waits():
        parts += _bar(stage, start_s, stop_s, scale, "wait", "wait")
    if len(timeline.messages) <= MAX_DRAWN_MESSAGES:
        parts += (_line(message, scale) for message in timeline.messages)
    for span in timeline.tasks:
        kind, name = NAMES[span.task.work], str(span.task)
        parts += _bar(span.stage, span.start_s, span.end_s, scale, kind, name)
    for phase in timeline.phases:
        name = PHASE_NAMES[phase.phase]
        parts += _bar(phase.stage, phase.start_s, phase.end_s, scale, phase.phase, name)
    return "\n".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#000") -> str:
    place = f'x="{x:.2f}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"


def _legend(timeline: MinibatchTimeline) -> Iterator[str]:
    """Yield what colours and lines mean, of what there is."""
    kinds = {NAMES[span.task.work] for span in timeline.tasks} | {"wait"}
    kinds |= {phase.phase for phase in timeline.phases}
    shown = [kind for kind in COLOURS if kind in kinds]
    for k, kind in enumerate(shown):
        x = LEFT + 110 * k
        yield f'<rect x="{x}" y="10" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield _text(x + 17, 20, kind, "start")
    if 0 < len(timeline.messages) <= MAX_DRAWN_MESSAGES:
        x = LEFT + 110 * len(shown)
        yield f'<path d="M{x} 11L{x + 12} 21" stroke="{COLOURS["forward"]}"/>'
        yield _text(x + 17, 20, "activation sent", "start")
        yield f'<path d="M{x + 110} 21L{x + 122} 11" stroke="{COLOURS["backward"]}"/>'
        yield _text(x + 127, 20, "gradient sent", "start")


def _axis(end_s: float, scale: float, bottom: int) -> Iterator[str]:
    """Yield round moments, and the last one."""
    step_s = round_step(end_s / MOMENTS)
    for k in range(1, math.ceil(end_s / step_s)):
        x = LEFT + k * step_s * scale
        yield f'<path d="M{x:.2f} {TOP - 4}V{bottom}" stroke="{GRID}" stroke-width="0.5"/>'
        if end_s - k * step_s > step_s / 2:  # else it would touch the last one
            yield _text(x, bottom + 14, f"{k * step_s:.6g}", "middle")
    yield _text(LEFT, bottom + 14, "0 s", "middle")
    yield _text(LEFT + end_s * scale, bottom + 14, f"{end_s:.4g} s", "middle")


def round_step(at_least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not smaller."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= at_least)


def _bar(
    stage: int, start_s: float, end_s: float, scale: float, kind: str, name: str
) -> Iterator[str]:
    x, width, y = LEFT + start_s * scale, (end_s - start_s) * scale, TOP + LINE * stage
    # A border would hide what is hardly wider than itself.
    border = 'stroke="#fff" stroke-width="0.6" ' if width > NARROW else ""
    yield (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" {border}'
        f'fill="{COLOURS[kind]}"><title>{name}: {start_s:.6g} to {end_s:.6g} s</title>'
        "</rect>"
    )
    if kind != "wait" and width >= max(LABELLED, 7 * len(name)):
        colour = "#000" if kind == "recompute" else "#fff"
        yield _text(x + width / 2, y + 13, name, "middle", colour)


def _line(message: MessageSpan, scale: float) -> str:
    """Return a message's line from its sender to its receiver."""
    x1, x2 = (LEFT + at_s * scale for at_s in (message.start_s, message.end_s))
    y1, y2 = (TOP + LINE * stage for stage in (message.sender, message.receiver))
    if y1 < y2:
        y1 += BAR
    else:
        y2 += BAR
    kind = "gradient" if message.is_gradient else "activation"
    colour = COLOURS["backward" if message.is_gradient else "forward"]
    return (
        f'<line x1="{x1:.2f}" y1="{y1:g}" x2="{x2:.2f}" y2="{y2:g}" '
        f'stroke="{colour}"><title>{kind} {message.microbatch}: '
        f"{message.start_s:.6g} to {message.end_s:.6g} s</title></line>"
    )
