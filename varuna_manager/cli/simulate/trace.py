"""``spottrain simulate trace``: an availability trace under several rules."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.errors import ConfigError, WireError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.replay.replay import CostModel, ReplayResult, TimeUse
from spottrain.morphing.replay.rules import Comparison, compare
from spottrain.morphing.replay.shapes import Shapes, Workload
from spottrain.morphing.replay.traces import Trace, parse_trace
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.format import NOTHING, dollars, duration
from spottrain.wire import ModelFacts, Profile, decode

ROOM = CostModel()
CURRENCY = 1_000_000
"""Examples that a price is told for."""

TraceArgument = Annotated[
    Path,
    typer.Argument(help="Rows 'milliseconds,add|remove,node' or 'date, time, count'."),
]
ProfileOption = Annotated[
    Path, typer.Option(help="Model, profile and machines (see examples/profiles).")
]
FactsOption = Annotated[
    Path | None,
    typer.Option(help="'spottrain inspect -o json', for a profile without them."),
]
MinibatchOption = Annotated[
    int | None, typer.Option(help="Examples; that of --profile if not given.")
]
MemoryOption = Annotated[
    float | None, typer.Option(help="Of each VM's GPU; that of --profile.")
]
PriceOption = Annotated[float | None, typer.Option(help="Of a VM; that of --profile.")]
NoticeOption = Annotated[float, typer.Option(help="Notice before a VM goes; 0: none.")]
MorphOption = Annotated[float, typer.Option(help="A morph, moving state apart.")]
JoinOption = Annotated[
    float, typer.Option(help="From a VM's coming to its being ready.")
]
RestartOption = Annotated[
    float, typer.Option(help="Restarting everything from a checkpoint.")
]
CheckpointOption = Annotated[float, typer.Option(help="Between two checkpoints.")]
SeedOption = Annotated[
    int, typer.Option(help="Which VMs go, where a trace only counts them.")
]


class SimulateGroup(typer.core.TyperGroup):
    """``spottrain simulate FILE`` means ``spottrain simulate trace FILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command where a file stands in its place."""
        if args and args[0] not in self.commands and _is_file_name(args[0]):
            args = ["trace", *args]
        return super().parse_args(ctx, args)


def _is_file_name(argument: str) -> bool:
    """Whether a file is meant, be it there or not."""
    path = Path(argument)
    return not argument.startswith("-") and (bool(path.suffix) or path.is_file())


def register(simulate: typer.Typer) -> None:
    """Add the command of this module."""
    simulate.command()(trace)


def trace(
    file: TraceArgument,
    profile: ProfileOption,
    facts: FactsOption = None,
    minibatch_size: MinibatchOption = None,
    gpu_memory_gib: MemoryOption = None,
    usd_per_hour: PriceOption = None,
    notice_s: NoticeOption = ROOM.notice_s,
    morph_s: MorphOption = ROOM.morph_s,
    join_s: JoinOption = ROOM.join_s,
    restart_s: RestartOption = ROOM.restart_s,
    checkpoint_every_s: CheckpointOption = ROOM.checkpoint_every_s,
    seed: SeedOption = 0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Play a trace of VMs that come and go, in virtual time, under several rules.

    Each VM has one GPU. Compared are spottrain's rule, a morph at every change, changes
    of the number of replicas only, restarts of everything, and the best that one could
    do who knew the whole trace beforehand.
    """
    text, name = _read(file), file.name
    workload = read_workload(
        profile, facts, minibatch_size, gpu_memory_gib, usd_per_hour
    )
    try:
        room = CostModel(
            morph_s=morph_s,
            join_s=join_s,
            restart_s=restart_s,
            checkpoint_every_s=checkpoint_every_s,
            notice_s=notice_s,
        )
        played = parse_trace(text, seed=seed)
        shapes = Shapes(workload)
        comparison = compare(played, shapes, room)
    except PlanError as error:
        raise ConfigError(f"{name}: {error}") from None
    for notice in played.notices:
        say(f"{name}: {notice}")
    document = _document(name, played, workload, room, comparison)
    if output is Output.JSON:
        show_json(document)
    else:
        show(*_parts(document))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def read_workload(
    profile: Path,
    facts: Path | None,
    minibatch_size: int | None,
    gpu_memory_gib: float | None,
    usd_per_hour: float | None,
) -> Workload:
    """Return what ``profile`` holds, with what the command line says instead.

    Raises:
        ConfigError: A file cannot be read or is none of that kind.
    """
    text = _read(profile)
    if facts is None:
        workload: Workload = _decode(Workload, text, profile)
    else:
        if minibatch_size is None or gpu_memory_gib is None or usd_per_hour is None:
            raise ConfigError(
                "--facts needs --minibatch-size, --gpu-memory-gib and --usd-per-hour: "
                "a profile alone does not say them; give all three"
            )
        workload = Workload(
            sources=(str(profile),),
            facts=_decode(ModelFacts, _read(facts), facts),
            profile=_decode(Profile, text, profile),
            minibatch_size=0,
            gpu_memory_bytes=0,
            usd_per_hour=0.0,
        )
    changes: dict[str, Any] = {}
    if minibatch_size is not None:
        changes["minibatch_size"] = minibatch_size
    if gpu_memory_gib is not None:
        if not math.isfinite(gpu_memory_gib):
            raise ConfigError(
                f"--gpu-memory-gib must be a number above 0: got {gpu_memory_gib}; "
                "change it"
            )
        changes["gpu_memory_bytes"] = int(gpu_memory_gib * 2**30)
    if usd_per_hour is not None:
        changes["usd_per_hour"] = usd_per_hour
    return replace(workload, **changes)


def _decode(cls: Any, text: str, path: Path) -> Any:
    try:
        return decode(cls, text)
    except WireError as error:
        hint = ""
        if cls is Workload and '"microbatches"' in text and '"facts"' not in text:
            hint = "; a profile that was calibrated needs --facts beside it"
        raise ConfigError(f"{path.name}: {error}{hint}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path.name}: is no JSON: {error}; mend the file") from None


def _document(
    name: str,
    played: Trace,
    workload: Workload,
    room: CostModel,
    comparison: Comparison,
) -> dict[str, Any]:
    profile, most = workload.profile, comparison.max_examples
    return {
        "trace": name,
        "notices": list(played.notices),
        "trace_s": played.end_s,
        "vm_hours": played.vm_s() / 3600,
        "most_vms": played.max_vms(),
        "model": workload.facts.fingerprint,
        "device": profile.device,
        "profile_origin": profile.origin,
        "profile_sources": list(workload.sources),
        "minibatch_size": workload.minibatch_size,
        "assumed": asdict(room),
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
        "usd_per_million_examples": usd / examples * CURRENCY if examples else None,
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
    assumed = ", ".join(
        f"{key} {value:g}" for key, value in document["assumed"].items()
    )
    spot = (
        f"{document['trace']}: {duration(length_s)}, {document['vm_hours']:,.1f} VM "
        f"hours, at most {document['most_vms']} VMs"
    )
    model = (
        f"{document['model']} on {document['device']} (profile {measured}), "
        f"mini-batch {document['minibatch_size']}"
    )
    note = "dropped and what follows it: time lost, as a share of the trace"
    return [spot, model, f"assumed: {assumed}", table, note]
