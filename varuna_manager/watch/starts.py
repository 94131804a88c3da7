"""What the starts of VMs took: from the launch of each to its first mini-batch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from spottrain.cloud.port.provider import StartStep
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State

_AGENT, _READY, _FIRST = "agent runs", "workers are ready", "first mini-batch"
_PLACES = ("", "manager", "bucket")
MILESTONES = (_AGENT, _READY, _FIRST)
"""Since the launch, after the steps, in rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmStart:
    """The start of one VM; times in seconds since the epoch."""

    vm_id: str
    launched_at_s: float
    steps: tuple[StartStep, ...]
    started_at_s: float
    ready_at_s: float | None = None
    trained_at_s: float | None = None
    """When the first mini-batch that it took part in was committed."""


@dataclass(slots=True)
class VmStarts:
    """The starts of a job's VMs, gathered while its events are folded."""

    by_vm: dict[str, VmStart] = field(default_factory=dict)
    """In order."""
    _pending: list[str] = field(default_factory=list)
    """VMs that have not trained yet."""

    def note(self, before: State, event: e.Event, after: State) -> None:
        """Record one step of the fold."""
        if isinstance(event, e.AgentStarted):
            vm = after.fleet.vms.get(event.vm_id)
            if vm is not None and vm.vm_id not in self.by_vm:
                self.by_vm[vm.vm_id] = VmStart(
                    vm_id=vm.vm_id,
                    launched_at_s=vm.launched_at_s,
                    steps=event.steps,
                    started_at_s=after.now_s,
                )
                self._pending.append(vm.vm_id)
        elif self._pending:
            self._follow(before, after)

    def _follow(self, before: State, after: State) -> None:
        commits = after.history.progress.step > before.history.progress.step
        generation = after.training.generation if commits else None
        slots = generation.plan.slots if generation else ()
        trains = {slot.vm_id for slot in slots}
        for vm_id in tuple(self._pending):
            vm, known = after.fleet.vms.get(vm_id), self.by_vm[vm_id]
            if vm is not None and known.ready_at_s is None and vm.ready_at_s:
                self.by_vm[vm_id] = replace(known, ready_at_s=vm.ready_at_s)
            if vm_id in trains:
                self.by_vm[vm_id] = replace(self.by_vm[vm_id], trained_at_s=after.now_s)
            if vm is None or vm_id in trains:
                self._pending.remove(vm_id)


def start_view(start: VmStart) -> dict[str, Any]:
    """Return a start as plain data; times in seconds since the launch."""

    def since(at_s: float | None) -> float | None:
        return None if at_s is None else at_s - start.launched_at_s

    return {
        "vm_id": start.vm_id,
        "steps": steps_view(start.steps),
        "agent_s": since(start.started_at_s),
        "ready_s": since(start.ready_at_s),
        "first_step_s": since(start.trained_at_s),
    }


def steps_view(steps: Iterable[StartStep]) -> list[dict[str, Any]]:
    """Return the steps of a start as plain data."""
    return [asdict(step) for step in steps]


@dataclass(frozen=True, slots=True)
class StartRow:
    """One step, or milestone, of the first VM and of all later ones."""

    name: str
    first_s: float | None
    later_s: float | None
    """Median."""
    first_bytes: int = 0
    later_bytes: int = 0
    """Median."""
    later_source: str = ""
    """Where most later VMs had it from."""


def start_rows(starts: Sequence[Mapping[str, Any]]) -> list[StartRow]:
    """Return what starts took, step by step; see ``start_view``."""
    if not starts:
        return []
    first, later = starts[0], starts[1:]
    names = dict.fromkeys(step["name"] for one in starts for step in one["steps"])
    rows = [_step_row(name, first, later) for name in names]
    for name, key in zip(MILESTONES, ("agent_s", "ready_s", "first_step_s"), strict=True):
        known = [one[key] for one in later if one[key] is not None]
        median_s = statistics.median(known) if known else None
        rows.append(StartRow(name, first[key], median_s))
    return rows


def _step_row(name: str, first: Mapping[str, Any], later: Sequence[Mapping[str, Any]]) -> StartRow:
    steps = [step for one in later for step in one["steps"] if step["name"] == name]
    mine = next((step for step in first["steps"] if step["name"] == name), None)
    sources = [s["source"] if s["source"] in _PLACES else "another VM" for s in steps]
    if not steps:
        return StartRow(
            name,
            mine["seconds"] if mine else None,
            None,
            mine["num_bytes"] if mine else 0,
        )
    return StartRow(
        name=name,
        first_s=mine["seconds"] if mine else None,
        later_s=statistics.median(step["seconds"] for step in steps),
        first_bytes=mine["num_bytes"] if mine else 0,
        later_bytes=int(statistics.median(step["num_bytes"] for step in steps)),
        later_source=statistics.mode(sources),
    )
