"""``spottrain simulate planners``: what Megatron and PipeDream would make of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from spottrain.errors import CapacityError, ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.choose import choose_plan
from spottrain.varuna_manager.cli.console import Output, OutputOption, show, show_json
from spottrain.varuna_manager.cli.workload import read_workload
from spottrain.varuna_manager.format import duration
from spottrain.varuna_manager.offers.preview import DEFAULT_GPUS, workload_inputs
from spottrain_lab.planners.alternatives import Alternatives, alternatives_to


def planners(
    file: Annotated[Path, typer.Argument(help="Model and profile as JSON, as for plan.")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = DEFAULT_GPUS,
    gpus_per_vm: Annotated[int, typer.Option(min=1, help="GPUs in a VM.")] = 1,
    depth: Annotated[int | None, typer.Option(min=1, help="Pipeline depth.")] = None,
    minibatch_size: Annotated[
        int | None, typer.Option(min=1, help="Override the mini-batch size.")
    ] = None,
    facts: Annotated[
        Path | None, typer.Option(help="As for plan: 'spottrain inspect -o json'.")
    ] = None,
    gpu_memory_gib: Annotated[
        float | None, typer.Option(help="Override the memory per GPU.")
    ] = None,
    usd_per_hour: Annotated[float | None, typer.Option(help="Override the price per VM.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Compare a plan with tensor parallelism within VMs and with unequal replication."""
    workload = read_workload(file, facts, minibatch_size, gpu_memory_gib, usd_per_hour)
    inputs = replace(workload_inputs(workload, gpus, gpus_per_vm), pipeline_depth=depth)
    try:
        choice = choose_plan(inputs)
        plan = choice.plan
        other = None if plan is None else alternatives_to(inputs, plan)
    except PlanError as error:
        raise ConfigError(f"{file.name}: {error}") from error
    if plan is None or other is None:
        raise CapacityError(f"{file.name}: no plan: {choice.why_not}")
    if output is Output.JSON:
        show_json({"plan": plan.shape, **asdict(other)})
        return
    show(f"plan     {plan.shape}, {plan.schedule}", *_lines(other))


def _lines(other: Alternatives) -> Iterator[str]:
    least_s = min((row.step_s for row in other.tensor if row.step_s), default=0.0)
    for row in other.tensor:
        words = f"tensor   t = {row.size}: "
        if row.step_s is None:
            yield f"{words}{row.why_not}"
            continue
        slower = row.step_s / least_s - 1
        words += f"{row.shape}, {duration(row.step_s)}"
        yield f"{words}, {slower:.1%} slower" if slower else f"{words}, the fastest"
    if not other.tensor:
        yield "tensor   none: VMs have one device each"
    if other.uneven:
        yield (
            f"uneven   {other.uneven} would be {other.uneven_gain:.1%} faster than "
            "equal replication, bubbles left out"
        )
    else:
        yield "uneven   no partition with unequal replication would be faster"
