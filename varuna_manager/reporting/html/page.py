"""Reports as self-contained HTML pages, on one job or several: no scripts, no other files, no network.

Text comes from job files, clouds and users' code: all of it is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import spottrain
from spottrain.errors import SpottrainError
from spottrain.files import write_whole
from spottrain.units import HOUR_S, counted
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.reporting import text
from spottrain.varuna_manager.reporting.history import JobHistory
from spottrain.varuna_manager.reporting.html import charts as pictures
from spottrain.varuna_manager.reporting.html.curves import Curves, figures
from spottrain.varuna_manager.reporting.html.style import STYLE

MAX_ROWS = 300
"""Largest number of rows of a table."""
MAX_OPEN_ROWS = 40
"""Longer tables are collapsed."""
_POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
"""Forbids scripts and requests, should any text get past the escaping."""


class PageError(SpottrainError):
    """The page cannot be written."""


def write_page(path: Path, html: str) -> None:
    """Write a page atomically.

    Args:
        path: The HTML file; its folder must exist.
        html: From ``page`` or ``comparison``.

    Raises:
        PageError: The file cannot be written.
    """
    try:
        write_whole(path, html.encode(errors="replace"))
    except OSError as error:
        raise PageError(
            f"{path}: cannot write the report: {error.strerror}; name another file"
        ) from error


def page(report: dict[str, Any], state: State, history: JobHistory, curves: Curves) -> str:
    """Return a job's report as HTML.

    Args:
        report: From ``documents.report``.
        curves: What it has measured.
    """
    scene = pictures.scene_of(report, state, history)
    return html_page(
        report["name"],
        _head(report, state),
        _curves({report["name"]: curves}),
        _tiles(report),
        _spending(report),
        _pictures(scene),
        _tables(report),
        _foot(state),
    )


def comparison(jobs: Sequence[tuple[dict[str, Any], Curves]]) -> str:
    """Return a page on several jobs: their curves overlaid, and a table.

    Args:
        jobs: Report and curves of each.
    """
    names = [report["name"] for report, _ in jobs]
    columns = [
        *("job", "state", "r:steps", "r:loss", "r:held out", "r:spent"),
        *("r:per million examples", "r:time", "r:examples/s"),
    ]
    rows = [text.comparison_row(report) for report, _ in jobs]
    return html_page(
        ", ".join(names),
        f"<header><h1>{escape(', '.join(names))}</h1></header><main>",
        _curves(dict(zip(names, (curves for _, curves in jobs), strict=True))),
        f"<h2>Results</h2>{table(columns, rows)}",
        f"</main><footer>Made {moment(time.time())} by spottrain "
        f"{escape(spottrain.__version__)} from the jobs' journals.</footer>",
    )


def html_page(title: str, *parts: str) -> str:
    """Return a whole page from parts that are HTML already."""
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        _POLICY,
        f"<title>{escape(title)} · spottrain report</title>",
        f"<style>{STYLE}</style></head><body>",
    )
    return "\n".join([*head, *parts, "</body></html>\n"])


def _curves(jobs: Mapping[str, Curves]) -> str:
    """Return the charts of what jobs have measured."""
    drawn = "".join(figure(one.title, one.svg, *one.legend) for one in figures(jobs))
    return f"<h2>Training</h2>{drawn}" if drawn else ""


def _head(report: Mapping[str, Any], state: State) -> str:
    word = report["state"]
    looks = {"succeeded": "good", "running": "good", "failed": "bad"}.get(word, "open")
    sentences = "".join(
        f'<p class="lead">{escape(sentence)}</p>' for sentence in text.summary(report)
    )
    return (
        f"<header><h1>{escape(report['name'])}"
        f'<span class="state {looks}">{escape(word)}</span></h1>'
        f'<p class="soft">submitted {moment(state.submitted_at_s)}</p></header>'
        f"<main>{sentences}"
    )


def _tiles(report: Mapping[str, Any]) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in text.tiles(report)
    )
    return f'<dl class="tiles">{cells}</dl>'


def _spending(report: Mapping[str, Any]) -> str:
    """Return how the rented time was spent: a bar, and the numbers."""
    cost = report["cost"]
    seconds = cost["vm_seconds"]
    billed_s = seconds["billed"]
    bar, rows = "", []
    for kind, words in text.time_kinds(cost).items():
        css = "morph-time" if kind == "morph" else kind
        share = seconds[kind] / billed_s if billed_s else 0.0
        if share > 0:
            label = f"{kind} {share:.0%}" if share > 0.1 else ""
            bar += (
                f'<span class="{css}" style="width:{100 * share:.2f}%" '
                f'title="{kind} {share:.1%}">{label}</span>'
            )
        name = f'<span class="swatch {css}"></span>{kind}'
        rows.append(
            f'<tr><td>{name}</td><td class="r">{seconds[kind] / HOUR_S:,.2f}</td>'
            f'<td class="r">{share:.1%}</td>'
            f'<td class="r">${cost["usd_by_time"][kind]:,.4f}</td>'
            f"<td>{escape(words)}</td></tr>"
        )
    head = _head_row(("time", "r:VM-hours", "r:share", "r:money", "what it is"))
    total = (
        f'<tr><th>billed</th><th class="r">{billed_s / HOUR_S:,.2f}</th><th></th>'
        f'<th class="r">${sum(cost["usd_by_time"].values()):,.4f}</th><th></th></tr>'
    )
    return (
        "<h2>Where the rented time went</h2>"
        f'<div class="bar" role="presentation">{bar}</div>'
        f'<div class="wide"><table>{head}<tbody>{"".join(rows)}{total}</tbody></table>'
        f"</div><h2>Money</h2>{table(('what', 'r:USD', 'how'), text.money_rows(report))}"
    )


def _pictures(scene: pictures.Scene) -> str:
    drawn, offers = pictures.prices(scene)
    prices = ((f"line c{number}", name) for number, name in enumerate(offers))
    money = ("line c0", "spent"), ("line c2", "on demand"), ("budget", "budget")
    shapes = "", "number of slots; colour: pipeline depth"
    figures = [
        figure(
            "Throughput",
            pictures.throughput(scene),
            ("line c0", "examples/s"),
            ("predicted", "predicted for the plan"),
            ("band", "slowest to fastest mini-batch"),
            ("hit", "interruption"),
        ),
        figure("Plan", pictures.shapes(scene), shapes),
        figure("VMs", pictures.fleet(scene), ("held", "rented"), ("working", "training")),
        figure("Price per VM-hour", drawn, *prices),
        figure("Money", pictures.money(scene), *money),
        figure("Events", pictures.events(scene), ("", "hover for details")),
    ]
    return "<h2>Over time</h2>" + "".join(figures)


def figure(name: str, drawn: str, *keys: tuple[str, str]) -> str:
    """Return a chart with its name, and a legend of (CSS class, words)."""
    legend = "".join(
        f'<span class="key">{_swatch(css)}{escape(words)}</span>' for css, words in keys
    )
    return f"<figure><figcaption><b>{escape(name)}</b>{legend}</figcaption>{drawn}</figure>"


def _swatch(css: str) -> str:
    if not css:
        return ""
    filled = css in ("band", "held", "working")
    data = "M0 0H26V8H0Z" if filled else "M0 4H26"
    return f'<svg viewBox="0 0 26 8" aria-hidden="true"><path class="{css}" d="{data}"/></svg>'


def _tables(report: Mapping[str, Any]) -> str:
    shown = [*text.history_tables(report), text.zones_table(report)]
    return "".join(map(_section, shown)) + _section(text.events_table(report), is_open=False)


def _section(one: text.RowsTable, *, is_open: bool = True) -> str:
    opened = " open" if is_open and len(one.rows) <= MAX_OPEN_ROWS else ""
    return (
        f"<details{opened}><summary>{one.title} ({len(one.rows)})</summary>"
        f"{table(one.columns, one.rows) if one.rows else '<p>None.</p>'}</details>"
    )


def table(names: Sequence[str], rows: Sequence[text.Row]) -> str:
    """Return a table; names that begin with ``r:`` are columns of numbers."""
    css = [' class="r"' if name.startswith("r:") else "" for name in names]
    shown = rows
    note = ""
    if len(rows) > MAX_ROWS:
        half = MAX_ROWS // 2
        shown = [*rows[:half], *rows[-half:]]
        left_out = len(rows) - len(shown)
        note = f"<caption>{left_out} rows in the middle are omitted</caption>"
    body = "".join(
        "<tr>"
        + "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(css, row, strict=True))
        + "</tr>"
        for row in shown
    )
    return f'<div class="wide"><table>{note}{_head_row(names)}<tbody>{body}</tbody></table></div>'


def _head_row(names: Iterable[str]) -> str:
    cells = "".join(
        f'<th scope="col" class="r">{escape(name[2:])}</th>'
        if name.startswith("r:")
        else f'<th scope="col">{escape(name)}</th>'
        for name in names
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _foot(state: State) -> str:
    return (
        f"</main><footer>Made {moment(time.time())} by spottrain "
        f"{escape(spottrain.__version__)} from the job's journal. Times are since the "
        f"submission; seed {state.job.spec.seed}, mini-batches of "
        f"{counted(state.job.spec.minibatch_size, 'example')}, {escape(state.job.spec.reduction)} "
        "reduction.</footer>"
    )


def moment(at_s: float) -> str:
    """Return a point in time for people."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
