"""``spottrain simulate trace``: a trace of VM availability under several rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.errors import ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.workload import Workload
from spottrain.units import HOUR_S
from spottrain.varuna_manager.cli import console
from spottrain.varuna_manager.cli.workload import read_workload
from spottrain.varuna_manager.config.files import read_text
from spottrain.varuna_manager.format import NOTHING, dollars, duration
from spottrain_lab.traces.replay import CostModel, ReplayResult, TimeUse
from spottrain_lab.traces.rules import Comparison, compare
from spottrain_lab.traces.shapes import Shapes
from spottrain_lab.traces.traces import Trace, joined, limited, parse_trace

DEFAULTS = CostModel()
MILLION = 1_000_000

TraceArgument = Annotated[
    list[Path],
    typer.Argument(
        help="Rows 'milliseconds,add|remove,node' or 'date, time, count', or SkyPilot's "
        "JSON; several: the zones that the fleet is spread over."
    ),
]
VmsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Most VMs that the job has; by default all."),
]
ProfileOption = Annotated[
    Path, typer.Option(help="Model, profile and machines (see examples/profiles).")
]
FactsOption = Annotated[
    Path | None,
    typer.Option(help="'spottrain inspect -o json', for a profile without them."),
]
MinibatchOption = Annotated[
    int | None, typer.Option(help="Examples in a mini-batch; by default --profile's.")
]
MemoryOption = Annotated[
    float | None, typer.Option(help="GPU memory of each VM in GiB; by default --profile's.")
]
PriceOption = Annotated[
    float | None, typer.Option(help="Dollars per VM-hour; by default --profile's.")
]
NoticeOption = Annotated[
    float, typer.Option(help="Seconds of notice before a VM is lost; 0: none.")
]
MorphOption = Annotated[
    float, typer.Option(help="Seconds that a morph takes, without moving state.")
]
JoinOption = Annotated[float, typer.Option(help="From a VM's arrival until it is ready.")]
RestartOption = Annotated[float, typer.Option(help="Restarting everything from a checkpoint.")]
CheckpointOption = Annotated[float, typer.Option(help="Between two checkpoints.")]
SeedOption = Annotated[
    int, typer.Option(help="Chooses the VMs that are lost, if the trace only counts.")
]


def trace(
    file: TraceArgument,
    profile: ProfileOption,
    vms: VmsOption = None,
    facts: FactsOption = None,
    minibatch_size: MinibatchOption = None,
    gpu_memory_gib: MemoryOption = None,
    usd_per_hour: PriceOption = None,
    notice_s: NoticeOption = DEFAULTS.notice_s,
    morph_s: MorphOption = DEFAULTS.morph_s,
    join_s: JoinOption = DEFAULTS.join_s,
    restart_s: RestartOption = DEFAULTS.restart_s,
    checkpoint_every_s: CheckpointOption = DEFAULTS.checkpoint_every_s,
    seed: SeedOption = 0,
    output: console.OutputOption = console.Output.TABLE,
) -> None:
    """Replay a trace of VMs that come and go, in virtual time, under several rules.

    Each VM has one GPU. Compared are spottrain's rule, a morph at every change, changes
    of the number of replicas only, Parcae's look-ahead, redundancy as Bamboo's, restarts
    of everything, and an optimal rule that knows the whole trace beforehand.
    """
    played = read_traces(file, seed)
    name = ", ".join(one.name for one in file)
    workload = read_workload(profile, facts, minibatch_size, gpu_memory_gib, usd_per_hour)
    try:
        cost_model = CostModel(
            morph_s=morph_s,
            join_s=join_s,
            restart_s=restart_s,
            checkpoint_every_s=checkpoint_every_s,
            notice_s=notice_s,
        )
        if vms is not None:
            played = limited(played, vms)
        shapes = Shapes(workload)
        comparison = compare(played, shapes, cost_model)
    except PlanError as error:
        raise ConfigError(f"{name}: {error}") from error
    document = _document(name, played, workload, cost_model, comparison)
    if output is console.Output.JSON:
        console.show_json(document)
    else:
        console.show(*_parts(document))


def read_traces(files: Sequence[Path], seed: int = 0) -> Trace:
    """Return the traces of a job's zones as one, and say what was corrected in each.

    Raises:
        ConfigError: One cannot be read or is no trace.
    """
    traces = []
    for file in files:
        text = read_text(file)
        try:
            traces.append(parse_trace(text, seed=seed))
        except PlanError as error:
            raise ConfigError(f"{file.name}: {error}") from error
        for notice in traces[-1].notices:
            console.say(f"{file.name}: {notice}")
    return joined(traces)


def _document(
    name: str,
    played: Trace,
    workload: Workload,
    cost_model: CostModel,
    comparison: Comparison,
) -> dict[str, Any]:
    profile, most = workload.profile, comparison.max_examples
    return {
        "trace": name,
        "notices": list(played.notices),
        "trace_s": played.end_s,
        "vm_hours": played.vm_s() / HOUR_S,
        "most_vms": played.max_vms(),
        "model": workload.facts.fingerprint,
        "device": profile.device,
        "profile_origin": profile.origin,
        "profile_sources": list(workload.sources),
        "minibatch_size": workload.minibatch_size,
        "assumed": asdict(cost_model),
        "rules": [_row(outcome, most) for outcome in comparison.outcomes],
        "all_knowing": {"examples": most},
    }


def _row(outcome: ReplayResult, most: int) -> dict[str, Any]:
    examples, usd = outcome.examples, outcome.usd
    lost = {k: v for k, v in outcome.seconds.items() if k is not TimeUse.TRAINING}
    return {
        "rule": outcome.rule,
        "examples": examples,
        "share_of_all_knowing": examples / most if most else None,
        "usd": usd,
        "usd_per_million_examples": usd / examples * MILLION if examples else None,
        "morphs": outcome.morphs,
        "training_s": outcome.seconds[TimeUse.TRAINING],
        "lost_s": lost,
    }


def _parts(document: dict[str, Any]) -> list[Any]:
    length_s = document["trace_s"]
    measured = document["profile_origin"]
    causes = [spent for spent in TimeUse if spent is not TimeUse.TRAINING]
    table = Table("rule", "examples", "of possible", "$/million", "morphs", *causes)
    for row in document["rules"]:
        share, usd = row["share_of_all_knowing"], row["usd_per_million_examples"]
        table.add_row(
            row["rule"],
            f"{row['examples']:,}",
            NOTHING if share is None else f"{share:.1%}",
            dollars(usd),
            str(row["morphs"]),
            *(f"{row['lost_s'][cause] / length_s:.1%}" for cause in causes),
        )
    table.add_row("all-knowing", f"{document['all_knowing']['examples']:,}", "100.0%")
    assumed = ", ".join(f"{key} {value:g}" for key, value in document["assumed"].items())
    spot = (
        f"{document['trace']}: {duration(length_s)}, {document['vm_hours']:,.1f} VM "
        f"hours, at most {document['most_vms']} VMs"
    )
    model = (
        f"{document['model']} on {document['device']} (profile {measured}), "
        f"mini-batch {document['minibatch_size']}"
    )
    note = "dropped and the columns after it: time lost, as a share of the trace"
    return [spot, model, f"assumed: {assumed}", table, note]
