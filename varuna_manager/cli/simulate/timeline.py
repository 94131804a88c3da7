"""A simulated mini-batch as a timeline: Chrome's trace format, or a picture.

The picture is drawn as Varuna's Figure 7: a line for each stage, forwards, recomputes,
backwards and the sum of gradients at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from spottrain.errors import ConfigError
from spottrain.morphing.schedules.schedule import Work
from spottrain.morphing.simulate.replica import PipelineTrace

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
}
"""As in the paper's figure."""
MICROSECONDS = 1_000_000
LINE = 18
"""Height of a stage's line in the picture, in pixels."""
WIDTH, LEFT, TOP = 1200, 90, 34
LABELLED = 16
"""Minimum width of a task that shows its name, in pixels."""
MAX_DRAWN_TASKS = 50_000


def write_timeline(
    path: Path, trace: PipelineTrace, names: Sequence[str], allreduce_s: float
) -> None:
    """Write a timeline, an SVG or JSON by the file's name.

    Args:
        path: Where to; it is replaced.
        trace: The mini-batch.
        names: Of the stages.
        allreduce_s: Of the sum of gradients, on every stage once it has drained.

    Raises:
        ConfigError: It is neither ``.svg`` nor ``.json``, cannot be written, or has too
            many tasks for a picture.
    """
    if path.suffix == ".svg":
        if len(trace.tasks) > MAX_DRAWN_TASKS:
            raise ConfigError(
                f"a picture has at most {MAX_DRAWN_TASKS:,} tasks: got "
                f"{len(trace.tasks):,}; take fewer micro-batches or write .json"
            )
        text = svg(trace, names, allreduce_s)
    elif path.suffix == ".json":
        events = list(chrome_events(trace, names, allreduce_s))
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


def chrome_events(
    trace: PipelineTrace, names: Sequence[str], allreduce_s: float
) -> Iterator[dict[str, Any]]:
    """Yield events of Chrome's trace format, which Perfetto reads too.

    A stage is a process of two threads: its tasks and waits, and its messages, each of
    which lasts from the moment at which its link is free until it arrives.
    """
    for stage, name in enumerate(names):
        yield _named("process_name", stage, 0, f"stage {name}")
        yield _named("thread_name", stage, 0, "tasks")
        yield _named("thread_name", stage, 1, "activations sent")
        yield _named("thread_name", stage, 2, "gradients sent")
    free_s = [0.0] * len(names)
    for span in trace.tasks:
        if span.start_s > free_s[span.stage]:
            waited_s = span.start_s - free_s[span.stage]
            yield _event("wait", "wait", span.stage, 0, free_s[span.stage], waited_s)
        free_s[span.stage] = span.end_s
        took_s = span.end_s - span.start_s
        kind = NAMES[span.task.work]
        yield _event(str(span.task), kind, span.stage, 0, span.start_s, took_s)
    for message in trace.messages:
        kind = "gradient" if message.is_gradient else "activation"
        yield _event(
            f"{kind} {message.microbatch} to {names[message.receiver]}",
            kind,
            message.sender,
            2 if message.is_gradient else 1,
            message.start_s,
            message.end_s - message.start_s,
        )
    if allreduce_s > 0:
        for stage, finish_s in enumerate(trace.run.finish_s):
            yield _event("all-reduce", "reduction", stage, 0, finish_s, allreduce_s)


def _named(kind: str, stage: int, thread: int, name: str) -> dict[str, Any]:
    return {
        "name": kind,
        "ph": "M",
        "pid": stage,
        "tid": thread,
        "args": {"name": name},
    }


def _event(
    name: str, kind: str, stage: int, thread: int, start_s: float, took_s: float
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "pid": stage,
        "tid": thread,
        "ts": start_s * MICROSECONDS,
        "dur": took_s * MICROSECONDS,
    }


def svg(trace: PipelineTrace, names: Sequence[str], allreduce_s: float) -> str:
    """Return the picture."""
    end_s = max(trace.run.finish_s) + allreduce_s
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
    for span in trace.tasks:
        took_s, kind = span.end_s - span.start_s, NAMES[span.task.work]
        parts += _bar(span.stage, span.start_s, took_s, scale, kind, str(span.task))
    if allreduce_s > 0:
        for stage, finish_s in enumerate(trace.run.finish_s):
            parts += _bar(
                stage, finish_s, allreduce_s, scale, "reduction", "all-reduce"
            )
    base = TOP + LINE * len(names) + 16
    parts.append(f'<text x="{LEFT}" y="{base}">0 s</text>')
    parts.append(
        f'<text x="{WIDTH - 10}" y="{base}" text-anchor="end">{end_s:.4g} s</text>'
    )
    return "\n".join([*parts, "</svg>"])


def _bar(
    stage: int, start_s: float, took_s: float, scale: float, kind: str, name: str
) -> Iterator[str]:
    x, width, y = LEFT + start_s * scale, took_s * scale, TOP + LINE * stage
    yield (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LINE - 2}" '
        f'fill="{COLOURS[kind]}" stroke="#fff" stroke-width="0.3">'
        f"<title>{name}: {start_s:.6g} to {start_s + took_s:.6g} s</title></rect>"
    )
    if width >= max(LABELLED, 7 * len(name)):
        yield (
            f'<text x="{x + width / 2:.2f}" y="{y + 12}" text-anchor="middle" '
            f'fill="#fff">{name}</text>'
        )
