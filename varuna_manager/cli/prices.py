"""``spottrain prices``: prices of GPU machines, with history and interruptions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
from spottrain.pricing.ranking.gpu_speed import example_s, speed_ratio
from spottrain.units import DAY_S, HOUR_S
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.cli.workload import read_workload
from spottrain.varuna_manager.format import NOTHING, age, dollars
from spottrain.varuna_manager.jobs.vm_history import ingest_journals, open_history
from spottrain.varuna_manager.offers.market import base_of, hazards_of
from spottrain.varuna_manager.offers.table import losses_text
from spottrain.varuna_manager.reporting.columns import columns
from spottrain.varuna_manager.reporting.sparkline import sparkline, svg

SCHEMA_VERSION = 1
TABLE_ROWS = 30
SVG_LINES = 6

GpuOption = Annotated[
    list[str] | None,
    typer.Option("--gpu", help="GPU, such as A100 (any memory) or A100-80GB; repeatable."),
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
SpotOption = Annotated[bool | None, typer.Option("--spot/--on-demand", help="Only this market.")]
TopOption = Annotated[
    int | None,
    typer.Option(min=1, help=f"Number of offers; with --all a table has {TABLE_ROWS}."),
]
AllOption = Annotated[
    bool,
    typer.Option("--all", help="Show all offers, not only the cheapest of each GPU."),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        help="A model and its profile as JSON (see examples/profiles): shows examples per "
        "second of one GPU and per dollar, and sorts by these."
    ),
]
DaysOption = Annotated[float, typer.Option(min=0.01, help="Length of the history, in days.")]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Show the last known prices; ask no cloud.")
]
SvgOption = Annotated[
    Path | None,
    typer.Option("--svg", help=f"Plot prices of the {SVG_LINES} cheapest offers to this file."),
]
ExportOption = Annotated[
    Path | None,
    typer.Option("--export", help="Write all known prices and VM lifetimes to this folder."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One offer and what is known about it."""

    price: Price
    kind: InstanceType
    hazard: Hazard | None
    series: Sequence[Price]
    examples_per_s: float | None = None
    """Of one GPU, alone; None: no profile was given, or its speed is not known."""

    @property
    def examples_per_usd(self) -> float | None:
        """Examples of its GPUs for a dollar, as if none waited for another."""
        if self.examples_per_s is None:
            return None
        each_usd = self.price.usd_per_hour / self.kind.gpus
        return self.examples_per_s * HOUR_S / each_usd


def prices(
    gpu: GpuOption = None,
    cloud: CloudOption = None,
    region: RegionOption = None,
    kind: TypeOption = None,
    spot: SpotOption = None,
    top: TopOption = None,
    every: AllOption = False,
    profile: ProfileOption = None,
    days: DaysOption = 7.0,
    offline: OfflineOption = False,
    picture: SvgOption = None,
    export: ExportOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the cheapest offer of each GPU, or all offers by zone with --all.

    Prices older than an hour are refreshed; where a cloud does not answer, the last
    known ones are shown with their age, or those that ship, of spot machines estimates.
    LOSSES/DAY is the expected number of interruptions of one VM, from this machine's jobs
    and what the clouds publish.
    """
    facts = catalogue()
    rate_of = _rates(profile)
    kinds = facts.matching(gpus=gpu or (), clouds=cloud or (), names=kind or ())
    request = PriceRequest(kinds=kinds, regions=region or ())
    now_s = time.time()
    with open_history() as history:
        warnings = list(ingest_journals(history))
        if not offline:
            warnings += _ask(history, facts, request, now_s, days)
        believed = known(history, facts, request, now_s, estimates=True)
        shown = [p for p in believed.prices if spot is None or p.spot == spot]
        by_gpu = output is Output.TABLE and not every and top is None
        limit = top or (TABLE_ROWS if output is Output.TABLE else len(shown))
        from_s = now_s - days * DAY_S
        best = _in_order(shown, facts, rate_of, now_s, by_gpu=by_gpu)
        rows = _rows(best[:limit], history, rate_of, from_s, now_s)
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
        show(_table(rows, from_s, now_s, with_rates=profile is not None))
    _say_notes(rows, len(shown), len(believed.warnings), now_s)


def _say_notes(rows: Sequence[_Row], offers: int, unusable: int, now_s: float) -> None:
    if any(row.price.is_stale(now_s) for row in rows):
        say(
            "stale prices are too old to rent by, as are estimates; refreshing needs "
            "network and credentials"
        )
    if unusable:
        say(f"{unusable} spot prices left out: not below the on-demand price")
    if not rows:
        say("no known price matches the filters; try others")
    elif len(rows) < offers:
        say(f"{len(rows)} of {offers} offers shown; --all or --top shows more")


def _ask(
    history: History, facts: Catalogue, request: PriceRequest, now_s: float, days: float
) -> list[str]:
    # Not above: they take longer to import than most commands run.
    import httpx

    from spottrain.cloud.http import TIMEOUT
    from spottrain.pricing.prices.sources.registry import price_sources

    with httpx.Client(timeout=TIMEOUT) as client:
        sources = price_sources(client, os.environ)
        answers = refresh(sources, history, facts, request, now_s, history_s=days * DAY_S)
    if not answers.failures:
        return list(answers.warnings)
    why = "; ".join(f"{cloud}: {why}" for cloud, why in answers.failures.items())
    return [f"prices not refreshed, showing the last known: {why}", *answers.warnings]


def _rates(profile: Path | None) -> Callable[[InstanceType], float | None]:
    """Return a function of a machine: examples per second of one of its GPUs, alone.

    Raises:
        ConfigError: The profile cannot be read, or compared with the catalogue's GPUs.
    """
    if profile is None:
        return lambda _: None
    workload = read_workload(profile, None, None, None, None)
    base = base_of(workload.profile, workload.facts, workload.precision or "fp32")
    own = 1.0 / example_s(workload.profile)

    def rate_of(kind: InstanceType) -> float | None:
        speed = speed_ratio(kind.gpu, base.gpu, base.work)
        return None if speed is None else own * speed

    return rate_of


def _in_order(
    prices: Iterable[Price],
    facts: Catalogue,
    rate_of: Callable[[InstanceType], float | None],
    now_s: float,
    *,
    by_gpu: bool,
) -> list[tuple[Price, InstanceType]]:
    """Return prices with their machines: the most examples for a dollar first, or without
    a profile the cheapest GPU.

    Args:
        prices: Of machines of the catalogue.
        rate_of: See ``_rates``.
        now_s: Seconds since the epoch.
        by_gpu: Keep only the cheapest of each GPU; stale ones only where there is no other.
    """
    pairs = [(p, facts.types[p.cloud, p.instance_type]) for p in prices]
    each_usd = {id(price): price.usd_per_hour / kind.gpus for price, kind in pairs}
    if by_gpu:
        pairs.sort(key=lambda one: (one[0].is_stale(now_s), each_usd[id(one[0])]))
        pairs = list({kind.gpu.name: (p, kind) for p, kind in reversed(pairs)}.values())

    def order(pair: tuple[Price, InstanceType]) -> tuple[float, str]:
        usd = each_usd[id(pair[0])]
        rate = rate_of(pair[1])
        return (usd if rate is None else -rate / usd), pair[0].name

    return sorted(pairs, key=order)


def _rows(
    pairs: Iterable[tuple[Price, InstanceType]],
    history: History,
    rate_of: Callable[[InstanceType], float | None],
    from_s: float,
    now_s: float,
) -> list[_Row]:
    hazards = hazards_of(history, now_s)
    rows = []
    for price, kind in pairs:
        place = Place(price.cloud, price.region, price.zone, price.instance_type)
        row = _Row(
            price=price,
            kind=kind,
            hazard=hazards.of(place) if price.spot else None,
            series=history.series(price, from_s) or [price],
            examples_per_s=rate_of(kind),
        )
        rows.append(row)
    return rows


def _table(rows: Sequence[_Row], from_s: float, now_s: float, *, with_rates: bool) -> Table:
    rates = ("r:EX/S GPU", "r:EX/$") if with_rates else ()
    table = columns(
        *("CLOUD", "ZONE", "TYPE", "GPUS", "MARKET", "r:$/HOUR", "r:$/GPU HOUR", *rates),
        *("r:LOSSES/DAY", "r:AGE", "HISTORY"),
    )
    table.columns[-1].no_wrap = True
    for row in rows:
        price, kind = row.price, row.kind
        stale = " (stale)" if price.is_stale(now_s) else ""
        stale = " (estimate)" if price.is_estimate else stale
        figures = (_rate(row.examples_per_s, 1), _rate(row.examples_per_usd, 0))
        table.add_row(
            price.cloud,
            price.zone,
            price.instance_type,
            f"{kind.gpus} x {kind.gpu.name}",
            "spot" if price.spot else "on demand",
            dollars(price.usd_per_hour),
            dollars(price.usd_per_hour / kind.gpus),
            *(figures if with_rates else ()),
            NOTHING
            if (at := row.hazard) is None
            else losses_text(24 * at.losses_per_hour, at.basis),
            age(price.age_s(now_s)) + stale,
            sparkline(row.series, from_s, now_s),
        )
    return table


def _rate(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"~{value:,.{digits}f}"


def _document(rows: Sequence[_Row], now_s: float, warnings: Sequence[str]) -> dict[str, Any]:
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
        "is_estimate": price.is_estimate,
        "examples_per_s_per_gpu": row.examples_per_s,
        "examples_per_usd": row.examples_per_usd,
        "gpu": kind.gpu.name,
        "gpus": kind.gpus,
        "gpu_memory_bytes": kind.gpu.memory_bytes,
        "peak_flops": dict(kind.gpu.peak_flops),
        "vcpus": kind.vcpus,
        "memory_bytes": kind.memory_bytes,
        "network_bytes_per_s": kind.network_bytes_per_s,
        "network_baseline_bytes_per_s": kind.network_baseline_bytes_per_s,
        "network_is_burst": kind.network_baseline_bytes_per_s is not None,
        "hazard": hazard and asdict(hazard),
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
