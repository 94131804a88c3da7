"""Who held which VMs of a pool over time, as VirtualFlow's Figure 11 shows it; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from spottrain.varuna_manager.reporting.html.plot import Frame, axes

HUE_STEP = 137.5
"""Degrees between two jobs' colours: neighbours differ, however many there are."""
STYLE = """
text{font:12px system-ui,sans-serif;fill:#444}
.tick.value{text-anchor:end}.tick.time{text-anchor:middle}
.grid{stroke:#8884;fill:none}.vms{stroke:#fff;stroke-width:.5}
@media(prefers-color-scheme:dark){text{fill:#bbb}.vms{stroke:#111}}
"""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one job held on one kind of VM."""

    job: str
    kind: str
    sizes: tuple[tuple[float, int], ...]
    """(since, VMs), in order of time; each holds until the next, the last for ever."""


def drawing(
    kinds: Sequence[tuple[str, int]],
    allocations: Sequence[Allocation],
    to_s: float,
    *,
    is_alone: bool = True,
) -> str:
    """Return an SVG: a band for each kind, in it the VMs of each job as boxes.

    A job keeps its rows from one moment to the next as far as it holds them, so that a box
    that changes is a job that changed.

    Args:
        kinds: Names and VMs.
        allocations: Of every job and kind.
        to_s: The end of the axis; it begins at 0.
        is_alone: Bring its style along; a page has one of its own.
    """
    numbers = {name: i for i, name in enumerate(dict.fromkeys(a.job for a in allocations))}
    parts, above = [], 0
    for kind, vms in kinds:
        height = max(60, min(400, vms * 12)) + 40
        frame = Frame(from_s=0.0, to_s=max(to_s, 1.0), top=float(max(1, vms)), height=height)
        own = [a for a in allocations if a.kind == kind]
        boxes = "".join(
            _box(frame, above, name, numbers[name], row, since_s, until_s)
            for name, row, since_s, until_s in _boxes(own, vms, to_s)
        )
        half = [(0.0, "0"), (float(vms), f"{vms} {kind}")]
        half[1:1] = [(vms / 2, f"{vms // 2}")] * (vms % 2 == 0)  # there is no half of a VM
        parts.append(f'<g transform="translate(0 {above})">{axes(frame, half)}</g>')
        parts.append(boxes)
        above += height
    style = f"<style>{STYLE}</style>" if is_alone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {above}" '
        f'role="img">{style}{"".join(parts)}</svg>'
    )


def _box(
    frame: Frame,
    above: int,
    name: str,
    number: int,
    row: int,
    since_s: float,
    until_s: float,
) -> str:
    left, right = frame.x(since_s), frame.x(until_s)
    top, bottom = frame.y(row + 1), frame.y(row)
    return (
        f'<rect class="vms" x="{left:.2f}" y="{above + top:.2f}" '
        f'width="{max(0.2, right - left):.2f}" height="{bottom - top:.2f}" '
        f'fill="hsl({number * HUE_STEP % 360:.0f} 60% 55%)">'
        f"<title>{escape(name)}</title></rect>"
    )


def _boxes(
    allocations: Sequence[Allocation], vms: int, to_s: float
) -> list[tuple[str, int, float, float]]:
    """Return (job, row, since, until) of each VM that a job holds."""
    changes = sorted((since_s, held, a.job) for a in allocations for since_s, held in a.sizes)
    rows: list[str | None] = [None] * vms
    since: list[float] = [0.0] * vms
    found: list[tuple[str, int, float, float]] = []
    at = 0
    while at < len(changes):
        now_s = changes[at][0]
        wanted: dict[str, int] = {}
        while at < len(changes) and changes[at][0] == now_s:
            wanted[changes[at][2]] = changes[at][1]
            at += 1
        for name, held in wanted.items():
            own = [row for row, owner in enumerate(rows) if owner == name]
            for row in own[held:]:
                found.append((name, row, since[row], now_s))
                rows[row] = None
        for name, held in wanted.items():
            missing = held - rows.count(name)
            for row in [row for row, owner in enumerate(rows) if owner is None]:
                if missing <= 0:
                    break
                rows[row], since[row] = name, now_s
                missing -= 1
    for row, owner in enumerate(rows):
        if owner is not None:
            found.append((owner, row, since[row], to_s))
    return found
