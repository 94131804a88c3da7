"""The charts of a report: what a job did, over one time axis, as inline SVG.

After Varuna (EuroSys 2022), Figure 8: throughput over time with every morph named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spottrain.cloud.port.provider import Offer
from spottrain.units import counted
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.format import dollars, duration, predicted_time, step_time
from spottrain.varuna_manager.reporting.costs import rentals
from spottrain.varuna_manager.reporting.history import JobHistory, PriceSeries
from spottrain.varuna_manager.reporting.html import plot
from spottrain.varuna_manager.reporting.html.plot import Frame, Point
from spottrain.varuna_manager.reporting.series import downsampled
from spottrain.varuna_manager.reporting.time_split import Interval, Rental
from spottrain.varuna_manager.reporting.timeline import LANES

MAX_MARKS = 400
"""Marks of one lane with a hover title; further ones have none."""
MAX_PLANS = 1500
MAX_HEADROOM = 4
"""A budget further above what was spent, as a factor, is not drawn: the rest would be flat."""
MAX_HITS = 150
"""Interruptions drawn through all charts; they also have a lane of their own."""
_THIN = 3.0
"""Boxes narrower than this have no border."""
PRICE_LINES = 6
COLOURS = 6
"""Number of line styles: classes c0 … c5, with a dash pattern each."""
_LABEL_WIDTH = 9.0
"""Largest width of a character."""
MAX_POINTS = 1024
"""Largest number of points of a line."""
Bin = tuple[float, float, float, float]
"""(begin, mean, lowest, highest), see ``series.Bins.means``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The data of all charts. Times are seconds since the epoch."""

    report: Mapping[str, Any]
    """From ``documents.report``."""
    history: JobHistory
    rented: Sequence[Rental]
    intervals: Sequence[Interval]
    from_s: float
    to_s: float

    def frame(self, top: float, height: int = 130, above: int = 14) -> Frame:
        """Return a frame over the job's time."""
        end_s = max(self.to_s, self.from_s + 1.0)
        return Frame(from_s=self.from_s, to_s=end_s, top=top, height=height, above=above)

    @property
    def plans(self) -> Sequence[Mapping[str, Any]]:
        """The plans that ran; only the newest if there are very many."""
        plans: Sequence[Mapping[str, Any]] = self.report["plans"][-MAX_PLANS:]
        return plans

    def hits(self, frame: Frame) -> str:
        """Return a faint line per interruption, unless there are too many."""
        if len(self.report["interruptions"]) > MAX_HITS:
            return ""
        drawn = (
            f"M{frame.x(self.from_s + hit['at_s']):.1f} {frame.above}V{frame.base}"
            for hit in self.report["interruptions"]
        )
        return plot.path("".join(dict.fromkeys(drawn)), "hit")


def scene_of(report: Mapping[str, Any], state: State, history: JobHistory) -> Scene:
    """Return what the charts of a job are drawn from.

    Args:
        report: From ``documents.report``.
    """
    at_s = state.submitted_at_s + report["wall_s"]
    return Scene(
        report=report,
        history=history,
        rented=rentals(state, history, at_s),
        intervals=history.intervals(at_s),
        from_s=state.submitted_at_s,
        to_s=at_s,
    )


def throughput(scene: Scene) -> str:
    """Draw examples per second, their range, and each plan's prediction."""
    bins = scene.history.throughput.means()
    width_s = scene.history.throughput.width_s
    plans = [(plan, predicted(scene, plan)) for plan in scene.plans]
    top = max((mean for _, mean, _, _ in bins), default=1.0)
    top = plot.nice_top(1.05 * max([top, *(max(speeds) for _, speeds in plans)]))
    frame = scene.frame(top, height=190, above=26)
    means = throughput_line(scene)
    parts = [plot.axes(frame, _halves(top, _plain)), scene.hits(frame)]
    parts.append(plot.path(_band(frame, bins, width_s), "band"))
    for plan, speeds in plans:
        begin_s = scene.from_s + _since(scene, plan)
        end = frame.x(begin_s + plan["ran_s"])
        words = " to ".join(f"{speed:.1f}" for speed in speeds)
        title = f"{plan['shape']}: predicted {words} examples/s"
        for speed in speeds:
            dash = f"M{frame.x(begin_s):.1f} {frame.y(speed):.1f}H{end:.1f}"
            parts.append(plot.path(dash, "predicted", title))
    if bins:
        end_s = bins[-1][0] + width_s
        parts.append(plot.path(plot.step_path(frame, means, end_s), "line c0"))
    parts += _plan_names(scene, frame)
    what = (
        f"Examples per second over {duration(scene.to_s - scene.from_s)}, at most "
        f"{top:g}; the band spans the slowest to the fastest mini-batch, dashes are "
        "each plan's prediction, two where it is a range."
    )
    return plot.picture(frame, "throughput", "Throughput", what, parts)


def fleet(scene: Scene) -> str:
    """Draw the number of VMs rented, and of VMs that trained."""
    held = _held(scene.rented)
    working = _working(scene.intervals)
    top = plot.nice_top(max((count for _, count in held), default=1.0))
    frame = scene.frame(top, height=140)
    what = f"VMs rented and VMs training over time, at most {top:g}."
    parts = [
        plot.axes(frame, _counts(top)),
        plot.path(plot.area_path(frame, held, scene.to_s), "held", "VMs rented"),
        plot.path(plot.area_path(frame, working, scene.to_s), "working", "VMs training"),
        scene.hits(frame),
    ]
    return plot.picture(frame, "fleet", "VMs", what, parts)


def shapes(scene: Scene) -> str:
    """Draw each plan as a box with its shape; the height is its number of slots."""
    counts = [
        plan["pipeline_depth"] * plan["data_parallel_width"] * plan["tensor_parallel"]
        for plan in scene.plans
    ]
    top = plot.nice_top(max(counts, default=1))
    frame = scene.frame(top, height=120)
    depths = sorted({plan["pipeline_depth"] for plan in scene.plans})
    parts = [plot.axes(frame, _counts(top)), scene.hits(frame)]
    for plan, count in zip(scene.plans, counts, strict=True):
        begin_s = scene.from_s + _since(scene, plan)
        x, end = frame.x(begin_s), frame.x(begin_s + plan["ran_s"])
        y = frame.y(count)
        colour = depths.index(plan["pipeline_depth"]) % COLOURS
        box = f"M{x:.1f} {frame.base}V{y:.1f}H{end:.1f}V{frame.base}Z"
        css = f"box b{colour}" if end - x > _THIN else f"box b{colour} thin"
        parts.append(plot.path(box, css, _plan_words(plan)))
        if end - x > _LABEL_WIDTH * len(plan["shape"]):
            parts.append(plot.text((x + end) / 2, y + 14, plan["shape"], "name"))
    what = (
        f"{counted(len(scene.plans), 'plan')} over time, pipeline depth x data-parallel width; "
        "the height is the number of slots, the colour the depth."
    )
    return plot.picture(frame, "plans", "Plans", what, parts)


def prices(scene: Scene) -> tuple[str, list[str]]:
    """Draw the prices of the main offers; return also their names in order of colour."""
    offered = _main_price_lines(scene.rented, scene.history.prices.values(), PRICE_LINES)
    spend = [usd for line in offered for _, usd in line.points]
    top = plot.nice_top(max(spend, default=1.0))
    frame = scene.frame(top)
    parts = [plot.axes(frame, _halves(top, _price)), scene.hits(frame)]
    names = []
    for number, line in enumerate(offered):
        name = _offer_name(line)
        data = plot.step_path(frame, downsampled(line.points, MAX_POINTS), scene.to_s)
        parts.append(plot.path(data, f"line c{number}", name))
        names.append(name)
    what = "USD per VM-hour over time: " + ("; ".join(names) or "no offers")
    return plot.picture(frame, "prices", "Prices", what, parts), names


def money(scene: Scene) -> str:
    """Draw the money spent, the same on demand, and the budget."""
    cost = scene.report["cost"]
    spent, on_demand = money_lines(scene)
    budgets = budget_line(scene)
    most = max(value for line in (spent, on_demand, [(0, 0)]) for _, value in line)
    caps = max((usd for _, usd in budgets), default=0.0)
    top = plot.nice_top(max(most, caps if caps < MAX_HEADROOM * most else 0.0))
    frame = scene.frame(top, height=150)
    parts = [plot.axes(frame, _halves(top, _price)), scene.hits(frame)]
    parts.append(plot.path(plot.line_path(frame, on_demand), "line c2", "on demand"))
    if caps <= top:
        data = plot.step_path(frame, budgets, scene.to_s)
        parts.append(plot.path(data, "budget", f"budget {dollars(caps)}"))
    parts.append(plot.path(plot.line_path(frame, spent), "line c0", "spent"))
    what = (
        f"Dollars over time: {dollars(cost['usd_spent'])} spent; on demand "
        f"{dollars(cost['savings']['usd_on_demand'])}"
        + (f"; budget {dollars(caps)}" if caps else "")
    )
    return plot.picture(frame, "money", "Money", what, parts)


SHAPES = {
    "notice": "m-5-4h10l-5 9z",
    "kill": "m-5-5l10 10m0-10l-10 10",
    "silence": "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0",
    "worker_death": "m0-6l5 6l-5 6l-5-6z",
    "sick_gpu": "m-6 0h12m-6-6v12",
    "hang": "m-4-5v10m8-10v10",
    "slow": "m-5 4h10l-5-9z",
    "plan": "m0-6v12",
    "checkpoint": "m0-3v6",
    "other": "m-4-4h8v8h-8z",
}
"""SVG paths of marks, drawn from their middle; distinct without colour."""


def events(scene: Scene) -> str:
    """Draw the events in lanes, each with a hover title."""
    lanes: dict[str, list[tuple[float, str]]] = {}
    for entry in scene.report["timeline"]:
        kind = entry["kind"] if entry["kind"] in SHAPES else "other"
        if entry["kind"] != "price":
            lanes.setdefault(kind, []).append((entry["at_s"], event_title(entry)))
    for at_s, step in scene.history.checkpoints:
        title = f"checkpoint at step {step:g}"
        lanes.setdefault("checkpoint", []).append((at_s - scene.from_s, title))
    names = [kind for kind in SHAPES if kind in lanes]
    frame = scene.frame(1.0, height=34 + 24 * max(1, len(names)), above=6)
    parts = [plot.axes(frame, ())]
    for row, kind in enumerate(names):
        y = frame.above + 12 + 24 * row
        words = {**LANES, "checkpoint": "checkpoint", "other": "other"}[kind]
        parts.append(plot.text(frame.left - 8, y + 4, words, "tick value"))
        parts += _marks(frame, scene.from_s, y, kind, lanes[kind])
    counts = ", ".join(f"{len(lanes[kind])} {kind}" for kind in names)
    what = f"Events over time: {counts or 'none'}."
    return plot.picture(frame, "events", "Events", what, parts)


def _marks(
    frame: Frame, from_s: float, y: float, kind: str, marks: list[tuple[float, str]]
) -> Iterable[str]:
    for at_s, title in marks[-MAX_MARKS:]:
        yield mark(frame, from_s + at_s, y, kind, title)
    shape = SHAPES[kind]
    rest = (f"M{frame.x(from_s + at_s):.0f} {y:.1f}{shape}" for at_s, _ in marks[:-MAX_MARKS])
    yield plot.path("".join(dict.fromkeys(rest)), f"mark k-{kind}")


def mark(frame: Frame, at_s: float, y: float, kind: str, title: str) -> str:
    """Return the mark of an event, see ``SHAPES``, with a hover title."""
    shape = SHAPES.get(kind, SHAPES["other"])
    return plot.path(f"M{frame.x(at_s):.1f} {y:.1f}{shape}", f"mark k-{kind}", title)


# --- Lines: what was measured and billed, as points over time -------------------------


def throughput_line(scene: Scene) -> list[Point]:
    """Return examples per second over time; 0 where nothing was trained."""
    series = scene.history.throughput
    return _with_gaps(_means(series.means(), series.width_s, scene.to_s), series.width_s)


def money_lines(scene: Scene) -> tuple[list[Point], list[Point]]:
    """Return the dollars spent over time, and the same on demand."""
    kinds = scene.report["cost"]["usd_by_kind"]
    other_usd = kinds["storage"] + kinds["egress"]
    costs: tuple[Callable[[Rental], float], ...] = (
        lambda one: one.cost.usd,
        lambda one: one.if_on_demand.usd,
    )
    spent, on_demand = (
        _spent_over_time(scene.rented, usd, other_usd, scene.from_s, scene.to_s) for usd in costs
    )
    return spent, on_demand


def budget_line(scene: Scene) -> list[Point]:
    """Return the budgets that there were, each from when it held on."""
    return [(at_s, usd) for at_s, usd in scene.history.budgets if math.isfinite(usd)]


def _means(bins: Sequence[Bin], width_s: float, to_s: float) -> list[Point]:
    """Return the means of bins; for the last one, over its elapsed part."""
    points = [(at_s, mean) for at_s, mean, _, _ in bins]
    if points and (passed_s := to_s - points[-1][0]) < width_s:
        at_s, mean = points[-1]
        top = bins[-1][3]
        points[-1] = (at_s, min(top, mean * width_s / max(passed_s, 1e-6)))
    return points


def _with_gaps(points: Sequence[Point], width_s: float) -> list[Point]:
    """Insert points so that a line drops to 0 where there are no values."""
    filled: list[Point] = []
    for at_s, value in points:
        if filled and at_s - filled[-1][0] > 1.5 * width_s:
            filled.append((filled[-1][0] + width_s, 0.0))
        filled.append((at_s, value))
    return filled


def _band(frame: Frame, bins: Sequence[Bin], width_s: float) -> str:
    """Return boxes from the slowest to the fastest mini-batch of each bin."""
    return "".join(
        f"M{frame.x(at_s):.1f} {frame.y(low):.1f}V{frame.y(high):.1f}"
        f"H{frame.x(at_s + width_s):.1f}V{frame.y(low):.1f}Z"
        for at_s, _, low, high in bins
        if high > low
    )


def _counted(changes: Iterable[tuple[float, float]]) -> list[Point]:
    """Return the running sum of changes, one point a moment."""
    points: list[Point] = []
    level = 0.0
    for at_s, change in sorted(changes):
        level += change
        if points and points[-1][0] == at_s:
            points[-1] = (at_s, level)
        else:
            points.append((at_s, level))
    return downsampled(points, MAX_POINTS)


def _held(rented: Iterable[Rental]) -> list[Point]:
    """Return the number of rented VMs over time."""
    return _counted(
        change for one in rented for change in ((one.launched_s, 1.0), (one.end_s, -1.0))
    )


def _working(intervals: Iterable[Interval]) -> list[Point]:
    """Return the number of training VMs over time."""
    return _counted(
        change
        for one in intervals
        if one.activity == "training"
        for change in (
            (one.from_s, float(len(one.slots))),
            (one.to_s, -float(len(one.slots))),
        )
    )


def _spent_over_time(
    rented: Iterable[Rental],
    usd: Callable[[Rental], float],
    other_usd: float,
    from_s: float,
    to_s: float,
) -> list[Point]:
    """Return dollars over time: each VM's cost is spread over its billed time, the cost
    of storage and traffic over the whole job."""
    changes: list[tuple[float, float]] = []
    for one in rented:
        if one.billed_s > 0:
            rate = usd(one) / one.billed_s
            changes.append((one.launched_s, rate))
            changes.append((one.launched_s + one.billed_s, -rate))
    span_s = max(to_s - from_s, 1.0)
    changes += [(from_s, other_usd / span_s), (to_s, -other_usd / span_s)]
    points: list[Point] = []
    level = rate = 0.0
    before_s = from_s
    for at_s, change in sorted(changes):
        level += rate * (at_s - before_s)
        rate, before_s = rate + change, at_s
        points.append((at_s, level))
    return downsampled(points, MAX_POINTS)


def _main_price_lines(
    rented: Iterable[Rental], prices: Iterable[PriceSeries], most: int
) -> list[PriceSeries]:
    """Return the offers with the highest spending, then the cheapest spot offers."""
    dollars: dict[tuple[str, str, str, bool], float] = {}
    for one in rented:
        key = _place(one.offer)
        dollars[key] = dollars.get(key, 0.0) + one.cost.usd

    def rank(line: PriceSeries) -> tuple[float, bool, float]:
        usd = dollars.get(_place(line.offer), 0.0)
        return -usd, not line.offer.spot, line.points[-1][1]

    lines = [line for line in prices if line.points]
    return sorted(lines, key=rank)[:most]


def _place(offer: Offer) -> tuple[str, str, str, bool]:
    return offer.cloud, offer.zone, offer.instance_type, offer.spot


# --- Words and numbers ----------------------------------------------------------------


def _halves(top: float, words: Callable[[float], str]) -> list[tuple[float, str]]:
    return [(0.0, words(0.0)), (top / 2, words(top / 2)), (top, words(top))]


def _counts(top: float) -> list[tuple[float, str]]:
    return [one for one in _halves(top, _plain) if one[0] == int(one[0])]


def _plain(value: float) -> str:
    return f"{value:,.4g}" if value < 10000 else f"{value:,.0f}"


def _price(usd: float) -> str:
    return f"${usd:,.4g}" if usd < 10000 else f"${usd:,.0f}"


def _plan_words(plan: Mapping[str, Any]) -> str:
    return (
        f"{plan['shape']} from step {plan['from_step']} for {duration(plan['ran_s'])}: "
        f"{plan['reason']}; a step took {step_time(plan['measured_step_s'])}, predicted "
        f"{predicted_time(plan['predicted_step_s'], plan['predicted_max_s'])}"
    )


def event_title(entry: Mapping[str, Any]) -> str:
    """Return an entry of the timeline in words."""
    vm = f"{entry['vm_id']}: " if entry["vm_id"] else ""
    return f"after {duration(entry['at_s'])}: {LANES[entry['kind']]}: {vm}{entry['text']}"


def _offer_name(line: PriceSeries) -> str:
    offer = line.offer
    market = "" if offer.spot else " on demand"
    return f"{offer.instance_type} in {offer.zone}{market}"


def _since(scene: Scene, plan: Mapping[str, Any]) -> float:
    return float(plan["started_at_s"]) - scene.from_s


def predicted(scene: Scene, plan: Mapping[str, Any]) -> list[float]:
    """Return the examples per second that were predicted: one value, or the ends of a range."""
    ends_s = (plan["predicted_max_s"], plan["predicted_step_s"])
    size = scene.report["minibatch_size"]
    return [size / step_s if step_s > 0 else 0.0 for step_s in ends_s if step_s is not None]


def _plan_names(scene: Scene, frame: Frame) -> Iterable[str]:
    """Label every change of shape above the line where there is room."""
    free, before = 0.0, ""
    for plan in scene.plans:
        shape = plan["shape"]
        x = frame.x(scene.from_s + _since(scene, plan))
        if shape != before and x >= free:
            yield plot.text(x, frame.above - 8, shape, "shape")
            yield plot.path(f"M{x:.1f} {frame.above - 5}V{frame.base}", "morph")
            free = x + _LABEL_WIDTH * (len(shape) + 1)
        before = shape
