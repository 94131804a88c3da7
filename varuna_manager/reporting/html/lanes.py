"""A lane for each VM of a job: when it was rented, when it trained, what happened to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from spottrain.varuna_manager.format import duration
from spottrain.varuna_manager.reporting.html import plot
from spottrain.varuna_manager.reporting.html.charts import (
    MAX_HITS,
    Scene,
    event_title,
    mark,
)
from spottrain.varuna_manager.reporting.html.plot import Frame, Point
from spottrain.varuna_manager.reporting.time_split import Rental

MAX_LANES = 48
"""The newest VMs; a job may have had thousands."""
_ROW = 18
_BAR = 11
_ID_LETTERS = 22
_LEAST = 0.2
"""Gaps that are narrower are not drawn, in units of the view box."""


def lanes(scene: Scene) -> str:
    """Draw the lanes of the newest VMs, in order of their launch."""
    shown = scene.rented[-MAX_LANES:]
    frame = Frame(
        from_s=scene.from_s,
        to_s=max(scene.to_s, scene.from_s + 1.0),
        top=1.0,
        left=150,
        above=6,
        height=30 + _ROW * max(1, len(shown)),
    )
    working = _training(scene, {one.vm_id for one in shown})
    parts = [plot.axes(frame, ()), _plans(scene, frame)]
    rows = {one.vm_id: frame.above + 4 + _ROW * row for row, one in enumerate(shown)}
    for one in shown:
        parts += _lane(scene, frame, rows[one.vm_id], one, working[one.vm_id])
    for entry in scene.report["timeline"]:
        if (y := rows.get(entry["vm_id"])) is not None:
            at_s = scene.from_s + entry["at_s"]
            parts.append(mark(frame, at_s, y + _BAR / 2, entry["kind"], event_title(entry)))
    left_out = len(scene.rented) - len(shown)
    what = f"{len(shown)} VMs over time" + (
        f"; {left_out} earlier ones are left out" * bool(left_out)
    )
    return plot.picture(frame, "lanes", "VMs", what, parts)


def _lane(
    scene: Scene, frame: Frame, y: float, one: Rental, working: Sequence[Point]
) -> Iterator[str]:
    name = one.vm_id if len(one.vm_id) <= _ID_LETTERS else f"…{one.vm_id[1 - _ID_LETTERS :]}"
    yield plot.text(frame.left - 8, y + _BAR - 2, name, "tick value")
    market = "" if one.offer.spot else ", on demand"
    title = (
        f"{one.vm_id}: {one.offer.instance_type} in {one.offer.zone}{market}, "
        f"{duration(one.end_s - one.launched_s)}"
    )
    for css, spans in (
        ("booting", [(one.launched_s, one.ready_s)]),
        ("held", [(one.ready_s, one.end_s)]),
        ("working", working),
    ):
        yield plot.path(_boxes(frame, y, spans), css, title)


def _boxes(frame: Frame, y: float, spans: Iterable[Point]) -> str:
    """Return boxes from one time to another; those that touch are one."""
    boxes: list[list[float]] = []
    for from_s, to_s in spans:
        begin, end = frame.x(from_s), frame.x(to_s)
        if boxes and begin - boxes[-1][1] < _LEAST:
            boxes[-1][1] = max(end, boxes[-1][1])
        elif end > begin:
            boxes.append([begin, end])
    return "".join(f"M{begin:.1f} {y:.0f}H{end:.1f}v{_BAR}H{begin:.1f}Z" for begin, end in boxes)


def _training(scene: Scene, vm_ids: Iterable[str]) -> dict[str, list[Point]]:
    """Return when each VM trained."""
    found: dict[str, list[Point]] = {vm_id: [] for vm_id in vm_ids}
    for one in scene.intervals:
        if one.activity == "training":
            for vm_id in found.keys() & one.slots.keys():
                found[vm_id].append((one.from_s, one.to_s))
    return found


def _plans(scene: Scene, frame: Frame) -> str:
    """Return a line where each plan began, unless there are too many."""
    begun: list[Any] = [plan["started_at_s"] for plan in scene.plans]
    if len(begun) > MAX_HITS:
        return ""
    lines = (f"M{frame.x(at_s):.1f} {frame.above}V{frame.base}" for at_s in begun)
    return plot.path("".join(dict.fromkeys(lines)), "morph", "a plan begins")
