"""What a command adds to the journal of a job that no manager runs."""

from __future__ import annotations

from spottrain.varuna_manager.core.model.events import Event
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.core.step import step
from spottrain.varuna_manager.jobs.journal import Journal, Step


def record(journal: Journal, *events: Event) -> State:
    """Decide on events and journal them, all or none; return the state that they lead to.

    What is to be done because of them is left to the next manager, which compares the state
    with the clouds when it starts.

    Args:
        journal: Open for writing; the caller holds the job's lock.
        events: In order.

    Raises:
        JournalError: The disk refuses, or the file is damaged.
    """
    state, steps = journal.replay(), list[Step]()
    for event in events:
        after, _ = step(state, event)
        steps.append(Step(state, event, after))
        state = after
    journal.append(*steps)
    return state
