"""Collects from journals how long VMs of this machine's jobs ran and how they ended.

The journals are the source; the price database gets what hazards are estimated from.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from spottrain.errors import SpottrainError
from spottrain.eventlog.folder import home
from spottrain.pricing.prices.history import INTERRUPTED, History, VmLife
from spottrain.pricing.prices.place import place_of
from spottrain.varuna_manager.core.model.records import VmRecord
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.folder import JobDir, all_jobs
from spottrain.varuna_manager.jobs.journal import Journal

PRICES = "market.sqlite"
"""The database of prices and interruptions, in the state directory."""


def open_history() -> History:
    """Open this machine's database of prices and interruptions."""
    return History(home() / PRICES)


def ingest_journals(history: History) -> tuple[str, ...]:
    """Update the database from the journals; return warnings, a line each."""
    warnings = []
    for job in all_jobs():
        scope = f"journal|{job.journal}"
        written_s = _written_s(job)
        if history.asked_s(scope) == written_s:
            continue
        try:
            with closing(Journal(job.journal, read_only=True)) as journal:
                history.record_vms(vm_lives(journal))
        except SpottrainError as error:
            warnings.append(f"job {job.name}: its VMs are not counted: {error}")
            continue
        history.mark_asked([scope], written_s)
    return tuple(warnings)


def vm_lives(journal: Journal) -> list[VmLife]:
    """Return the lifetimes of all VMs that a job ever had."""
    book, state = VmHistory(), State()
    for _, step in journal.steps():
        book.note(step.before, step.event.at_s, step.after)
        state = step.after
    return book.until_now(state)


class VmHistory:
    """Tracks the lifetimes of a job's VMs while its events are folded.

    Args:
        state: The state to start from.
    """

    def __init__(self, state: State | None = None) -> None:
        self._known: dict[str, VmLife] = {}
        self._ended: list[str] = []
        if state is not None:
            for vm in state.fleet.vms.values():
                self._known[vm.vm_id] = _begun(state.job.uid, vm)

    def note(self, before: State, at_s: float, state: State) -> None:
        """Record what an event at ``at_s`` has changed."""
        if state.history.interruptions is not before.history.interruptions:
            for hit in state.history.interruptions:
                life = self._known.get(hit.vm_id)
                if life is None:
                    continue
                if hit.cancelled_at_s == state.now_s:
                    self._known[hit.vm_id] = replace(life, ended="")
                elif hit.at_s == state.now_s and hit.interruption in INTERRUPTED:
                    self._known[hit.vm_id] = replace(life, ended=hit.interruption)
        if state.fleet.vms is not before.fleet.vms:
            for vm_id in before.fleet.vms.keys() - state.fleet.vms.keys():
                life = self._known[vm_id]
                ended = life.ended or "returned"
                self._known[vm_id] = replace(life, until_s=at_s, ended=ended)
                self._ended.append(vm_id)
            for vm_id in state.fleet.vms.keys() - before.fleet.vms.keys():
                self._known[vm_id] = _begun(state.job.uid, state.fleet.vms[vm_id])

    def take_ended(self) -> list[VmLife]:
        """Return the VMs that have ended since the last call, and forget them."""
        ended, self._ended = self._ended, []
        return [self._known.pop(vm_id) for vm_id in ended]

    def until_now(self, state: State) -> list[VmLife]:
        """Return all VMs that are not forgotten; running ones end at the present."""
        return [
            replace(life, until_s=state.now_s) if vm_id in state.fleet.vms else life
            for vm_id, life in self._known.items()
        ]


def _begun(job: str, vm: VmRecord) -> VmLife:
    return VmLife(
        job=job,
        vm_id=vm.vm_id,
        place=place_of(vm.offer),
        spot=vm.offer.spot,
        from_s=vm.launched_at_s,
        until_s=vm.launched_at_s,
    )


def _written_s(job: JobDir) -> float:
    """Return when the journal was last written to."""
    files = (job.journal, Path(f"{job.journal}-wal"))
    return max(file.stat().st_mtime for file in files if file.exists())
