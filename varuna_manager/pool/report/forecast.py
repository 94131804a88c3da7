"""What would come of a job that is not submitted yet: ``spottrain plan --pool``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spottrain.varuna_manager.format import duration, number, utc
from spottrain.varuna_manager.pool.core.model import JobRequest

SCHEMA_VERSION = 1


def plan_document(
    request: JobRequest,
    planned: Mapping[str, Any],
    status: Mapping[str, Any],
    now_s: float,
) -> dict[str, Any]:
    """Return when a job would start, with what, and what others would lose.

    Args:
        planned: The pool's answer.
        status: Of the pool, from ``document.status``.
        now_s: Seconds since the epoch.
    """
    kinds = planned["kinds"]
    starts_s: float | None = now_s
    waits_for = None
    if not any(planned["target"]):
        ends = [
            (job["finish_s"], job["name"])
            for job in status["jobs"]
            if job["vms"] and job["finish_s"] is not None
        ]
        starts_s, waits_for = min(ends, default=(None, None))
    rate = planned["examples_per_s"] or None
    return {
        "schema_version": SCHEMA_VERSION,
        "name": request.name,
        "pool": status["name"],
        "starts_s": starts_s,
        "waits_for": waits_for,
        "vms": _vms(kinds, planned["target"]),
        "examples_per_s": rate,
        "train_s": None if rate is None else request.examples / rate,
        "others": [
            {
                "name": name,
                "vms_before": _vms(kinds, one["before"]),
                "vms_after": _vms(kinds, one["after"]),
                "examples_per_s_before": one["examples_per_s_before"],
                "examples_per_s_after": one["examples_per_s_after"],
            }
            for name, one in planned["others"].items()
        ],
    }


def _vms(kinds: list[str], numbers: list[int]) -> dict[str, int]:
    return {kind: n for kind, n in zip(kinds, numbers, strict=True) if n}


def plan_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the same for people.

    Args:
        document: From ``plan_document``.
    """
    name, rate = document["name"], document["examples_per_s"]
    if rate is not None:
        yield (
            f"{name} starts at once with {_named(document['vms'])}: {number(rate, 1)} "
            f"examples/s, {duration(document['train_s'])} if nothing changes"
        )
    elif document["starts_s"] is not None:
        yield f"{name} starts when {document['waits_for']} ends: {utc(document['starts_s'])}"
    else:
        yield f"{name} waits; it is not known for how long"
    for other in document["others"]:
        before, after = other["examples_per_s_before"], other["examples_per_s_after"]
        if before == after:
            yield f"{other['name']} keeps {_named(other['vms_before'])}"
        else:
            yield (
                f"{other['name']} goes from {_named(other['vms_before'])} to "
                f"{_named(other['vms_after'])}: {number(before, 1)} to {number(after, 1)} "
                "examples/s"
            )


def _named(vms: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in vms.items()) or "no VM"
