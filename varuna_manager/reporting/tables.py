"""Tables and panels about a job, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spottrain.units import HOUR_S, counted
from spottrain.varuna_manager import format as fmt
from spottrain.varuna_manager.reporting.columns import columns
from spottrain.varuna_manager.reporting.documents import fleet_line
from spottrain.varuna_manager.reporting.measured import SKIPPED
from spottrain.varuna_manager.reporting.sparkline import bars
from spottrain.varuna_manager.reporting.text import RowsTable, history_tables
from spottrain.varuna_manager.reporting.utilisation import use_line
from spottrain.wire.model import ModelFacts

COLOURS = {
    "running": "green",
    "succeeded": "green",
    "waiting": "yellow",
    "ending": "yellow",
    "stopped": "yellow",
    "queued": "yellow",
}


def live_panel(status: dict[str, Any], last_at_s: float | None) -> Panel:
    """Return the live view of a job.

    Args:
        status: From ``documents.status``.
        last_at_s: When the last event happened, seconds since the epoch.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(ratio=1)
    for name, line in status_lines(status, last_at_s):
        grid.add_row(name, _progress(status) if name == STEP else Text(line))
    state = status["state"]
    title = f"{status['name']} · {state} · {fmt.duration(status['wall_s'])}"
    return Panel(grid, title=title, border_style=COLOURS.get(state, "red"))


STEP = "step"
"""Name of the line of ``status_lines`` beside which there is room for a bar."""


def status_lines(status: dict[str, Any], last_at_s: float | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of the live view of a job with their names.

    Args:
        status: From ``documents.status``.
        last_at_s: When the last event happened, seconds since the epoch.
    """
    yield "computes on", status["computes_on"]
    yield STEP, progress_line(status)
    yield "loss", loss_line(status) + nonfinite_words(status)
    compute = use_line(status)
    speed = _speed(status["examples_per_s"])
    if tokens_per_s := status.get("newest", {}).get("tokens_per_s"):
        speed += f" · {tokens_per_s:,.0f} tokens/s"
    yield "speed", speed + (f" · {compute}" if compute else "")
    yield "cost", money_line(status)
    if (deadline := status["forecast"]) is not None:
        # Not above: few jobs have one, and ``status`` must answer at once.
        from spottrain.varuna_manager.reporting.deadline import deadline_line

        yield "forecast", deadline_line(deadline, status["deadline_s"])
    safety = safety_line(status)
    yield "fleet", fleet_line(status) + (f" · {safety}" if safety else "")
    yield "plan", plan_line(status)
    if (move := status["move"]) is not None:
        yield "moving", f"from {move['from']} to {move['to']}: {move['why']}"
    if interval := checkpoints_line(status):
        yield "checkpoints", interval
    yield "now", status["activity"]
    for sink, trouble in status.get("tracking", {}).items():
        yield "tracking", f"{sink}: {trouble}"
    moment = "" if last_at_s is None else f"{fmt.clock(last_at_s)} "
    yield "last event", moment + (status["last_event"] or fmt.NOTHING)


def loss_line(status: dict[str, Any]) -> str:
    """Return the newest loss with what was measured beside it, and its curve."""
    newest = status.get("newest", {})
    words = [fmt.number(status["loss"])]
    if newest.get("learning_rate") is not None:
        words.append(f"lr {newest['learning_rate']:.3g}")
    words += [f"{name} {_short(v)}" for name, v in newest.get("metrics", {}).items()]
    words += [f"{name} {_short(loss)}" for name, loss in newest.get("evaluations", {}).items()]
    if skipped := newest.get("skipped"):
        words.append(f"skipped: {SKIPPED[skipped]}")
    curve = bars(status.get("loss_curve", ()))
    return " · ".join(words) + (f"  {curve}" if len(curve) > 1 else "")


def _short(value: float) -> str:
    return f"{value:.4g}"


def progress_line(status: dict[str, Any]) -> str:
    """Return the steps done, their share, and the time left."""
    step, steps = status["step"], status["steps"]
    left = status["time_left_s"]
    words = "" if left is None else f" · about {fmt.duration(left)} left"
    return f"{step} of {steps} · {100 * step / steps:.0f} %{words}"


def _progress(status: dict[str, Any]) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=status["steps"], completed=status["step"], width=24)
    row.add_row(bar, progress_line(status))
    return row


def _speed(examples_per_s: float | None) -> str:
    return fmt.NOTHING if examples_per_s is None else f"{examples_per_s:.1f} examples/s"


def money_line(status: dict[str, Any]) -> str:
    """Return the dollars spent, the budget, dollars per hour; and GPU-hours if they are capped."""
    budget = status["usd_budget"]
    of = "" if budget is None else f" of {fmt.dollars(budget)}"
    rate = fmt.dollars(status["usd_per_hour"])
    hours = fmt.gpu_hours(status, " · ")
    return f"{fmt.dollars(status['usd_spent'])}{of} · {rate}/hour{hours}"


def plan_line(status: dict[str, Any]) -> str:
    """Return the present plan with its reason, such as ``2x2 since step 40: …``."""
    if (plan := status["plan"]) is None:
        return "none"
    since = plan["from_step"]
    began = plan["phase"] if since is None else f"since step {since}"
    return f"{plan['shape']} {began}: {plan['reason']}"


def safety_line(status: dict[str, Any]) -> str:
    """Return which losses the job could survive now, and what another would cost; empty if
    nothing can be lost."""
    safety = status["safety"]
    if safety["checkpoint_step"] is None or not (status["plan"] or status["fleet"]):
        return ""
    if safety["survives_any_vm"]:
        count = safety["vms_at_once"]
        any_vms = "any one VM" if count == 1 else f"any {count} VMs at once"
        return f"{any_vms} can be lost without losing progress"
    spared = len(safety["vms_spared"])
    lost = "another VM" if spared else "a VM"
    if not safety["survives_any_worker"]:
        lost += " or a killed worker"
    step = safety["checkpoint_step"]
    cost = f"losing {lost} may cost {counted(safety['lag_steps'], 'step')}, back to step {step}"
    if (copied := safety["copied_step"]) is not None and copied > step:
        cost = (
            f"losing {lost} may cost {counted(safety['copy_lag_steps'], 'step')}, back to copies of "
            f"step {copied}; several at once {counted(safety['lag_steps'], 'step')}, to step {step}"
        )
    if not spared:
        return cost
    names = ", ".join(safety["vms_spared"]) if spared <= 3 else f"{spared} of the VMs"
    return f"{names} can be lost without losing progress; {cost}"


def checkpoints_line(status: dict[str, Any]) -> str:
    """Return how often checkpoints are saved, and what one costs; empty if not chosen."""
    safety = status["safety"]
    if (every := safety["checkpoint_every_steps"]) is None:
        return ""
    cost_s = safety["checkpoint_cost_s"]
    costs = "" if cost_s is None else f", each slows training by {cost_s:.2g} s"
    return f"every {'step' if every == 1 else f'{every} steps'}{costs}"


def plain_line(status: dict[str, Any]) -> str:
    """Return the state of a job as one line for a log."""
    return (
        f"step {status['step']}/{status['steps']}  loss {fmt.number(status['loss'])}  "
        f"{_speed(status['examples_per_s'])}  {money_line(status)}  "
        f"{fmt.duration(status['time_left_s'])} left  {fleet_line(status)}  "
        f"plan {plan_line(status).partition(':')[0]}"
    )


def jobs_table(jobs: Iterable[dict[str, Any]]) -> Table:
    """Return a table of jobs, one per row."""
    table = columns("NAME", "STATE", "r:STEP", "r:LOSS", "r:SPENT", "FLEET", "NOW")
    for job in jobs:
        table.add_row(
            job["name"],
            Text(job["state"], COLOURS.get(job["state"], "red")),
            f"{job['step']}/{job['steps']}",
            fmt.number(job["loss"]),
            fmt.dollars(job["usd_spent"]),
            fleet_line(job),
            job["reason"] or job["activity"],
        )
    return table


def fleet_table(status: dict[str, Any]) -> Table:
    """Return a table of a job's VMs, one per row."""
    rows = fleet_rows(status)
    table = columns(*_headings(rows.columns))
    for row in rows.rows:
        table.add_row(*row)
    return table


def _headings(names: Iterable[str]) -> Iterator[str]:
    """Yield names of columns as the terminal shows them."""
    for name in names:
        yield f"r:{name[2:].upper()}" if name[:2] == "r:" else name.upper()


def fleet_rows(status: dict[str, Any]) -> RowsTable:
    """Return a job's VMs."""
    return RowsTable(
        "Machines",
        ("VM", "phase", "zone", "type", "slots", "r:$/hour"),
        [
            (
                vm["vm_id"],
                _phase(vm),
                vm["zone"],
                vm["instance_type"] + ("" if vm["spot"] else " (on demand)"),
                str(vm["slots"]),
                fmt.dollars(vm["usd_per_hour"]),
            )
            for vm in status["fleet"]
        ],
    )


def _phase(vm: dict[str, Any]) -> str:
    if vm["silent_since_s"] is not None:
        return "silent"
    phase = "spare" if vm["spare"] else vm["phase"]
    return f"{phase}{', hot' if vm['throttled'] else ''}"


def summary(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the tables of ``spottrain report``, after a line about its devices."""
    yield Text(f"computes on {report['computes_on']}")
    for one in history_tables(report):
        table = columns(*_headings(one.columns), title=one.title)
        for row in one.rows:
            table.add_row(*map(Text, row))
        yield table if one.rows else f"{one.title}: none"
    for slow in report["slow_vms"]:
        yield Text(f"{slow['reason']}: replaced by {slow['replaced_by']}")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in _totals(report):
        table.add_row(name, Text(text))
    yield table


def _totals(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "job", f"{report['name']}: {report['state']} after {_wall(report)}"
    yield "steps", f"{report['steps_done']} of {report['steps']}"
    loss = _arrow(report["loss_first"], report["loss_last"])
    yield "loss", loss + nonfinite_words(report)
    if report["heldout_loss_first"] is not None:
        first, last = report["heldout_loss_first"], report["heldout_loss"]
        yield "held-out loss", _arrow(first, last)
    yield (
        "speed",
        f"{fmt.number(report['examples_per_s'], 1)} examples/s with interruptions",
    )
    if compute := use_line(report):
        yield "compute", f"{compute}, while training"
    spent, on_demand = report["usd_spent"], report["usd_on_demand"]
    saved = "" if not on_demand else f" ({fmt.saved(1 - spent / on_demand)})"
    hours = fmt.gpu_hours(report, "; ")
    yield "cost", f"{fmt.dollars(spent)}, on demand {fmt.dollars(on_demand)}{saved}{hours}"
    cost = report["cost"]
    yield "per million examples", fmt.dollars(cost["usd_per_million_examples"])
    if (billed_s := cost["vm_seconds"]["billed"]) > 0:
        times = cost["vm_seconds"].items()
        shares = (f"{100 * s / billed_s:.0f} % {k}" for k, s in times if k != "billed")
        yield "rented time", f"{billed_s / HOUR_S:.2f} VM-hours: {', '.join(shares)}"
    if alerts := report["budget_alerts"]:
        words = (f"{a['share']:.0%} spent after {fmt.duration(a['at_s'])}" for a in alerts)
        yield "budget", ", ".join(words)
    lost, twice = report["minibatches_lost"], report["minibatches_recomputed"]
    yield "mini-batches", f"{lost} lost, {twice} recomputed"
    yield "slow VMs", f"{report['slow_vms_replaced']} replaced"
    if report["checkpoint_error"]:
        yield "checkpoints", f"the last save failed: {report['checkpoint_error']}"


def nonfinite_words(document: dict[str, Any]) -> str:
    """Return a mark beside the loss of a job with steps that were not finite."""
    if (found := document["nonfinite"]) is None:
        return ""
    steps = "step was" if found["steps"] == 1 else "steps were"
    return f" (!) {found['steps']} {steps} not finite, last {found['last']}"


def _wall(report: dict[str, Any]) -> str:
    ended = report["exit_code"] is not None and report["reason"]
    return fmt.duration(report["wall_s"]) + (f" ({report['reason']})" if ended else "")


def _arrow(first: float | None, last: float | None) -> str:
    return f"{fmt.number(first)} → {fmt.number(last)}"


def merged(candidates: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge candidates that differ only in the name of the schedule."""
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for plan in candidates:
        key = tuple(value for name, value in plan.items() if name != "schedule")
        if key in rows:
            schedules = f"{rows[key]['schedule']}/{plan['schedule']}"
            rows[key] = {**rows[key], "schedule": schedules}
        else:
            rows[key] = plan
    return list(rows.values())


def candidates_table(candidates: Iterable[dict[str, Any]], mark: str = "") -> Table:
    """Return a table of candidate plans from ``documents.candidate_view``.

    Args:
        mark: Before figures that rest on the profile: ``~`` if it is an estimate.
    """
    rows = list(candidates)
    # Columns of GPUs, which have a memory of their own beside their VM's.
    on_gpus = any(plan.get("host_stage_bytes") for plan in rows)
    sums = any(plan.get("nccl_s") is not None for plan in rows)
    table = columns(
        *("PLAN", "SCHEDULE", "r:MICRO", "r:UNUSED", "r:STEP", "r:EX/S", "r:$/MILLION"),
        *("r:MEMORY", *(("r:HOST", "STATE", "r:UPDATE") if on_gpus else ())),
        *(("ALL-REDUCE",) if sums else ()),
        "",
    )
    for plan in rows:
        most, least = ("", "") if plan["max_step_s"] is None else ("≤ ", "≥ ")
        there: tuple[str, ...] = ()
        if on_gpus:
            there = (
                _of(plan["host_stage_bytes"], plan["host_bytes"] or None),
                plan["state"],
                fmt.step_time(plan["update_s"]),
            )
        there += (sums_words(plan),) if sums else ()
        table.add_row(
            plan["shape"],
            execution_line(plan),
            str(plan["microbatch_size"]),
            str(plan["unused_slots"]),
            mark + fmt.predicted_time(plan["step_s"], plan["max_step_s"]),
            mark + most + fmt.number(plan["examples_per_s"], 1),
            mark + least + fmt.dollars(plan["usd_per_million_examples"]),
            _of(plan["stage_bytes"], plan["device_bytes"]),
            *there,
            Text(plan["why_not"] or "chosen"),
        )
    return table


def sums_words(plan: dict[str, Any]) -> str:
    """Return what sums gradients, the chosen library first, with both times."""
    times_s = {"nccl": plan.get("nccl_s"), "gloo": plan.get("gloo_s")}
    names = sorted(times_s, key=lambda name: name != plan.get("network"))
    known = (name for name in names if times_s[name] is not None)
    return ", ".join(f"{name} {fmt.step_time(times_s[name])}" for name in known)


def _of(needed_bytes: int | None, room_bytes: int | None) -> str:
    """Return memory as text, with what there is of it where both are known."""
    needed = fmt.size(needed_bytes)
    both = needed_bytes is not None and room_bytes is not None
    return f"{needed} of {fmt.size(room_bytes)}" if both else needed


def execution_line(plan: dict[str, Any]) -> str:
    """Return how a pipeline is run, such as ``1f1b recompute, 3 in flight``."""
    words = plan["schedule"]
    if plan["chunks"] > 1:
        words += f" of {plan['chunks']}"
    if plan["recompute"]:
        words += " recompute"
    if plan["segments"] > 1:
        words += f" in {plan['segments']} segments"
    if times := plan.get("tensor_times"):
        words += f", times of groups {times}"
    bound = plan["in_flight_bound"]
    return words if bound is None else f"{words}, {bound} in flight"


SHORT_TABLE = 6
"""Number of rows without ``--explain``."""


def preview_parts(preview: dict[str, Any], explain: bool) -> Iterator[RenderableType]:
    """Yield the parts of ``spottrain plan`` for people.

    Args:
        preview: See ``plan_inputs.preview`` and ``plan_inputs.preview_workload``.
        explain: Show all candidates, not only the best.
    """
    if "fleet" in preview:
        fleet = Counter(
            f"{vm['instance_type']} in {vm['zone']}{'' if vm['spot'] else ' on demand'} "
            f"at {fmt.dollars(vm['usd_per_hour'])}/hour"
            for vm in preview["fleet"]
        )
        machines = ", ".join(f"{count} {what}" for what, count in fleet.items())
    else:
        machines = f"{preview['slots']} {preview['device']}"
    yield f"fleet    {machines}"
    yield (
        f"model    {preview['parameters']:,} parameters in {counted(preview['sections'], 'section')}"
        f", mini-batches of {preview['minibatch_size']}, micro-batches of "
        f"{preview['microbatch_size']}"
    )
    candidates = merged(preview["candidates"])
    is_estimate = preview["profile_origin"] == "estimated"
    mark, few = ("~", 1) if is_estimate else ("", SHORT_TABLE)
    yield candidates_table(candidates if explain else candidates[:few], mark)
    if not explain and len(candidates) > few:
        yield f"         {len(candidates) - few} more with --explain"
    if preview["plan"] is None:
        yield f"plan     none: {preview['why_not']}"
        return
    words = f"plan     {preview['plan']}, {execution_line(candidates[0])}"
    if candidates[0]["host_stage_bytes"]:
        words += f", state on the {candidates[0]['state']}"
    if candidates[0]["shares_state"]:
        words += ", state shared within VMs"
    if summed := sums_words(candidates[0]):
        words += f", all-reduce by {summed}"
    if "train_s" in preview:
        budget = preview["usd_budget"]
        of = "" if budget is None else f" of {fmt.dollars(budget)}"
        longer = more = ""
        if preview["train_max_s"] is not None:
            longer = f" to {fmt.duration(preview['train_max_s'])}"
            more = f" to {fmt.dollars(preview['usd_max'])}"
        words += (
            f": without interruptions {mark}{fmt.duration(preview['train_s'])}{longer} and "
            f"{mark}{fmt.dollars(preview['usd'])}{more}{of} at {fmt.dollars(preview['usd_per_hour'])}/hour"
            f"{fmt.gpu_hours(preview, f', {mark}')}"
        )
    yield words
    if (loss := preview["vm_loss"]) is not None:
        counted_as = f"; counted as {loss['counted']:.0%} of its speed" if loss["counted"] else ""
        too = ", as a killed worker does of state on its GPU" if loss["by_worker"] else ""
        yield (
            f"lost VM  takes an only copy of a stage with it{too}: "
            f"{fmt.duration(loss['lost_s'])} of training on average, since the newest "
            f"checkpoint{counted_as}"
        )
    if (spread := preview["profile_spread"]) is not None:
        step_s, max_step_s = candidates[0]["step_s"], candidates[0]["max_step_s"]
        least = fmt.step_time(step_s * (1 - min(spread, 1.0)))
        most = fmt.step_time((max_step_s or step_s) * (1 + min(spread, 1.0)))
        yield (
            f"         a mini-batch takes {least} to {most}: the machine was busy when the model "
            f"was measured, and times varied by {spread:.0%}"
        )
    if compute := use_line(preview):
        yield f"compute  {mark}{compute}"
    for number, line in enumerate(preview.get("rests_on", ())):
        yield f"{'' if number else 'rests on':9}{line}"
    if changes := preview.get("changes"):
        yield _changes_table(changes)
    if (forecast := preview.get("forecast")) is not None:
        yield f"forecast {forecast['reason']}"
    if "stale_by_one" in preview:
        yield _stale_line(preview["stale_by_one"])


def _changes_table(changes: Iterable[dict[str, Any]]) -> Table:
    table = columns("WHAT WOULD CHANGE IT", "r:TIME", "r:COST")
    for row in changes:
        time, cost = fmt.duration(row["hours"] * HOUR_S), fmt.dollars(row["usd"])
        table.add_row(row["change"], f"~{time}", f"~{cost}")
    return table


def _stale_line(stale: dict[str, Any]) -> str:
    if stale["gain"] is None:
        return "2bw      this plan: semantics is stale_by_one"
    if not stale["shape"]:
        return "2bw      no plan with semantics: stale_by_one fits"
    return (
        f"2bw      {stale['shape']} would be {max(0.0, stale['gain']):.1%} faster with "
        f"semantics: stale_by_one, with {fmt.size(stale['held_twice_bytes'])} more on a device"
    )


def sections_table(facts: ModelFacts) -> Table:
    """Return a table of a model's sections, one per row."""
    table = columns("r:SECTION", "r:PARAMETERS", "r:OPTIMIZER", "r:ACTIVATION/EXAMPLE")
    for section in facts.sections:
        table.add_row(
            str(section.index),
            fmt.size(section.param_bytes),
            fmt.size(section.optimizer_bytes),
            fmt.size(section.activation_bytes_per_example),
        )
    return table
