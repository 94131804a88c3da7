"""What a report says in words and numbers, whoever shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spottrain.varuna_manager.format import (
    NOTHING,
    dollars,
    duration,
    number,
    step_time,
)
from spottrain.varuna_manager.reporting.timeline import LANES

Row = Sequence[str]
TIME_KINDS = {
    "productive": "mini-batches that are in the final history",
    "morph": "between training and training: getting out, handing over, forming, saving",
    "boot": "launch until ready; measuring, and writing the first weights",
    "idle": "ready but in no plan, going back, or billed beyond its life",
    "lost": "computed and thrown away",
    "manager": "the VM that the manager runs on",
}
"""What the time of rented VMs is split into."""


def time_kinds(cost: Mapping[str, Any]) -> dict[str, str]:
    """Return ``TIME_KINDS`` without a manager's VM where there is none.

    Args:
        cost: As ``costs.cost`` gives it.
    """
    seconds = cost["vm_seconds"]
    return {k: v for k, v in TIME_KINDS.items() if k != "manager" or seconds[k]}


_ENDS = {
    "succeeded": "succeeded after {wall}",
    "failed": "failed after {wall}: {reason}",
    "stopped": "was stopped after {wall}: {reason}",
    "budget": "ran out of money after {wall}: {reason}",
    "deadline": "ran out of time after {wall}: {reason}",
    "capacity": "found no machines and ended after {wall}: {reason}",
    "down": "was ended for good after {wall}: {reason}",
    "unmanaged": "has no manager; it has taken {wall} so far: {reason}",
}


def summary(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what happened in a few plain sentences, the most important first."""
    words = _ENDS.get(
        report["state"], "is {state}, {wall} after it was submitted: {reason}"
    )
    how = words.format(
        state=report["state"], wall=duration(report["wall_s"]), reason=report["reason"]
    )
    done, steps = report["steps_done"], report["steps"]
    far = f"all {steps:,}" if done >= steps else f"{done:,} of {steps:,}"
    yield f"{report['name']} {how}. It has done {far} mini-batches."
    yield _money_sentence(report)
    yield _trouble_sentence(report)


def _money_sentence(report: Mapping[str, Any]) -> str:
    cost = report["cost"]
    of = (
        ""
        if cost["usd_budget"] is None
        else f" of a budget of {dollars(cost['usd_budget'])}"
    )
    text = f"It cost {dollars(cost['usd_spent'])}{of}"
    if cost["usd_per_million_examples"] is not None:
        text += f", {dollars(cost['usd_per_million_examples'])} per million examples"
    told = [text + "."]
    savings = cost["savings"]
    if savings["saved_on_demand_share"] is not None:
        usd = dollars(savings["usd_on_demand"])
        told.append(
            f"The same VM time on demand would have cost {usd}: "
            f"{_less(savings['saved_on_demand_share'])}."
        )
    if (fixed := savings["fixed"]) is not None:
        told.append(
            f"In hindsight the cheapest single offer ({fixed_name(fixed)}), held all "
            f"the time, would have cost {dollars(fixed['usd'])}: "
            f"{_less(fixed['saved_share'])}."
        )
    return " ".join(told)


def fixed_name(fixed: Mapping[str, Any]) -> str:
    """Return an offer in words."""
    market = "spot" if fixed["spot"] else "on demand"
    return f"{fixed['instance_type']} in {fixed['zone']}, {market}"


def _less(share: float | None) -> str:
    if share is None:
        return NOTHING
    if abs(share) < 0.005:
        return "as much"
    return f"{share:.0%} saved" if share > 0 else f"{-share:.0%} more was paid"


def _trouble_sentence(report: Mapping[str, Any]) -> str:
    counts = {
        "taken with notice": report["preemptions_noticed"],
        "killed without": report["preemptions_unnoticed"],
        "fell silent": report["silent_losses"],
    }
    vms = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    told = [
        f"{report['vms_launched']} VMs were rented; {vms or 'none was taken away'}."
    ]
    if report["worker_deaths"]:
        told.append(f"{report['worker_deaths']} workers died.")
    if report["slow_vms_replaced"]:
        told.append(f"{report['slow_vms_replaced']} slow machines were replaced.")
    told.append(
        f"{len(report['plans'])} plans ran; {report['minibatches_lost']} mini-batches "
        f"are lost, {report['minibatches_recomputed']} were computed twice."
    )
    useful = report["cost"]["useful_share"]
    if useful is not None:
        told.append(f"{useful:.0%} of the rented time was productive.")
    return " ".join(told)


def tiles(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of the figures that people ask for first."""
    cost = report["cost"]
    useful = cost["useful_share"]
    budget = cost["usd_budget"]
    yield (
        "spent",
        dollars(cost["usd_spent"]),
        "no budget" if budget is None else f"of {dollars(budget)}",
    )
    yield (
        "per million examples",
        dollars(cost["usd_per_million_examples"]),
        f"{cost['examples_done']:,} examples done",
    )
    yield (
        "speed",
        number(report["examples_per_s"], 1),
        "examples/s, interruptions included",
    )
    yield (
        "productive",
        NOTHING if useful is None else f"{useful:.0%}",
        f"of {cost['vm_seconds']['billed'] / 3600:,.1f} VM-hours billed",
    )
    hits = len(report["interruptions"])
    lost_s = sum(hit["cost_s"] or 0.0 for hit in report["interruptions"])
    yield "interruptions", str(hits), f"cost {duration(lost_s)} of training"
    first, last = report["loss_first"], report["loss_last"]
    yield "loss", number(last), f"was {number(first)}"


def money_rows(report: Mapping[str, Any]) -> list[Row]:
    """Return money by kind, the sum, and what it would have been otherwise."""
    cost = report["cost"]
    kinds, savings = cost["usd_by_kind"], cost["savings"]
    rows: list[Row] = [
        ("compute", _usd(kinds["compute"]), "VMs once they could train"),
        ("boot", _usd(kinds["boot"]), "VMs until they could train"),
        ("storage", _usd(kinds["storage"]), "checkpoints"),
        ("egress", _usd(kinds["egress"]), "data between zones"),
        ("spent", _usd(cost["usd_spent"]), "all of it"),
        ("on demand", _usd(savings["usd_on_demand"]), _versus(savings["saved_on_demand_share"], "the same VM time on demand where it ran")),
    ]  # fmt: skip
    if (fixed := savings["fixed"]) is None:
        none = "no offer was there at every look, or nothing was rented"
        return [*rows, ("cheapest fixed choice", NOTHING, none)]
    how = f"{fixed_name(fixed)}, as much of it all the time, at the prices seen"
    how = _versus(fixed["saved_share"], how)
    return [*rows, ("cheapest fixed choice", _usd(fixed["usd"]), how)]


def _versus(share: float | None, what: str) -> str:
    return what if share is None else f"{what}: {_less(share)}"


def plan_rows(report: Mapping[str, Any]) -> list[Row]:
    """Return the plans that ran."""
    submitted_s = report["submitted_at_s"]
    return [
        (
            duration(plan["started_at_s"] - submitted_s),
            f"{plan['pipeline_depth']}x{plan['data_parallel_width']}",
            f"{plan['from_step']:,}",
            duration(plan["ran_s"]),
            step_time(plan["measured_step_s"]),
            step_time(plan["predicted_step_s"]),
            plan["reason"],
        )
        for plan in report["plans"]
    ]


def interruption_rows(report: Mapping[str, Any]) -> list[Row]:
    """Return what the cloud and chance did to the job, and what it cost."""
    return [
        (
            duration(hit["at_s"]),
            LANES[hit["kind"]],
            hit["vm_id"],
            duration(hit["cost_s"]),
            str(hit["minibatches_recomputed"]),
            hit["reason"],
        )
        for hit in report["interruptions"]
    ]


def zone_rows(report: Mapping[str, Any]) -> list[Row]:
    """Return the bill by zone."""
    return [
        (
            row["zone"],
            str(row["vms"]),
            f"{row['billed'] / 3600:,.2f}",
            f"{row['productive'] / row['billed']:.0%}" if row["billed"] else NOTHING,
            _usd(row["usd"]),
        )
        for row in report["cost"]["by_zone"]
    ]


def events_rows(report: Mapping[str, Any]) -> list[Row]:
    """Return everything that happened, by time."""
    return [
        (
            duration(entry["at_s"]),
            LANES[entry["kind"]],
            entry["vm_id"] or "",
            entry["text"],
        )
        for entry in report["timeline"]
    ]


def _usd(usd: float) -> str:
    return f"${usd:,.4f}"
