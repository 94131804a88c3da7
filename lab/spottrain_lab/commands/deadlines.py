"""``spottrain simulate deadlines``: deadlines and budgets kept, and at what cost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.errors import ConfigError
from spottrain.pricing.deadline.model import Fleet
from spottrain.varuna_manager.cli import console
from spottrain_lab.commands.trace import read_traces
from spottrain_lab.markets import coverage, evaluate
from spottrain_lab.markets.scenarios import Scenario, from_trace, synthetic
from spottrain_lab.traces.traces import Trace

SLACKS = (1.0, 1.15, 1.4, 1.7, 2.1, 10.0)
"""Edges of the groups of jobs by the time they have."""
TRACE_VMS = (8, 16)
TRACE_SLACKS = (1.1, 1.5, 2.0)
"""Jobs on each trace: the size of their fleet, and the time they have as a multiple of what
on-demand VMs need."""
COVERAGES = (0.8, 0.9)
"""Intervals that are corrected by other markets."""
OURS = 2
"""The first rules are ours: the deadline policy, cost-optimal and time-optimal."""
TRACE_FRICTION = 0.01
"""Throughput lost per further VM."""

LEGEND = (
    "cost / bound: mean over jobs; late jobs pay until the work is done. of all: sum of "
    "costs over sum of bounds. per job in time: the same sum per job that met its "
    "deadline. same jobs: mean over the jobs that this rule finished in time, and that of "
    "our cost-optimal policy on them. at most: the largest cost, over that of the whole "
    "fleet on demand. Other columns: shares of the cost"
)

TracesOption = Annotated[
    list[Path],
    typer.Option("--trace", help="A trace as of 'simulate trace'; any number of them."),
]
VmsOption = Annotated[
    list[int],
    typer.Option(
        "--vms",
        min=1,
        max=1000,
        help="Size of a job's fleet on each trace; any number.",
    ),
]
SlackOption = Annotated[
    list[float],
    typer.Option(
        "--slack",
        min=1.0,
        max=1000.0,
        help="Time of a job on each trace, in times what on-demand VMs need; any number.",
    ),
]
ZonesOption = Annotated[
    bool,
    typer.Option("--zones", help="The traces are zones of one market, which a fleet may span."),
]
MarketsOption = Annotated[
    int, typer.Option(min=0, max=100_000, help="Synthetic markets to replay.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the first market.")]
ProcessesOption = Annotated[int, typer.Option(min=0, help="Processes; 0: one per CPU.")]


def deadlines(
    trace: TracesOption = [],  # noqa: B006 - typer makes a new one each time
    vms: VmsOption = [],  # noqa: B006
    slack: SlackOption = [],  # noqa: B006
    zones: ZonesOption = False,
    markets: MarketsOption = 200,
    first_seed: SeedOption = 1,
    processes: ProcessesOption = 0,
    output: console.OutputOption = console.Output.TABLE,
) -> None:
    """Replay jobs with a deadline and a budget: which are in time, and at what cost.

    On-demand VMs could finish every job in time and within its budget. Compared are
    spottrain's deadline policy, on-demand VMs only, spot VMs only, the failover of today's
    tools, Uniform Progress, Parcae's look-ahead, and redundancy as Bamboo's; costs are
    relative to the offline optimum.
    """
    if (vms or slack or zones) and not trace:
        raise ConfigError("--vms, --slack and --zones are of jobs on a trace: got no --trace")
    sizes, times = vms or TRACE_VMS, slack or TRACE_SLACKS
    given = [trace] if zones and trace else [[file] for file in trace]
    groups = {_title(files): on_traces(files, sizes, times) for files in given}
    if markets:
        seeds = range(first_seed, first_seed + markets)
        groups[f"markets {seeds.start} to {seeds.stop - 1}"] = [*map(synthetic, seeds)]
    if not groups:
        raise ConfigError("nothing to replay: got no --trace and --markets 0; give one")
    scenarios = [scenario for group in groups.values() for scenario in group]
    found = iter(evaluate.evaluate_all(scenarios, processes or os.cpu_count() or 1))
    cases = {name: [next(found) for _ in group] for name, group in groups.items()}
    traced = [_title(files) for files in given]
    if len(traced) > 1:
        together = [case for title in traced for case in cases[title]]
        cases[f"{len(traced)} traces together"] = together
    document = {name: _document(group) for name, group in cases.items()}
    market_of = {  # jobs on one trace share its market
        case.scenario: title for title in traced for case in cases[title]
    }
    for name, group in cases.items():
        document[name]["coverage"] = _coverage(group, market_of)
    if output is console.Output.JSON:
        console.show_json(document)
    else:
        for name, part in document.items():
            console.show(*_parts(name, part))


def on_traces(
    files: Sequence[Path],
    sizes: Sequence[int] = TRACE_VMS,
    slacks: Sequence[float] = TRACE_SLACKS,
) -> list[Scenario]:
    """Return the jobs to replay on the traces of a market, of every size and slack."""
    zones = [read_traces([file]) for file in files]
    title = _title(files)
    return [trace_job(title, zones, size, slack) for size in sizes for slack in slacks]


def _title(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files)


def trace_job(name: str, zones: Sequence[Trace], size: int, slack: float) -> Scenario:
    """Return a job of a size on recorded zones, with so many times the time that on-demand VMs
    need.

    Raises:
        ConfigError: the shortest trace has no time for that.
    """
    rates = [vms / (1 + TRACE_FRICTION * (vms - 1)) for vms in range(1, size + 1)]
    fleet = Fleet(examples_per_s=(0.0, *rates))
    end_s = min(trace.end_s for trace in zones)
    if end_s <= slack * (fleet.boot_s + fleet.morph_s):
        raise ConfigError(
            f"{name}: a trace of {end_s:.0f} s is too short for --slack {slack:g}: "
            "give a longer trace or less slack"
        )
    title = f"{name}, {size} VMs, {slack:g} times the on-demand time"
    return from_trace(title, zones, fleet, tightness=1 / slack, budget_share=1.1)


def _document(cases: Sequence[evaluate.Case]) -> dict[str, Any]:
    groups = [
        (low, high, [case for case in cases if low <= case.slack < high])
        for low, high in itertools.pairwise(SLACKS)
    ]
    finish, usd = evaluate.kept(one for case in cases for one in case.forecasts)
    soon = evaluate.kept(one for case in cases for one in case.time_optimal_forecasts)
    ours = sorted(cases, key=lambda case: case.outcomes[0].usd / case.offline_optimum_usd)
    worst = ours[-1]
    return {
        "rules": [asdict(row) for row in evaluate.rows(cases)],
        "by_slack": [
            {"from": low, "to": high} | asdict(evaluate.rows(some)[0])
            for low, high, some in groups
            if some
        ],
        "intervals_kept": {
            "finish": finish,
            "usd": usd,
            "finish_in_haste": soon[0],
            "usd_in_haste": soon[1],
        },
        "one_zone": _one_zone(cases),
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


def _coverage(cases: Sequence[evaluate.Case], market_of: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return how well intervals hold, as they are and corrected."""
    found = []
    for policy in ("cost-optimal", "time-optimal"):
        named = [
            (market_of.get(case.scenario, case.scenario), one)
            for case in cases
            for one in (case.forecasts if policy == "cost-optimal" else case.time_optimal_forecasts)
        ]
        of = zip(("finish", "cost"), evaluate.foretold(named), strict=True)
        for what, rows in of:
            made = [("as forecast", rows, coverage.LEVEL)]
            made += [
                (
                    "corrected by the other markets",
                    coverage.corrected(rows, level),
                    level,
                )
                for level in COVERAGES
            ]
            for how, intervals, level in made:
                row = coverage.coverage(intervals, level)
                if row is not None:
                    about = {"policy": policy, "of": what, "intervals": how}
                    found.append(about | asdict(row))
    return found


def _one_zone(cases: Sequence[evaluate.Case]) -> dict[str, Any] | None:
    row = evaluate.online_bound_row(cases)
    if row is None:
        return None
    return {
        "jobs": row.jobs,
        "over_bound": row.over_bound,
        "blind_over_bound": row.online_over_bound,
        "over_blind": row.over_online,
    }


def _parts(name: str, part: dict[str, Any]) -> list[Any]:
    table = Table(
        *("rule", "in time", "in budget", "late by", "cost / bound", "of all"),
        *("per job in time", "same jobs", "at most", "on demand", "booting", "paused"),
        title=name,
    )
    for row in part["rules"]:
        table.add_row(*_cells(row["rule"], row))
    by_slack = [
        _cells(f"{row['from']:g} to {row['to']:g} times on demand", row) for row in part["by_slack"]
    ]
    table.add_section()
    for cells in by_slack:
        table.add_row(*cells)
    intervals, worst, one_zone = part["intervals_kept"], part["worst"], part["one_zone"]
    return [
        table,
        LEGEND,
        f"{evaluate.FREE}: the policy and the bound where boots, morphs and losses cost nothing",
        f"worst: {worst['world']}, {worst['over_bound']:.2f} times the bound",
        *([_one_zone_line(one_zone)] if one_zone else []),
        (
            f"coverage of 90 % intervals: {intervals['finish']:.1%} finish, "
            f"{intervals['usd']:.1%} cost; time-optimal: "
            f"{intervals['finish_in_haste']:.1%} and {intervals['usd_in_haste']:.1%}"
        ),
        *(_coverage_line(row) for row in part["coverage"]),
        *(f"limits broken: {scenario}" for scenario in part["broken"]),
    ]


def _coverage_line(row: dict[str, Any]) -> str:
    return (
        f"{row['policy']}, {row['of']}, {row['level']:.0%} intervals {row['intervals']}: {row['kept']:.1%} "
        f"of {row['forecasts']} hold ({row['kept_low']:.1%} to {row['kept_high']:.1%}); "
        f"interval score {row['score']:.3f}"
    )


def _one_zone_line(row: dict[str, Any]) -> str:
    return (
        f"{row['jobs']} jobs of one zone: not knowing which VMs are preempted costs at "
        f"least {row['blind_over_bound']:.3f} times the bound; the cost-optimal policy "
        f"costs {row['over_bound']:.3f} times the bound, {row['over_blind']:.3f} times that"
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
        f"{row['max_over_on_demand']:.3f}",
        f"{row['on_demand']:.1%}",
        f"{row['booting']:.1%}",
        f"{row['paused']:.1%}",
    ]
