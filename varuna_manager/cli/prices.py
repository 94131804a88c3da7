"""``spottrain prices``: prices of GPU machines, with history and interruptions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.errors import ConfigError
from spottrain.pricing.prices.catalogue import Catalogue, InstanceType, catalogue
from spottrain.pricing.prices.hazard import Hazard
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.place import Place
from spottrain.pricing.prices.price import Price
from spottrain.pricing.prices.refresh import PriceRequest, known, refresh
from spottrain.units import DAY_S
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.format import NOTHING, age, dollars, number
from spottrain.varuna_manager.jobs.vm_history import ingest_journals, open_history
from spottrain.varuna_manager.offers.market import hazards_of
from spottrain.varuna_manager.reporting.sparkline import sparkline, svg

SCHEMA_VERSION = 1
TABLE_ROWS = 30
SVG_LINES = 6

GpuOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu", help="GPU, such as A100 (any memory) or A100-80GB; repeatable."
    ),
]
CloudOption = Annotated[
    list[str] | None,
    typer.Option("--cloud", help="Cloud: aws, azure or gcp; repeatable."),
]
RegionOption = Annotated[
    list[str] | None,
    typer.Option("--region", help="Region, such as us-east-1; repeatable."),
]
TypeOption = Annotated[
    list[str] | None,
    typer.Option("--type", help="Instance type, such as p4d.24xlarge; repeatable."),
]
SpotOption = Annotated[
    bool | None, typer.Option("--spot/--on-demand", help="Only this market.")
]
TopOption = Annotated[
    int | None,
    typer.Option(min=1, help=f"Number of offers; by default a table has {TABLE_ROWS}."),
]
DaysOption = Annotated[
    float, typer.Option(min=0.01, help="Length of the history, in days.")
]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Show the last known prices; ask no cloud.")
]
SvgOption = Annotated[
    Path | None,
    typer.Option(
        "--svg", help=f"Plot prices of the {SVG_LINES} cheapest offers to this file."
    ),
]
ExportOption = Annotated[
    Path | None,
    typer.Option(
        "--export", help="Write all known prices and VM lifetimes to this folder."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One offer and what is known about it."""

    price: Price
    kind: InstanceType
    hazard: Hazard | None
    series: Sequence[Price]


def prices(
    gpu: GpuOption = None,
    cloud: CloudOption = None,
    region: RegionOption = None,
    kind: TypeOption = None,
    spot: SpotOption = None,
    top: TopOption = None,
    days: DaysOption = 7.0,
    offline: OfflineOption = False,
    picture: SvgOption = None,
    export: ExportOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show prices of GPU machines by zone, the cheapest GPU first.

    Prices older than an hour are refreshed; where a cloud does not answer, the last
    known ones are shown with their age. LOSSES/DAY is the expected number of
    interruptions of one VM, from this machine's jobs and what the clouds publish.
    """
    facts = catalogue()
    kinds = facts.matching(gpus=gpu or (), clouds=cloud or (), names=kind or ())
    request = PriceRequest(kinds=kinds, regions=region or ())
    now_s = time.time()
    with open_history() as history:
        warnings = list(ingest_journals(history))
        if not offline:
            warnings += _ask(history, facts, request, now_s, days)
        believed = known(history, facts, request, now_s)
        shown = [p for p in believed.prices if spot is None or p.spot == spot]
        limit = top or (TABLE_ROWS if output is Output.TABLE else len(shown))
        from_s = now_s - days * DAY_S
        rows = _rows(shown, facts, history, limit, from_s, now_s)
        if export is not None:
            _export(history, export)
    for warning in warnings:
        say(warning)
    if picture is not None:
        _draw(rows, picture, from_s, now_s)
    if output is Output.JSON:
        show_json(_document(rows, now_s, [*warnings, *believed.warnings]))
        return
    if rows:
        show(_table(rows, from_s, now_s))
    _say_notes(rows, len(shown), len(believed.warnings), now_s)


def _say_notes(rows: Sequence[_Row], offers: int, unusable: int, now_s: float) -> None:
    if any(row.price.is_stale(now_s) for row in rows):
        say(
            "stale prices are too old to rent by; refreshing needs network and credentials"
        )
    if unusable:
        say(f"{unusable} spot prices left out: not below the on-demand price")
    if not rows:
        say("no known price matches the filters; try others")
    elif len(rows) < offers:
        say(f"{len(rows)} of {offers} offers shown; --top shows more")


def _ask(
    history: History, facts: Catalogue, request: PriceRequest, now_s: float, days: float
) -> list[str]:
    # Not above: they take longer to import than most commands run.
    import httpx

    from spottrain.cloud.http import TIMEOUT
    from spottrain.pricing.prices.sources.registry import price_sources

    with httpx.Client(timeout=TIMEOUT) as client:
        sources = price_sources(client, os.environ)
        answers = refresh(
            sources, history, facts, request, now_s, history_s=days * DAY_S
        )
    if not answers.failures:
        return list(answers.warnings)
    why = "; ".join(f"{cloud}: {why}" for cloud, why in answers.failures.items())
    return [f"prices not refreshed, showing the last known: {why}", *answers.warnings]


def _rows(
    prices: Iterable[Price],
    facts: Catalogue,
    history: History,
    limit: int,
    from_s: float,
    now_s: float,
) -> list[_Row]:
    hazards = hazards_of(history, now_s)
    pairs = [(p, facts.types[p.cloud, p.instance_type]) for p in prices]
    pairs.sort(key=lambda pair: (pair[0].usd_per_hour / pair[1].gpus, pair[0].name))
    rows = []
    for price, kind in pairs[:limit]:
        place = Place(price.cloud, price.region, price.zone, price.instance_type)
        row = _Row(
            price=price,
            kind=kind,
            hazard=hazards.of(place) if price.spot else None,
            series=history.series(price, from_s) or [price],
        )
        rows.append(row)
    return rows


def _table(rows: Sequence[_Row], from_s: float, now_s: float) -> Table:
    table = Table("CLOUD", "ZONE", "TYPE", "GPUS", "MARKET", box=None)
    for name in ("$/HOUR", "$/GPU HOUR", "LOSSES/DAY", "AGE"):
        table.add_column(name, justify="right")
    table.add_column("HISTORY", no_wrap=True)
    for row in rows:
        price, kind = row.price, row.kind
        stale = " (stale)" if price.is_stale(now_s) else ""
        table.add_row(
            price.cloud,
            price.zone,
            price.instance_type,
            f"{kind.gpus} x {kind.gpu.name}",
            "spot" if price.spot else "on demand",
            dollars(price.usd_per_hour),
            dollars(price.usd_per_hour / kind.gpus),
            NOTHING if row.hazard is None else number(24 * row.hazard.losses_per_hour),
            age(price.age_s(now_s)) + stale,
            sparkline(row.series, from_s, now_s),
        )
    return table


def _document(
    rows: Sequence[_Row], now_s: float, warnings: Sequence[str]
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "at": now_s,
        "warnings": list(warnings),
        "offers": [_offer(row, now_s) for row in rows],
    }


def _offer(row: _Row, now_s: float) -> dict[str, Any]:
    price, kind, hazard = row.price, row.kind, row.hazard
    return {
        "cloud": price.cloud,
        "region": price.region,
        "zone": price.zone,
        "instance_type": price.instance_type,
        "spot": price.spot,
        "usd_per_hour": price.usd_per_hour,
        "usd_per_gpu_hour": price.usd_per_hour / kind.gpus,
        "observed_at": price.seen_s,
        "age_s": price.age_s(now_s),
        "stale": price.is_stale(now_s),
        "source": price.source,
        "gpu": kind.gpu.name,
        "gpus": kind.gpus,
        "gpu_memory_bytes": kind.gpu.memory_bytes,
        "peak_flops": dict(kind.gpu.peak_flops),
        "vcpus": kind.vcpus,
        "memory_bytes": kind.memory_bytes,
        "network_bytes_per_s": kind.network_bytes_per_s,
        "network_baseline_bytes_per_s": kind.network_baseline_bytes_per_s,
        "network_is_burst": kind.network_baseline_bytes_per_s is not None,
        "hazard": hazard
        and {
            "losses_per_hour": hazard.losses_per_hour,
            "low": hazard.low,
            "high": hazard.high,
            "vm_hours": hazard.vm_hours,
            "losses": hazard.losses,
            "published_per_hour": hazard.published_per_hour,
        },
        "history": [
            {"since": p.since_s, "seen": p.seen_s, "usd_per_hour": p.usd_per_hour}
            for p in row.series
        ],
    }


def _draw(rows: Sequence[_Row], path: Path, from_s: float, now_s: float) -> None:
    series = {row.price.name: row.series for row in rows[:SVG_LINES]}
    _write(path, svg(series, from_s, now_s))


def _export(history: History, folder: Path) -> None:
    for name, lines in (
        ("prices.csv", history.export_prices()),
        ("vms.csv", history.export_vms()),
    ):
        _write(folder / name, "".join(f"{line}\n" for line in lines))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
