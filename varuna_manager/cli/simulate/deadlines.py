"""``spottrain simulate promise``: deadlines and budgets kept, and at what cost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.errors import ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.replay.traces import Trace, parse_trace
from spottrain.pricing.deadline.model import Fleet
from spottrain.pricing.simulation.evaluate import (
    FREE,
    Case,
    evaluate_all,
    kept,
    online_bound_row,
    rows,
)
from spottrain.pricing.simulation.scenarios import Scenario, from_trace, synthetic
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    say,
    show,
    show_json,
)

SLACKS = (1.0, 1.15, 1.4, 1.7, 2.1, 10.0)
"""Edges of the groups of jobs by the time they have."""
TRACE_SIZES = (8, 16)
TRACE_SLACKS = (1.1, 1.5, 2.0)
"""Jobs on each trace: their most VMs, and the time they have."""
OURS = 2
"""Rules that are ours: the promise, and the promise in haste."""
TRACE_FRICTION = 0.01
"""How much less each further VM adds."""

LEGEND = (
    "cost / bound: mean over jobs, who is late pays until the work is done; of all: sum "
    "over sum; for each in time: paid by all jobs for each that kept its deadline; same "
    "jobs: mean over those that this rule did in time, and what the promise took for "
    "them; the rest: parts of the cost"
)

TracesOption = Annotated[
    list[Path],
    typer.Option("--trace", help="A trace as of 'simulate trace'; any number of them."),
]
MarketsOption = Annotated[
    int, typer.Option(min=0, max=100_000, help="Seeded markets to play.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of the first market.")]
ProcessesOption = Annotated[
    int, typer.Option(min=0, help="To play in; 0: as many as there are CPUs.")
]


def register(simulate: typer.Typer) -> None:
    """Add the command of this module."""
    simulate.command()(promise)


def promise(
    trace: TracesOption = [],  # noqa: B006 - typer makes a new one each time
    markets: MarketsOption = 200,
    first_seed: SeedOption = 1,
    processes: ProcessesOption = 0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Play jobs with a deadline and a budget: who is in time, and what it costs.

    Every job could be done in time and within its budget by on-demand VMs. Compared are
    spottrain's policy, on-demand VMs only, spot VMs only, today's failover, Uniform
    Progress, and the least that one could pay who knew all of the market beforehand.
    """
    groups = {file.name: on_trace(file) for file in trace}
    if markets:
        seeds = range(first_seed, first_seed + markets)
        groups[f"markets {seeds.start} to {seeds.stop - 1}"] = [*map(synthetic, seeds)]
    if not groups:
        raise ConfigError("nothing to play: got no --trace and --markets 0; give one")
    scenarios = [scenario for group in groups.values() for scenario in group]
    found = iter(evaluate_all(scenarios, processes or os.cpu_count() or 1))
    cases = {name: [next(found) for _ in group] for name, group in groups.items()}
    document = {name: _document(group) for name, group in cases.items()}
    if output is Output.JSON:
        show_json(document)
    else:
        for name, part in document.items():
            show(*_parts(name, part))


def on_trace(file: Path) -> list[Scenario]:
    """Return the jobs that are played on a trace."""
    try:
        played = parse_trace(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    except PlanError as error:
        raise ConfigError(f"{file.name}: {error}") from None
    for notice in played.notices:
        say(f"{file.name}: {notice}")
    return [
        _trace_job(file.name, played, size, slack)
        for size in TRACE_SIZES
        for slack in TRACE_SLACKS
    ]


def _trace_job(name: str, played: Trace, size: int, slack: float) -> Scenario:
    rates = [vms / (1 + TRACE_FRICTION * (vms - 1)) for vms in range(1, size + 1)]
    fleet = Fleet(examples_per_s=(0.0, *rates))
    title = f"{name}, {size} VMs, {slack:g} times the time"
    return from_trace(title, played, fleet, tightness=1 / slack, budget_share=1.1)


def _document(cases: Sequence[Case]) -> dict[str, Any]:
    groups = [
        (low, high, [case for case in cases if low <= case.slack < high])
        for low, high in itertools.pairwise(SLACKS)
    ]
    finish, usd = kept(told for case in cases for told in case.predicted)
    soon = kept(told for case in cases for told in case.predicted_time_optimal)
    ours = sorted(
        cases, key=lambda case: case.outcomes[0].usd / case.offline_optimum_usd
    )
    worst = ours[-1]
    return {
        "rules": [asdict(row) for row in rows(cases)],
        "by_slack": [
            {"from": low, "to": high} | asdict(rows(some)[0])
            for low, high, some in groups
            if some
        ],
        "intervals_kept": {
            "finish": finish,
            "usd": usd,
            "finish_in_haste": soon[0],
            "usd_in_haste": soon[1],
        },
        "one_zone": asdict(blind) if (blind := online_bound_row(cases)) else None,
        "worst": {
            "world": worst.scenario,
            "over_bound": worst.outcomes[0].usd / worst.offline_optimum_usd,
        },
        "broken": [
            f"{outcome.scenario}, {outcome.rule}"
            for case in cases
            for outcome in case.outcomes[:OURS]
            if not (outcome.in_time and outcome.in_budget)
        ],
    }


def _parts(name: str, part: dict[str, Any]) -> list[Any]:
    table = Table(
        *("rule", "in time", "in budget", "late by", "cost / bound", "of all"),
        *("for each in time", "same jobs", "on demand", "booting", "paused"),
        title=name,
    )
    for row in part["rules"]:
        table.add_row(*_cells(row["rule"], row))
    by_slack = [
        _cells(f"{row['from']:g} to {row['to']:g} times the time", row)
        for row in part["by_slack"]
    ]
    table.add_section()
    for cells in by_slack:
        table.add_row(*cells)
    told = part["intervals_kept"]
    worst, blind = part["worst"], part["one_zone"]
    return [
        table,
        LEGEND,
        f"{FREE}: the policy and the bound where boots, morphs and losses cost nothing",
        f"worst: {worst['world']}, {worst['over_bound']:.2f} times the bound",
        *([_blind_line(blind)] if blind else []),
        (
            f"intervals of 90 % that held: {told['finish']:.1%} finish, "
            f"{told['usd']:.1%} cost; in haste: {told['finish_in_haste']:.1%} and "
            f"{told['usd_in_haste']:.1%}"
        ),
        *(f"promise broken: {scenario}" for scenario in part["broken"]),
    ]


def _blind_line(blind: dict[str, Any]) -> str:
    return (
        f"{blind['jobs']} jobs of one zone: whoever does not know which VMs go pays at "
        f"least {blind['blind_over_bound']:.3f} times the bound; the promise takes "
        f"{blind['over_bound']:.3f} times the bound, {blind['over_blind']:.3f} times that"
    )


def _cells(title: str, row: dict[str, Any]) -> list[str]:
    late = "" if row["late_by"] is None else f"{row['late_by']:.0%}"
    never = f"{row['never']} never" if row["never"] else ""
    same, ours = row["in_time_over_bound"], row["ours_over_bound"]
    return [
        title,
        f"{row['in_time']} of {row['jobs']}",
        f"{row['in_budget']} of {row['jobs']}",
        ", ".join(filter(None, (late, never))),
        f"{row['over_bound']:.3f}",
        f"{row['total_over_bound']:.3f}",
        f"{row['kept_over_bound']:.3f}",
        "" if same is None else f"{same:.3f}, ours {ours:.3f}",
        f"{row['on_demand']:.1%}",
        f"{row['booting']:.1%}",
        f"{row['paused']:.1%}",
    ]
