"""The sentences and rows of a report, for every output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spottrain.units import HOUR_S, counted
from spottrain.varuna_manager.format import (
    NOTHING,
    dollars,
    duration,
    gpu_hours,
    number,
    predicted_time,
    saved,
    size,
    step_time,
)
from spottrain.varuna_manager.reporting.timeline import LANES
from spottrain.varuna_manager.reporting.utilisation import use_line
from spottrain.varuna_manager.watch import starts
from spottrain.wire.model import ModelFacts

Row = Sequence[str]


class RowsTable(NamedTuple):
    """A table of a report, for the terminal and for the page."""

    title: str
    columns: Sequence[str]
    """Those that begin with ``r:`` are of numbers."""
    rows: Sequence[Row]


TIME_KINDS = {
    "productive": "training that is part of the final result",
    "morph": "changing plans: stopping, handing state over, forming, saving",
    "boot": "from launch until ready; measuring; writing the first weights",
    "idle": "ready but not in a plan, being returned, or billed after its end",
    "lost": "computed, then discarded",
    "manager": "the manager's own VM",
}
"""Kinds of rented time, described for people."""


def time_kinds(cost: Mapping[str, Any]) -> dict[str, str]:
    """Return ``TIME_KINDS``, without the manager's VM if there is none.

    Args:
        cost: From ``costs.cost``.
    """
    seconds = cost["vm_seconds"]
    return {k: v for k, v in TIME_KINDS.items() if k != "manager" or seconds[k]}


_ENDS = {
    "succeeded": "succeeded after {wall}",
    "failed": "failed after {wall}: {reason}",
    "stopped": "was stopped after {wall}: {reason}",
    "budget": "ran out of money after {wall}: {reason}",
    "deadline": "ran out of time after {wall}: {reason}",
    "capacity": "got no machines and ended after {wall}: {reason}",
    "queued": "waits for VMs of its pool, {wall} after it was submitted: {reason}",
    "down": "was ended for good after {wall}: {reason}",
    "unmanaged": "has no manager; {wall} have passed so far: {reason}",
}


def summary(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a summary in a few sentences, the most important first."""
    words = _ENDS.get(report["state"], "is {state}, {wall} after it was submitted: {reason}")
    how = words.format(
        state=report["state"], wall=duration(report["wall_s"]), reason=report["reason"]
    )
    done, steps = report["steps_done"], report["steps"]
    far = f"all {steps:,}" if done >= steps else f"{done:,} of {steps:,}"
    batches = "mini-batch" if steps == 1 else "mini-batches"
    yield f"{report['name']} {how}. It trained {far} {batches}."
    yield _money_sentence(report)
    yield _trouble_sentence(report)


def _money_sentence(report: Mapping[str, Any]) -> str:
    cost = report["cost"]
    of = "" if cost["usd_budget"] is None else f" of a budget of {dollars(cost['usd_budget'])}"
    text = f"It cost {dollars(cost['usd_spent'])}{of}{gpu_hours(cost, ' and ')}"
    if cost["usd_per_million_examples"] is not None:
        text += f", {dollars(cost['usd_per_million_examples'])} per million examples"
    sentences = [text + "."]
    savings = cost["savings"]
    if savings["saved_on_demand_share"] is not None:
        usd = dollars(savings["usd_on_demand"])
        sentences.append(
            f"The same VM time on demand would have cost {usd}: "
            f"{saved(savings['saved_on_demand_share'])}."
        )
    if (fixed := savings["fixed"]) is not None:
        sentences.append(
            f"In hindsight, the cheapest single offer ({fixed_name(fixed)}), rented all "
            f"along, would have cost {dollars(fixed['usd'])}: "
            f"{saved(fixed['saved_share'])}."
        )
    return " ".join(sentences)


def fixed_name(fixed: Mapping[str, Any]) -> str:
    """Return an offer as text."""
    market = "spot" if fixed["spot"] else "on demand"
    return f"{fixed['instance_type']} in {fixed['zone']}, {market}"


def _trouble_sentence(report: Mapping[str, Any]) -> str:
    counts = {
        "preempted with notice": report["preemptions_noticed"],
        "preempted without notice": report["preemptions_unnoticed"],
        "stopped answering": report["silent_losses"],
        "returned with a failed GPU": report["sick_gpus"],
    }
    vms = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    rented = counted(report["vms_launched"], "VM was", "VMs were")
    sentences = [f"{rented} rented; {vms or 'none was preempted'}."]
    if died := report["worker_deaths"]:
        sentences.append(f"{counted(died, 'worker')} died.")
    if hung := report["hangs"]:
        sentences.append(f"{counted(hung, 'hang was', 'hangs were')} broken off.")
    if slow := report["slow_vms_replaced"]:
        were = counted(slow, "slow machine was", "slow machines were")
        sentences.append(f"{were} replaced.")
    lost = counted(report["minibatches_lost"], "mini-batch was", "mini-batches were")
    again = counted(report["minibatches_recomputed"], "was", "were")
    plans = counted(len(report["plans"]), "plan")
    sentences.append(f"{plans} ran; {lost} lost, {again} recomputed.")
    useful = report["cost"]["useful_share"]
    if useful is not None:
        sentences.append(f"{useful:.0%} of the rented time was productive.")
    return " ".join(sentences)


def comparison_row(report: Mapping[str, Any]) -> Row:
    """Return a job's row in a table of several."""
    return (
        report["name"],
        report["state"],
        f"{report['steps_done']:,} of {report['steps']:,}",
        number(report["loss_last"]),
        number(report["heldout_loss"]),
        dollars(report["usd_spent"]),
        dollars(report["cost"]["usd_per_million_examples"]),
        duration(report["wall_s"]),
        number(report["examples_per_s"], 1),
    )


def tiles(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of the key figures."""
    cost = report["cost"]
    useful = cost["useful_share"]
    budget = cost["usd_budget"]
    yield (
        "spent",
        dollars(cost["usd_spent"]),
        ("no budget" if budget is None else f"of {dollars(budget)}") + gpu_hours(cost, "; "),
    )
    yield (
        "per million examples",
        dollars(cost["usd_per_million_examples"]),
        f"{cost['examples_done']:,} examples done",
    )
    yield (
        "speed",
        number(report["examples_per_s"], 1),
        "examples/s, including interruptions",
    )
    if report["mfu"] is not None:
        yield "utilisation", f"{report['mfu']:.0%}", use_line(report)
    yield (
        "productive",
        NOTHING if useful is None else f"{useful:.0%}",
        f"of {cost['vm_seconds']['billed'] / HOUR_S:,.1f} VM-hours billed",
    )
    hits = len(report["interruptions"])
    lost_s = sum(hit["cost_s"] or 0.0 for hit in report["interruptions"])
    yield "interruptions", str(hits), f"cost {duration(lost_s)} of training"
    first, last = report["loss_first"], report["loss_last"]
    yield "loss", number(last), f"was {number(first)}"


def money_rows(report: Mapping[str, Any]) -> list[Row]:
    """Return money by kind, the total, and the cost of alternatives."""
    cost = report["cost"]
    kinds, savings = cost["usd_by_kind"], cost["savings"]
    rows: list[Row] = [
        ("compute", _usd(kinds["compute"]), "VMs once they could train"),
        ("boot", _usd(kinds["boot"]), "VMs until they could train"),
        ("attached", _usd(kinds["disks_and_addresses"]), "VMs' disks and public addresses"),
        ("storage", _usd(kinds["storage"]), "checkpoints"),
        ("egress", _usd(kinds["egress"]), "data between zones"),
        ("spent", _usd(cost["usd_spent"]), "total"),
        ("on demand", _usd(savings["usd_on_demand"]), _versus(savings["saved_on_demand_share"], "the same VM time on demand")),
    ]  # fmt: skip
    if (fixed := savings["fixed"]) is None:
        none = "no offer was available all along, or nothing was rented"
        return [*rows, ("cheapest single offer", NOTHING, none)]
    how = f"{fixed_name(fixed)}, as many VMs all along, at the prices seen"
    how = _versus(fixed["saved_share"], how)
    return [*rows, ("cheapest single offer", _usd(fixed["usd"]), how)]


def _versus(share: float | None, what: str) -> str:
    return what if share is None else f"{what}: {saved(share)}"


def history_tables(report: Mapping[str, Any]) -> Iterator[RowsTable]:
    """Yield what ran, what interrupted it, how VMs started and where the job moved."""
    yield RowsTable(
        "Plans, depth x width (x tensor parallelism)",
        ("r:after", "plan", "r:from step", "r:for", "r:step time", "r:predicted", "why"),
        [
            (
                duration(plan["started_at_s"] - report["submitted_at_s"]),
                plan["shape"],
                f"{plan['from_step']:,}",
                duration(plan["ran_s"]),
                step_time(plan["measured_step_s"]),
                predicted_time(plan["predicted_step_s"], plan["predicted_max_s"]),
                plan["reason"],
            )
            for plan in report["plans"]
        ],
    )
    yield RowsTable(
        "Interruptions",
        ("r:after", "what", "VM", "r:cost", "r:recomputed", "why"),
        [
            (
                duration(hit["at_s"]),
                LANES[hit["kind"]],
                hit["vm_id"],
                duration(hit["cost_s"]),
                str(hit["minibatches_recomputed"]),
                hit["reason"],
            )
            for hit in report["interruptions"]
        ],
    )
    if report["starts"]:
        yield _starts(report)
    if report["moves"]:
        yield RowsTable(
            "Moves for money",
            ("r:after", "from", "to", "r:took", "r:saves", "why"),
            [
                (
                    duration(move["at_s"]),
                    move["from"],
                    move["to"],
                    duration(move["took_s"]),
                    dollars(move["saves_usd"]),
                    move["given_up"] or move["why"],
                )
                for move in report["moves"]
            ],
        )


def _starts(report: Mapping[str, Any]) -> RowsTable:
    return RowsTable(
        "Starts of VMs, from their launch; of later ones the median",
        ("step", "r:first VM", "r:received", "r:later VMs", "r:received", "from"),
        [
            (
                row.name,
                step_time(row.first_s),
                size(row.first_bytes) if row.first_bytes else "",
                step_time(row.later_s),
                size(row.later_bytes) if row.later_bytes else "",
                row.later_source,
            )
            for row in starts.start_rows(report["starts"])
        ],
    )


def zones_table(report: Mapping[str, Any]) -> RowsTable:
    """Return the bill by zone."""
    return RowsTable(
        "By zone",
        ("zone", "r:VMs", "r:VM-hours", "r:useful", "r:USD"),
        [
            (
                row["zone"],
                str(row["vms"]),
                f"{row['billed'] / HOUR_S:,.2f}",
                f"{row['productive'] / row['billed']:.0%}" if row["billed"] else NOTHING,
                _usd(row["usd"]),
            )
            for row in report["cost"]["by_zone"]
        ],
    )


def events_table(report: Mapping[str, Any]) -> RowsTable:
    """Return the whole timeline."""
    return RowsTable(
        "All events",
        ("r:after", "what", "VM", "why"),
        [
            (
                duration(entry["at_s"]),
                LANES[entry["kind"]],
                entry["vm_id"] or "",
                entry["text"],
            )
            for entry in report["timeline"]
        ],
    )


def _usd(usd: float) -> str:
    return f"${usd:,.4f}"


def model_lines(facts: ModelFacts, microbatch_size: int | None) -> Iterator[str]:
    """Yield what a person should know of a model: rates, state that it keeps, others.

    Args:
        facts: Of the model.
        microbatch_size: That the user has set.
    """
    if (rates := facts.learning_rates) is not None:
        first, highest, last = (
            f"{rates.base * factor:.3g}"
            for factor in (rates.first_factor, rates.highest_factor, rates.last_factor)
        )
        yield f"learning rate: {first} at first, at most {highest}, {last} at last"
    if facts.uncut:
        held = sum(one.param_bytes + one.optimizer_bytes for one in facts.sections)
        yield (
            "warning: the model is one section, so every worker trains a replica of all of it, "
            f"with {size(held)} of parameters and optimizer (a cut in the middle would halve "
            f"that): {facts.uncut}"
        )
    if facts.normalises_batches and microbatch_size is None:
        yield (
            f"warning: {facts.normalises_batches} normalises by the micro-batch, as BatchNorm "
            "does, and so results depend on its size, which the first plan chooses for the whole "
            "job: set microbatch_size to have the same results on other machines"
        )
    if facts.carried:
        yield (
            f"warning: losses or gradients depend on {facts.carried}, which calls change and "
            "every machine has otherwise: results depend on the plan; compute it from "
            "spottrain.step(), draw random numbers from torch, random or numpy.random"
        )
    if facts.changing:
        yield (
            f"note: each call changes {facts.changing}, which every machine has for itself; "
            "the model is too large to try here whether losses or gradients depend on it: "
            "they must not"
        )
    if facts.helper_bytes:
        yield (
            f"loss uses another model: every worker holds its {size(facts.helper_bytes)} "
            "of parameters besides, on the CPU unless your code moves them, and plans do "
            "not count them"
        )
