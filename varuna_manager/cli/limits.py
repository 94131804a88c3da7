"""``spottrain set``: change a job's limits while it runs or before it is resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from spottrain.pricing.billing.money import is_amount
from spottrain.varuna_manager.cli.arguments import NameArgument
from spottrain.varuna_manager.cli.console import Output, OutputOption, show, show_json
from spottrain.varuna_manager.core.model.state import State, budget, spent_usd
from spottrain.varuna_manager.format import NOTHING, dollars, number, utc
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.launch import control, limits
from spottrain.varuna_manager.reporting.deadline import deadline_line, deadline_view

SCHEMA_VERSION = 1


def set_command(
    name: NameArgument,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help=f"{', '.join(limits.SETTABLE)}; 'none' removes a limit.",
        ),
    ],
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Change it even if that ends the job.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change the budget, deadline or minimum speed of a job."""
    job = find(name)
    wanted = limits.read_limits(
        changes,
        job.config(),
        launched_at_s=read_state(job).submitted_at_s,
        now_s=time.time(),
    )
    control.change_limits(job, wanted, sure=yes)
    document = describe(job)
    if output is Output.JSON:
        show_json(document)
    else:
        show(*_lines(document))


def describe(job: JobDir) -> dict[str, Any]:
    """Return a job's present limits and how much of them is used."""
    state = read_state(job)
    settings, deadline_s = state.job, state.job.deadline_s
    return {
        "schema_version": SCHEMA_VERSION,
        "name": job.name,
        "max_usd": settings.max_usd,
        "max_usd_per_hour": settings.max_usd_per_hour,
        "deadline": None if deadline_s is None else utc(deadline_s),
        "deadline_s": deadline_s,
        "min_examples_per_s": settings.min_examples_per_s,
        "usd_spent": spent_usd(state, state.now_s),
        "usd_kept_back": budget(state).reserve.usd,
        "usd_per_hour": budget(state).rate.usd_per_hour,
        "promise": deadline_view(state, state.now_s),
        "notes": list(_notes(state)),
    }


def _notes(state: State) -> Iterator[str]:
    """Yield a line for each limit under which nothing can be rented at known prices."""
    cap, on_demand_allowed = state.job.max_usd_per_hour, state.job.allow_on_demand
    prices = [
        offer.usd_per_hour for offer in state.offers if offer.spot or on_demand_allowed
    ]
    cheapest = min(filter(is_amount, prices), default=None)
    min_vms = state.job.min_vms
    if cap is not None and cheapest is not None and cap < cheapest * min_vms:
        some = "no machine" if min_vms == 1 else f"fewer than {min_vms} machines"
        yield (
            f"budget.max_usd_per_hour: {dollars(cap)} pays for {some} at present: the "
            f"cheapest costs {dollars(cheapest)} per hour; the job waits until prices fall"
        )


def _lines(document: dict[str, Any]) -> Iterator[str]:
    spent, kept = dollars(document["usd_spent"]), dollars(document["usd_kept_back"])
    rate, min_speed = dollars(document["usd_per_hour"]), document["min_examples_per_s"]
    total = f"{dollars(document['max_usd'])}: {spent} spent, {kept} reserved"
    yield f"budget       {total}"
    yield f"per hour     {dollars(document['max_usd_per_hour'])}: {rate} now"
    yield f"deadline     {document['deadline'] or NOTHING}"
    yield f"min speed    {number(min_speed, 1)} examples/s"
    if (promise := document["promise"]) is not None:
        yield f"forecast     {deadline_line(promise, document['deadline_s'])}"
    yield from document["notes"]
