"""The transition for one event: the state it leads to, the commands it calls for."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from spottrain.eventlog.changed import replace
from spottrain.varuna_manager.core.model.commands import Command, Outcome, Send
from spottrain.varuna_manager.core.model.parts import Part
from spottrain.varuna_manager.core.model.recent import PhaseChange, RecentEvent
from spottrain.varuna_manager.core.model.records import (
    Generation,
    Intent,
    OrderRecord,
    RankPhase,
    VmRecord,
)
from spottrain.varuna_manager.core.model.state import JobPhase, State, with_parts
from spottrain.wire import messages
from spottrain.wire.plan import Slot


class Transition:
    """The mutable working state of one ``core.step``; states themselves are immutable.

    Args:
        state: The state before the event.
        at_s: When the daemon learned of the event, in seconds since the epoch. If it is
            before ``state.now_s``, time stands still.
        recent: The newest events, this one last.
    """

    def __init__(self, state: State, at_s: float, recent: tuple[RecentEvent, ...] = ()) -> None:
        self.state = replace(state, now_s=max(state.now_s, at_s))
        self._recent, self._news = recent, ""
        self._changes: list[PhaseChange] = []
        self.commands: list[Command] = []
        self.wake_at_s: float | None = None
        self.decides = False
        """Whether a commit calls for decisions, which it seldom does."""
        self.is_settling = False
        """Whether the event has been folded in: what changes now is a decision."""

    @property
    def now_s(self) -> float:
        """Seconds since the epoch, as the events report it."""
        return self.state.now_s

    @property
    def generation(self) -> Generation:
        """The generation that runs now, where there must be one."""
        assert self.state.training.generation is not None
        return self.state.training.generation

    def put(self, *parts: Part) -> None:
        """Put in parts of the state that have changed."""
        self.state = with_parts(self.state, *parts)

    def emit(self, command: Command) -> None:
        """Ask the daemon to perform ``command``."""
        self.commands.append(command)

    def send(self, vm_ids: Iterable[str], command: messages.Command) -> None:
        """Send ``command`` to every VM of ``vm_ids`` that still exists, once."""
        for vm_id in dict.fromkeys(vm_ids):
            if vm_id in self.state.fleet.vms:
                self.emit(Send(vm_id=vm_id, command=command))

    def log(self, news: str) -> None:
        """Record what happened, in one line for people; the newest one stays."""
        self._news = news

    def waited_until(self, at_s: float) -> bool:
        """Wait until ``at_s``: true once it has come; before, the core is woken then."""
        if self.now_s >= at_s:
            return True
        self.wake(at_s)
        return False

    def wake(self, at_s: float | None) -> None:
        """Have the core decide again at ``at_s`` at the latest, if that is a time."""
        if at_s is not None:
            self.wake_at_s = min(self.wake_at_s or at_s, at_s)

    def note_phase(self, before: StrEnum | None, after: StrEnum | None) -> None:
        """Record a change of phase; ``machines`` lists all that can happen."""
        if before is not after:
            self._changes.append(PhaseChange(before, after, self.is_settling))

    def result(self) -> State:
        """Return the state that was led to, with what was recorded."""
        news, recent = self._news or self.state.last_message, self._recent
        if recent:
            last = replace(recent[-1], news=self._news, changes=tuple(self._changes))
            recent = (*recent[:-1], last)
        return replace(self.state, last_message=news, recent=recent)

    def put_vm(self, vm: VmRecord) -> None:
        """Add or replace a VM."""
        before = self.state.fleet.vms.get(vm.vm_id)
        self.put(replace(self.state.fleet, vms={**self.state.fleet.vms, vm.vm_id: vm}))
        self.note_phase(before.phase if before else None, vm.phase)

    def put_intent(self, intent: Intent) -> None:
        """Add or replace an intent."""
        intents = {**self.state.launches.intents, intent.intent: intent}
        self.put(replace(self.state.launches, intents=intents))

    def put_order(self, order: OrderRecord) -> None:
        """Add or replace what came of an order of the pool's."""
        orders = {**self.state.fleet.orders, order.order.name: order}
        self.put(replace(self.state.fleet, orders=orders))

    def note_fleet_change(self) -> None:
        """Note that usable slots have come or gone."""
        self.put(replace(self.state.fleet, fleet_changed_at_s=self.now_s))

    def put_generation(self, generation: Generation) -> None:
        """Open a generation, or replace the one that runs now."""
        before = self.state.training.generation
        self.put(replace(self.state.training, generation=generation))
        self.note_phase(before.phase if before else None, generation.phase)

    def put_rank(self, slot: Slot, phase: RankPhase) -> Generation:
        """Change the phase of a rank; return its generation."""
        before, ranks = self.generation.ranks[slot], self.generation.ranks
        generation = replace(self.generation, ranks={**ranks, slot: phase})
        self.put_generation(generation)
        self.note_phase(before, phase)
        return generation

    def fail(
        self,
        reason: str,
        *,
        exit_code: int = 1,
        traceback: str = "",
        checkpoint: bool = True,
    ) -> None:
        """Begin to end the job as failed; as ``end``."""
        failed = Outcome(kind="failed", exit_code=exit_code, reason=reason, traceback=traceback)
        self.end(failed, checkpoint=checkpoint)

    def end(self, outcome: Outcome, *, checkpoint: bool = True) -> None:
        """Begin to end the job, unless it is ending already.

        Success and failure overrule a weaker reason to end, but not each other.

        Args:
            outcome: Why it ends.
            checkpoint: Save first what the VMs hold, if no checkpoint has it: whatever
                ends a job is no reason to throw work away.
        """
        state = self.state
        final = ("succeeded", "failed")
        weaker = state.outcome is not None and state.outcome.kind not in final
        if weaker and outcome.kind in final:
            wanted = state.ending_checkpoint and checkpoint
            self.state = replace(state, outcome=outcome, ending_checkpoint=wanted)
        elif state.phase is JobPhase.ACTIVE:
            self.state = replace(
                state,
                phase=JobPhase.ENDING,
                outcome=outcome,
                ending_since_s=self.now_s,
                ending_checkpoint=checkpoint and _has_unsaved(state),
            )
            self.note_phase(JobPhase.ACTIVE, JobPhase.ENDING)
        else:
            return
        self.log(f"ending: {outcome.reason}")


def _has_unsaved(state: State) -> bool:
    """Return whether the VMs hold committed mini-batches that no checkpoint has."""
    saved = state.newest_checkpoint.step if state.newest_checkpoint else 0
    return state.history.progress.step > saved
