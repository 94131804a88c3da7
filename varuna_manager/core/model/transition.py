"""One event at work: the state it leads to, and the commands it calls for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from spottrain import wire
from spottrain.varuna_manager.core.model.commands import Command, Outcome, Send
from spottrain.varuna_manager.core.model.records import Generation, VmRecord
from spottrain.varuna_manager.core.model.state import JobPhase, State


class Transition:
    """A scratch pad that lives for one ``core.step``; states themselves are frozen.

    Args:
        state: The state before the event.
        at_s: When the shell learned of the event, in seconds since the epoch. A clock
            that was set back makes time stand still.
    """

    def __init__(self, state: State, at_s: float) -> None:
        self.state = replace(state, now_s=max(state.now_s, at_s))
        self.commands: list[Command] = []
        self.wake_at_s: float | None = None
        self.decides = False
        """Whether a commit, which seldom does, calls for decisions."""

    @property
    def now_s(self) -> float:
        """Seconds since the epoch, as the events tell it."""
        return self.state.now_s

    def emit(self, command: Command) -> None:
        """Wish for ``command``."""
        self.commands.append(command)

    def send(self, vm_ids: Iterable[str], command: wire.Command) -> None:
        """Wish to send ``command`` to every VM of ``vm_ids`` that still exists, once."""
        for vm_id in dict.fromkeys(vm_ids):
            if vm_id in self.state.vms:
                self.emit(Send(vm_id=vm_id, command=command))

    def log(self, news: str) -> None:
        """Note what happened, in one line for people."""
        self.state = replace(self.state, last_news=news)

    def is_due(self, at_s: float) -> bool:
        """Whether ``at_s`` has come; if not, the core will be woken then."""
        if self.now_s >= at_s:
            return True
        self.wake(at_s)
        return False

    def wake(self, at_s: float | None) -> None:
        """Have the core decide again at ``at_s`` at the latest, if that is a time."""
        if at_s is not None:
            self.wake_at_s = min(self.wake_at_s or at_s, at_s)

    def put_vm(self, vm: VmRecord) -> None:
        """Add or replace a VM."""
        self.state = replace(self.state, vms={**self.state.vms, vm.vm_id: vm})

    def put_generation(self, generation: Generation) -> None:
        """Replace the generation that runs now."""
        self.state = replace(self.state, generation=generation)

    def end(self, outcome: Outcome, *, checkpoint: bool = False) -> None:
        """Begin to end the job, unless it ends already.

        Success and failure overrule a weaker reason to end, but not each other.
        """
        state = self.state
        final = ("succeeded", "failed")
        weaker = state.outcome is not None and state.outcome.kind not in final
        if weaker and outcome.kind in final:
            self.state = replace(state, outcome=outcome, ending_checkpoint=False)
        elif state.phase is JobPhase.ACTIVE:
            self.state = replace(
                state,
                phase=JobPhase.ENDING,
                outcome=outcome,
                ending_since_s=self.now_s,
                ending_checkpoint=checkpoint and _has_unsaved(state),
            )
        else:
            return
        self.log(f"ending: {outcome.reason}")


def _has_unsaved(state: State) -> bool:
    """Whether the VMs hold committed mini-batches that no checkpoint has."""
    saved = state.newest_checkpoint.step if state.newest_checkpoint else 0
    return state.progress.step > saved
