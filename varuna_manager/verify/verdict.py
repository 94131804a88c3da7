"""What a verification finds, and the document and page that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spottrain.cloud.port.provider import Vm
from spottrain.manifest import hash_file, list_checkpoints, own_uids, read_manifest
from spottrain.pricing.billing.terms import EXACT, TERMS
from spottrain.storage.store import Store
from spottrain.units import HOUR_S, counted
from spottrain.varuna_manager.format import dollars

SCHEMA_VERSION = 1
EXACT_USD = 1e-6
"""A ledger of the local cloud is right to the micro-dollar."""
CLOUD_SHARE = 0.05
"""Of a bill by list prices and a cloud's own times, that a ledger may differ: the market
price of a spot VM moves while it runs."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing that was checked."""

    name: str
    passed: bool
    found: str
    """One line."""


def weights(store: Store, uid: str = "") -> dict[str, str]:
    """Return the hash of each file of the newest checkpoint, as its bytes are now.

    Args:
        store: Where the job's checkpoints are.

    Raises:
        CheckpointError, StorageError: It cannot be read.
    """
    newest, *_ = list_checkpoints(store, own_uids(store, uid))
    manifest = read_manifest(store, newest.name)
    found = {}
    for record in manifest.files:
        with store.reading(f"{newest.name}/{record.file}") as path:
            found[record.file] = hash_file(path)
    return found


def check_weights(calm: Mapping[str, str], struck: Mapping[str, str]) -> Comparison:
    """Compare the weights and optimizer states of two jobs, bit for bit."""
    other = sorted(
        name for name in calm.keys() | struck.keys() if calm.get(name) != struck.get(name)
    )
    found = (
        f"{', '.join(other[:3])} of {counted(len(calm), 'file')} differ"
        if other
        else f"{counted(len(calm), 'file')} with weights and optimizer state, the same bytes"
    )
    return Comparison("weights", not other and bool(calm), found)


def check_losses(calm: Sequence[float | None], struck: Sequence[float | None]) -> Comparison:
    """Compare the losses of all mini-batches of two jobs."""
    pairs = enumerate(zip(calm, struck, strict=False), 1)
    other = [step for step, (one, two) in pairs if one != two]
    short = len(calm) != len(struck)
    found = (
        f"step {other[0]} is the first of {len(other)} that differ"
        if other
        else f"{len(calm):,} and {len(struck):,} mini-batches"
        if short
        else f"the same in {counted(len(calm), 'mini-batch', 'mini-batches')}"
    )
    return Comparison("losses", not other and not short and bool(calm), found)


def billed_usd(vms: Sequence[Vm]) -> float:
    """Return what VMs cost by their cloud's own times and the price at their launch."""
    total = 0.0
    for vm in vms:
        assert vm.ended_at_s is not None, "they have ended"
        terms = TERMS.get(vm.offer.cloud, EXACT)
        hours = terms.billed_s(vm.ended_at_s - vm.launched_at_s) / HOUR_S
        total += vm.offer.usd_per_hour * hours
    return total


def check_bill(vms: Sequence[Vm], ledger_usd: float) -> Comparison:
    """Compare a job's ledger with what its cloud says of its VMs."""
    if alive := [vm.vm_id for vm in vms if vm.ended_at_s is None]:
        return Comparison("bill", False, f"still running: {', '.join(alive)}")
    bill_usd = billed_usd(vms)
    exact = all(vm.offer.cloud not in TERMS for vm in vms)
    bound_usd = EXACT_USD if exact else CLOUD_SHARE * bill_usd
    return Comparison(
        "bill",
        bool(vms) and abs(ledger_usd - bill_usd) <= bound_usd,
        f"{counted(len(vms), 'VM')}: ledger ${ledger_usd:,.6f}, the cloud's times and "
        f"prices ${bill_usd:,.6f}",
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """Examples a second, each the median over mini-batches."""

    plain: float
    """By the loop that one would write by hand."""
    fast: float
    """By a job on one VM."""
    exact: float
    """The same with ``reduction: exact``."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification has found."""

    version: str
    """Of spottrain."""
    at: str
    """When it ended: UTC, ISO 8601."""
    where: str
    """Where it trained."""
    machine: Mapping[str, str]
    """What this machine is."""
    steps: int
    strikes: int
    """VMs that were taken away."""
    wall_s: float
    usd: float
    """Of all jobs."""
    checks: Sequence[Comparison]
    speed: Speed | None = None
    jobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Status of each job."""

    @property
    def passed(self) -> bool:
        """True if all that was checked is right."""
        return all(check.passed for check in self.checks)


def document(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain data."""
    speed = verdict.speed
    return {
        "schema_version": SCHEMA_VERSION,
        "passed": verdict.passed,
        "spottrain": verdict.version,
        "at": verdict.at,
        "where": verdict.where,
        "machine": dict(verdict.machine),
        "steps": verdict.steps,
        "strikes": verdict.strikes,
        "wall_s": verdict.wall_s,
        "usd_spent": verdict.usd,
        "checks": [
            {"name": one.name, "passed": one.passed, "found": one.found} for one in verdict.checks
        ],
        "examples_per_s": speed
        and {"plain": speed.plain, "fast": speed.fast, "exact": speed.exact},
        "jobs": {name: dict(status) for name, status in verdict.jobs.items()},
    }


def page(verdict: Verdict) -> str:
    """Return a verdict as Markdown, short enough for an issue."""
    result = "passed" if verdict.passed else "**FAILED**"
    rows = [("result", result), ("spottrain", verdict.version), ("where", verdict.where)]
    rows += verdict.machine.items()
    rows += [
        ("trained", f"{verdict.steps:,} mini-batches, {counted(verdict.strikes, 'VM')} taken away"),
        *((one.name, f"{'' if one.passed else '**WRONG** '}{one.found}") for one in verdict.checks),
    ]
    if (speed := verdict.speed) is not None:
        told = (
            f"plain loop {speed.plain:.1f}; one VM {speed.fast:.1f} "
            f"({speed.fast / speed.plain:.2f} of it), exact {speed.exact:.1f} "
            f"({speed.exact / speed.plain:.2f})"
        )
        rows.append(("examples a second", told))
    rows += [
        ("took", f"{verdict.wall_s / 60:.1f} min, {dollars(verdict.usd)}"),
        ("ended", verdict.at),
    ]
    lines = [f"| {name} | {str(text).replace('|', '/')} |" for name, text in rows]
    return "\n".join(["| spottrain verify | |", "|---|---|", *lines, ""])
