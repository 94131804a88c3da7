"""``spottrain simulate pool``: many jobs on one pool, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.errors import ConfigError
from spottrain.pricing.sharing.policies import POLICIES
from spottrain.pricing.sharing.solver import check_solver
from spottrain.units import HOUR_S
from spottrain.varuna_manager.cli import console
from spottrain.varuna_manager.config.files import read_text
from spottrain.varuna_manager.format import NOTHING, dollars, duration
from spottrain.varuna_manager.pool.core.model import PoolSettings, Supply
from spottrain.varuna_manager.pool.simulation import generate, product, queue
from spottrain.varuna_manager.pool.simulation import workload as workloads
from spottrain.varuna_manager.pool.simulation.outcome import PoolOutcome, measures
from spottrain.varuna_manager.pool.simulation.workload import SimulatedJob
from spottrain.varuna_manager.reporting.html.allocations import Allocation, drawing
from spottrain.varuna_manager.reporting.html.page import write_page

THROUGHPUTS = "isolated-throughputs.csv"
"""Read from beside the trace if not named."""
USD_PER_HOUR = {"v100": 2.85, "p100": 1.68, "k80": 0.52}
"""Of Gavel's kinds, on demand, as its authors had them; for other kinds dollars are left out."""
QUEUE = "queue"
MORPH_S = 10.0
"""What a change of size costs a job of the product."""


class Form(StrEnum):
    """How a pool is simulated."""

    PRODUCT = "product"
    GAVEL = "gavel"


TraceArgument = Annotated[
    str,
    typer.Argument(
        help=f"A trace of Gavel's, JSON of our own, or one of {', '.join(generate.GENERATED)}."
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(help="VMs of each kind, the fastest first: v100=8,p100=16,k80=24."),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(POLICIES)}; {QUEUE}: by priority, nobody changes size or is "
        "stopped; with --form gavel max_throughput, min_cost and isolated too."
    ),
]
FormOption = Annotated[
    Form,
    typer.Option(
        help="product: the pool's own core, sizes elastic and fixed; gavel: shares of "
        "time, in rounds, at fixed sizes."
    ),
]
UnawareOption = Annotated[
    bool, typer.Option("--unaware", help="Gavel's baseline: all VMs count as alike.")
]
ThroughputsOption = Annotated[
    Path | None,
    typer.Option(help=f"Of a trace's types of jobs; {THROUGHPUTS} beside it if left out."),
]
UsdOption = Annotated[str, typer.Option(help="Prices of VMs of each kind: v100=2.85,p100=1.68.")]
MorphOption = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds that a change of size costs; 10, for gavel 5."),
]
RoundOption = Annotated[float | None, typer.Option(min=1, help="Of --form gavel; 360 if left out.")]
WindowOption = Annotated[
    str,
    typer.Option(help="FIRST:LAST of the jobs, by arrival, whose times are measured."),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of a workload that is drawn.")]
PictureOption = Annotated[
    Path | None, typer.Option(help="Who held what when, as SVG (.svg) or HTML.")
]


def pool(
    trace: TraceArgument,
    cluster: ClusterOption,
    policy: PolicyOption = "fair",
    form: FormOption = Form.PRODUCT,
    unaware: UnawareOption = False,
    throughputs: ThroughputsOption = None,
    usd_per_hour: UsdOption = "",
    morph_s: MorphOption = None,
    round_s: RoundOption = None,
    window: WindowOption = "",
    seed: SeedOption = 0,
    picture: PictureOption = None,
    output: console.OutputOption = console.Output.TABLE,
) -> None:
    """Replay jobs that arrive on a pool, in virtual time, under a policy.

    The first row is what --picture shows. Throughputs are credited at most in proportion
    to VMs, and never less on more of them, at a constant mini-batch.
    """
    check_solver()
    supplies = _supplies(cluster, usd_per_hour)
    jobs = _jobs(trace, throughputs, [supply.name for supply in supplies], seed)
    measured = _window(window, len(jobs))
    if policy == QUEUE:
        outcomes = {QUEUE: queue.simulate(supplies, jobs)}
    elif form is Form.GAVEL:
        given = {"round_s": round_s, "morph_s": morph_s}
        named = {name: value for name, value in given.items() if value is not None}
        gavel = _gavel()
        replayed = gavel.Gavel(policy=policy, is_aware=not unaware, **named)
        outcomes = {"gavel": gavel.simulate(replayed, supplies, jobs)}
    else:
        if unaware:
            raise ConfigError("--unaware is of --form gavel; add that, or leave it out")
        outcomes = _product(policy, supplies, jobs, morph_s)
    first = next(iter(outcomes.values()))
    if not any(outcome.jobs for outcome in outcomes.values()):
        raise ConfigError(f"{trace}: no job was accepted: {first.refused[0][1]}")
    if picture is not None:
        _write(picture, first)
    document = {
        "trace": trace,
        "policy": policy,
        "form": form.value,
        "aware_of_kinds": not unaware,
        "cluster": {supply.name: supply.vms for supply in supplies},
        "runs": {
            name: _document(one, measured, has_prices=_has_prices(supplies))
            for name, one in outcomes.items()
        },
    }
    if output is console.Output.JSON:
        console.show_json(document)
    else:
        console.show(*_parts(document))


def _gavel() -> Any:
    """Return the module that replays Gavel.

    Raises:
        ConfigError: ``spottrain-lab`` is not installed.
    """
    for found in entry_points(group="spottrain.pool_forms", name=Form.GAVEL):
        return found.load()
    raise ConfigError(
        "--form gavel is in spottrain-lab, which is not installed: 'pip install ./lab' "
        "in a checkout"
    )


def _product(
    policy: str,
    supplies: list[Supply],
    jobs: list[SimulatedJob],
    morph_s: float | None,
) -> dict[str, PoolOutcome]:
    if policy not in POLICIES:
        raise ConfigError(f"--policy: got {policy}; give one of {', '.join([*POLICIES, QUEUE])}")
    return {
        name: product.simulate(
            PoolSettings(policy=policy),
            supplies,
            jobs,
            elastic=elastic,
            morph_s=MORPH_S if morph_s is None else morph_s,
        )
        for name, elastic in (("elastic", True), ("fixed sizes", False))
    }


def _supplies(cluster: str, prices: str) -> list[Supply]:
    usd = {**USD_PER_HOUR, **_pairs("--usd-per-hour", prices)}
    supplies = [
        Supply(name=kind, vms=int(n), microusd_per_hour=round(usd.get(kind, 0.0) * 1e6))
        for kind, n in _pairs("--cluster", cluster).items()
    ]
    if any(supply.vms < 1 for supply in supplies) or not supplies:
        raise ConfigError(f"--cluster: got {cluster}; give each kind 1 or more VMs")
    return supplies


def _pairs(option: str, text: str) -> dict[str, float]:
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError as error:
            raise ConfigError(
                f"{option}: got {part!r}; give KIND=NUMBER, separated by commas"
            ) from error
        if not (name.strip() and 0 <= found[name.strip()] < math.inf):
            raise ConfigError(f"{option}: got {part!r}; give KIND=NUMBER, 0 or more")
    return found


def _jobs(trace: str, throughputs: Path | None, kinds: list[str], seed: int) -> list[SimulatedJob]:
    if trace in generate.GENERATED:
        return generate.generated(trace, seed, len(kinds))
    text = read_text(Path(trace))
    if text.lstrip().startswith("{"):
        jobs = workloads.read_jobs(text, kinds)
    else:
        path = throughputs or Path(trace).with_name(THROUGHPUTS)
        measured = workloads.read_throughputs(read_text(path))
        jobs = workloads.read_gavel(text, measured, kinds)
    if not jobs:
        raise ConfigError(f"{trace}: has no jobs; give at least one")
    return jobs


def _window(text: str, jobs: int) -> tuple[int, int] | None:
    if not text:
        return None
    try:
        first, last = map(int, text.split(":"))
    except ValueError as error:
        raise ConfigError(f"--window: got {text}; give two whole numbers, as 36:61") from error
    if not 0 <= first < last <= jobs:
        raise ConfigError(f"--window: got {text}; give FIRST:LAST within 0:{jobs}")
    return first, last


def _has_prices(supplies: list[Supply]) -> bool:
    return all(supply.microusd_per_hour > 0 for supply in supplies)


def _document(
    outcome: PoolOutcome, window: tuple[int, int] | None, *, has_prices: bool
) -> dict[str, Any]:
    document: dict[str, Any] = {**measures(outcome, window)}
    if not has_prices:
        document["usd"] = None
    document["refusals"] = [{"job": name, "reason": reason} for name, reason in outcome.refused]
    return document


def _parts(document: Mapping[str, Any]) -> list[Any]:
    columns = [
        *("run", "mean JCT", "p90", "makespan", "queueing", "used", "FTF"),
        *("deadlines", "$", "ended"),
    ]
    table = Table(*columns)
    for name, row in document["runs"].items():
        due = row["deadlines"]
        table.add_row(
            name,
            _hours(row["mean_completion_s"]),
            _hours(row["p90_completion_s"]),
            _hours(row["makespan_s"]),
            _finite(row["mean_queueing_s"], duration),
            _finite(row["utilisation"], "{:.1%}".format),
            _finite(row["mean_finish_time_fairness"], "{:.2f}".format),
            f"{row['deadlines_kept']} of {due}" if due else NOTHING,
            dollars(row["usd"]),
            f"{row['ended']} of {row['jobs']}",
        )
    cluster = ", ".join(f"{n} {kind}" for kind, n in document["cluster"].items())
    aware = "" if document["aware_of_kinds"] else ", unaware of kinds"
    head = f"{document['trace']}: {document['policy']} ({document['form']}{aware}) on {cluster}"
    refusals = [
        f"refused: {one['reason']}"
        for row in document["runs"].values()
        for one in row["refusals"][:3]
    ]
    note = (
        "JCT: from arrival to end; used: VM time held, of the pool's; FTF: mean of the time "
        "over that on one's own part of the pool"
    )
    return [head, table, *dict.fromkeys(refusals), note]


def _hours(seconds: float) -> str:
    return _finite(seconds / HOUR_S, "{:.2f} h".format)


def _finite(value: float, shown: Callable[[float], str]) -> str:
    return shown(value) if math.isfinite(value) else NOTHING


def _write(path: Path, outcome: PoolOutcome) -> None:
    ended = [one.ended_s for one in outcome.jobs if one.ended_s < math.inf]
    svg = drawing(
        list(zip(outcome.kinds, outcome.vms, strict=True)),
        [
            Allocation(one.job.name, kind, tuple((at_s, vms[k]) for at_s, vms in one.sizes))
            for k, kind in enumerate(outcome.kinds)
            for one in outcome.jobs
        ],
        max(ended, default=1.0),
    )
    if path.suffix != ".svg":
        svg = f'<!doctype html>\n<meta charset="utf-8"><title>pool</title>{svg}'
    write_page(path, svg)
