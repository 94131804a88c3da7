"""``spottrain simulate prices``: recorded spot prices under several strategies."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.errors import ConfigError
from spottrain.pricing.billing.terms import CLOUD_USD_PER_GB
from spottrain.pricing.ranking.switching import Frictions, SwitchingRule
from spottrain.units import DAY_S, GB_BYTES
from spottrain.varuna_manager.cli import console
from spottrain.varuna_manager.config.files import read_text
from spottrain.varuna_manager.format import dollars
from spottrain_lab.markets.price_file import PriceFile, parse_prices
from spottrain_lab.markets.price_ladder import (
    DURATIONS_V100_DAYS,
    THROUGHPUTS,
    Ladder,
    LadderTerms,
    Rung,
    Strategy,
)

PAPER = "as in the dissertation"
"""Name of the replay without frictions."""

FileArgument = Annotated[
    Path, typer.Argument(help="CSV: cloud,zone,instance_type,observed_at,usd_per_hour.")
]
RegionOption = Annotated[
    str | None,
    typer.Option(help="Where the strategies of one cloud stay; the file's first."),
]
MAX_AMOUNT = 1e9
"""Bound of any number: more is a mistake, and results stay finite."""


def _amount(help_: str, *names: str, minimum: float = 0.0) -> Any:
    return typer.Option(*names, min=minimum, max=MAX_AMOUNT, help=help_)


DaysOption = Annotated[
    float, _amount("Length of the job on one V100.", "--v100-days", minimum=0.01)
]
BootOption = Annotated[float, _amount("From paying for a machine to training on it.")]
LostOption = Annotated[float, _amount("Work done again after an interruption.")]
MoveOption = Annotated[float, _amount("Work done again after a planned move.")]
LossesOption = Annotated[float, _amount("Interruptions of a machine, the same everywhere.")]
CheckpointOption = Annotated[float, _amount("Moved at every move.", "--checkpoint-gb")]
DatasetOption = Annotated[float, _amount("Fetched once into each new cloud.", "--dataset-gb")]
EgressOption = Annotated[float, _amount("Out of a cloud.")]
HysteresisOption = Annotated[float, _amount("Share of examples per dollar a move must gain.")]
HorizonOption = Annotated[float, _amount("How long today's prices are expected to hold.")]


def prices(
    file: FileArgument,
    region: RegionOption = None,
    v100_days: DaysOption = 4.0,
    boot_s: BootOption = 300.0,
    lost_s: LostOption = 900.0,
    move_s: MoveOption = 60.0,
    losses_per_day: LossesOption = 4.0,
    checkpoint_gb: CheckpointOption = 1.0,
    dataset_gb: DatasetOption = 150.0,
    cloud_usd_per_gb: EgressOption = CLOUD_USD_PER_GB,
    hysteresis: HysteresisOption = 0.05,
    horizon_days: HorizonOption = 7.0,
    output: console.OutputOption = console.Output.TABLE,
) -> None:
    """Replay spot prices: what choosing GPU, instance, cloud and moving daily save.

    Jobs on one GPU begin on each of 30 days (Narayanan's dissertation, Figures 6.5 and
    6.6). First with its assumptions: moves, interruptions and data cost nothing. Then
    boot time, lost work and egress are added, one after the other.
    """
    found = _read(file)
    try:
        ladder = Ladder(found, region or next(iter(found.regions())))
    except ConfigError as error:
        raise ConfigError(f"{file.name}: {error}") from error
    for notice in found.notices:
        console.say(f"{file.name}: {notice}")
    everything = LadderTerms(
        frictions=Frictions(
            boot_s=boot_s,
            lost_s=lost_s,
            move_s=move_s,
            checkpoint_bytes=checkpoint_gb * GB_BYTES,
            dataset_bytes=dataset_gb * GB_BYTES,
            cloud_usd_per_gb=cloud_usd_per_gb,
        ),
        rule=SwitchingRule(hysteresis=hysteresis, horizon_s=horizon_days * DAY_S),
        losses_per_day=losses_per_day,
    )
    document = _document(file.name, found, ladder, v100_days, everything)
    if output is console.Output.JSON:
        console.show_json(document)
    else:
        console.show(*_parts(document))


def _read(path: Path) -> PriceFile:
    text = read_text(path)
    try:
        return parse_prices(text)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error


def _steps(everything: LadderTerms) -> dict[str, LadderTerms]:
    """Return the assumptions, from none to all, a friction at a time."""
    full = everything.frictions
    boot = Frictions(boot_s=full.boot_s, cloud_usd_per_gb=full.cloud_usd_per_gb)
    lost = replace(boot, lost_s=full.lost_s, move_s=full.move_s)
    moved = replace(lost, checkpoint_bytes=full.checkpoint_bytes)
    losses = everything.losses_per_day
    steps = {
        "+ boot time": (boot, losses),
        "+ lost work": (lost, losses),
        "+ egress of checkpoints": (moved, losses),
        "+ egress of the dataset": (full, losses),
    }
    return {PAPER: LadderTerms()} | {
        name: LadderTerms(frictions=frictions, rule=everything.rule, losses_per_day=often)
        for name, (frictions, often) in steps.items()
    }


def _document(
    name: str,
    found: PriceFile,
    ladder: Ladder,
    v100_days: float,
    everything: LadderTerms,
) -> dict[str, Any]:
    steps = {
        step: {model: ladder.climb(model, v100_days, terms) for model in THROUGHPUTS}
        for step, terms in _steps(everything).items()
    }
    return {
        "file": name,
        "region": ladder.region,
        "regions": list(found.regions()),
        "starts": [ladder.starts[0].isoformat(), ladder.starts[-1].isoformat()],
        "jobs": len(ladder.starts),
        "v100_days": v100_days,
        "assumed": asdict(everything),
        "ladders": [
            {"assuming": step, "models": {m: _rungs(r) for m, r in models.items()}}
            for step, models in steps.items()
        ],
        "gain_of_moving": [
            {"assuming": step, "models": _gains(ladder, terms)}
            for step, terms in _ends(everything).items()
        ],
        "durations_v100_days": list(DURATIONS_V100_DAYS),
    }


def _ends(everything: LadderTerms) -> dict[str, LadderTerms]:
    """Return the first and the last step."""
    steps = _steps(everything)
    return {name: steps[name] for name in (PAPER, list(steps)[-1])}


def _rungs(rungs: dict[Strategy, Rung]) -> list[dict[str, Any]]:
    base = rungs[Strategy.SINGLE].usd
    return [
        {
            "strategy": strategy.value,
            "cost_reduction": base / rung.usd,
            "usd": rung.usd,
            "days": rung.hours / 24,
            "mean_switches": mean(run.switches for run in rung.runs),
            "most_switches": rung.most_switches,
        }
        for strategy, rung in rungs.items()
    ]


def _gains(ladder: Ladder, terms: LadderTerms) -> dict[str, list[float]]:
    """Return the gain of moving over the best fixed choice, by model and duration."""
    gains: dict[str, list[float]] = {}
    for model in THROUGHPUTS:
        climbs = (ladder.climb(model, days, terms) for days in DURATIONS_V100_DAYS)
        gains[model] = [
            rungs[Strategy.DYNAMIC].gain_over(rungs[Strategy.MULTI_CLOUD]) for rungs in climbs
        ]
    return gains


def _parts(document: dict[str, Any]) -> list[Any]:
    first, last = document["starts"]
    about = (
        f"{document['file']}: {document['region']}, {document['jobs']} start days "
        f"{first} to {last}, jobs of {document['v100_days']:g} V100-days"
    )
    parts: list[Any] = [about]
    for ladder in document["ladders"]:
        parts += [f"cost reduction, {ladder['assuming']}", _ladder_table(ladder)]
    days = [f"{days:g}" for days in document["durations_v100_days"]]
    for gains in document["gain_of_moving"]:
        table = Table("V100-days", *days)
        for model, row in gains["models"].items():
            table.add_row(model, *(f"{gain:.2f}" for gain in row))
        parts += [f"gain of moving during training, {gains['assuming']}", table]
    assumed = document["assumed"]
    parts.append(
        "assumed in the end: "
        + ", ".join(
            f"{key} {value:g}"
            for part in (assumed["frictions"], assumed["rule"])
            for key, value in part.items()
            if value is not None
        )
        + f", losses_per_day {assumed['losses_per_day']:g}"
    )
    return parts


def _ladder_table(ladder: dict[str, Any]) -> Table:
    models = ladder["models"]
    table = Table("strategy", *models)
    rows = list(zip(*models.values(), strict=True))
    for row in rows:
        table.add_row(row[0]["strategy"], *(f"{rung['cost_reduction']:.2f}" for rung in row))
    first, dynamic = rows[0], rows[-1]
    table.add_section()
    table.add_row("1xV100: cost", *(dollars(rung["usd"]) for rung in first))
    table.add_row("dynamic: cost", *(dollars(rung["usd"]) for rung in dynamic))
    table.add_row("dynamic: days", *(f"{rung['days']:.1f}" for rung in dynamic))
    table.add_row(
        "dynamic: moves",
        *(f"{rung['mean_switches']:.1f} (most {rung['most_switches']})" for rung in dynamic),
    )
    return table
