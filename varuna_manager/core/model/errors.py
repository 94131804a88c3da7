"""The error that reports a bug of the core, with what is needed to find its cause."""

from __future__ import annotations

from collections import Counter

from spottrain.varuna_manager.core.model.recent import RecentEvent
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.format import utc


class InternalError(Exception):
    """A bug of the manager: which event and which state of the job led to it.

    Tracebacks show the last events as a note below the message.

    Args:
        state: The state as far as the event has changed it.
        error: What went wrong; raise ``from`` it.
    """

    def __init__(self, state: State, error: Exception) -> None:
        vms = Counter(vm.phase for vm in state.fleet.vms.values())
        counts = ", ".join(f"{count} {phase}" for phase, count in vms.items())
        run = state.training.generation
        training = f"generation {run.number} is {run.phase}" if run else "no generation"
        where = f" at {_name(state.recent[-1])}" if state.recent else ""
        super().__init__(
            f"{type(error).__name__}: {error}{where}; the job is {state.phase}, "
            f"{training}, VMs: {counts or 'none'}"
        )
        lines = ["The last events:", *map(_line, state.recent)]
        self.add_note("\n".join(lines))


def _name(event: RecentEvent) -> str:
    of = f" of {event.vm_id}" if event.vm_id else ""
    return f"event {event.seq}, {event.kind}{of}"


def _line(event: RecentEvent) -> str:
    """Return an event and its consequences, in one line."""
    again = f" (and {event.repeats} more before it)" if event.repeats else ""
    times = Counter(map(str, event.changes)).items()
    changes = [f"{change} ({n} times)" if n > 1 else change for change, n in times]
    came = "".join(f"; {text}" for text in (*changes, event.news) if text)
    return f"  {utc(event.at_s)}  {_name(event)}{again}{came}"
