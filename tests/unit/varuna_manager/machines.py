"""The life cycles of the job, its VMs, its generations and their ranks, as tables.

An entry is a change of phase that can happen: when it does, in a line for people, and
the events or reports that bring it about. ``DECISION`` stands for the core itself, which
looks at the state after every event. An event that no entry names for the present phase
leaves the phase as it is. ``None`` stands for what does not exist, before or after.

Tests compare every change of phase that they see with these tables, and
docs/state-machines.md too. The core itself does not ask them: a table that lacks an entry
must not end a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import (
    GenerationPhase,
    RankPhase,
    VmPhase,
)
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.wire import messages

DECISION = "decision"

Causes = tuple[type | str, ...]
"""Classes of events and reports, or ``DECISION``."""


class Entry(NamedTuple):
    """A change of phase."""

    when: str
    causes: Causes


Machine = Mapping[tuple[StrEnum | None, StrEnum | None], Entry]
"""By the phases before and after."""

_ENDED: Causes = (e.VmsListed, e.VmLost)
"""They show that the cloud took a VM."""
_TAKEN: Causes = (*_ENDED, e.ProviderAnswered)
"""The same of one whose agent has registered: it may be silent."""
_UNUSABLE: Causes = (messages.VmUnfit, messages.VmFailed, messages.GpuSick)
"""They have a VM returned that cannot train."""
_UNWANTED: Causes = (e.JobMoved, *_UNUSABLE, DECISION)
"""They have a VM returned."""
_RETURNED: Causes = (e.ProviderAnswered, e.CommandFailed, *_UNWANTED)
"""They have a VM returned whose agent has registered: it may be silent."""
_LOST: Causes = tuple(dict.fromkeys((*_TAKEN, *_RETURNED)))
_LEFT: Causes = (messages.GenerationBroken, messages.WorkerDied)
"""A rank has left its generation."""

JOB: Machine = {
    (JobPhase.NEW, JobPhase.ACTIVE): Entry("submitted", (e.JobSubmitted,)),
    (JobPhase.ACTIVE, JobPhase.ENDING): Entry(
        "done, failed, stopped, or at a limit",
        (
            e.StopRequested,
            e.FolderSeen,
            e.SetupFailed,
            e.LaunchRefused,
            e.CommandFailed,
            messages.UserCodeFailed,
            e.ProgressMade,
            messages.CheckpointFailed,
            messages.Calibrated,
            messages.VmUnfit,
            *_LEFT,
            DECISION,
        ),
    ),
    (JobPhase.ENDING, JobPhase.ENDED): Entry("nothing is rented any more", (DECISION,)),
    (JobPhase.ENDING, JobPhase.ACTIVE): Entry("resumed", (e.ManagerStarted,)),
    (JobPhase.ENDED, JobPhase.ACTIVE): Entry(
        "resumed, unless all steps are done", (e.ManagerStarted,)
    ),
}

_COMING = (VmPhase.STARTING, VmPhase.BOOTING, VmPhase.REGISTERED)
_ADOPTED: Causes = (e.VmsLaunched, e.VmsListed)
_RUNNING: Causes = (*_ADOPTED, e.OrderAnswered)
"""They show a new VM that runs."""

VM: Machine = {
    (None, VmPhase.STARTING): Entry("rented", _ADOPTED),
    (None, VmPhase.BOOTING): Entry("rented or taken over, and running", _RUNNING),
    (VmPhase.STARTING, VmPhase.BOOTING): Entry("running", (e.VmsListed,)),
    (VmPhase.STARTING, VmPhase.REGISTERED): Entry("agent registers", (e.AgentRegistered,)),
    (VmPhase.BOOTING, VmPhase.REGISTERED): Entry("agent registers", (e.AgentRegistered,)),
    **{
        (phase, VmPhase.READY): Entry("slots can train", (messages.SupervisorReady,))
        for phase in _COMING
    },
    **{
        (phase, VmPhase.BOOTING): Entry(
            "its agent is replaced by one of the manager's version", (DECISION,)
        )
        for phase in (VmPhase.REGISTERED, VmPhase.READY)
    },
    (VmPhase.STARTING, VmPhase.RETURNING): Entry(
        "unwanted", (*_ADOPTED, e.AgentRefused, *_UNWANTED)
    ),
    (VmPhase.BOOTING, VmPhase.RETURNING): Entry(
        "unwanted", (*_RUNNING, e.AgentRefused, *_UNWANTED)
    ),
    (VmPhase.REGISTERED, VmPhase.RETURNING): Entry(
        "unwanted, or rounds differently", (*_RETURNED, messages.SupervisorReady)
    ),
    (VmPhase.READY, VmPhase.RETURNING): Entry("unwanted, or silent", _RETURNED),
    (VmPhase.STARTING, None): Entry("lost", _ENDED),
    (VmPhase.BOOTING, None): Entry("lost", _ENDED),
    (VmPhase.REGISTERED, None): Entry("lost", _TAKEN),
    (VmPhase.READY, None): Entry("lost", _TAKEN),
    (VmPhase.RETURNING, None): Entry("terminated", (e.VmsReturned, e.VmsListed, e.VmLost)),
}

_BREAKS = Entry("a rank is lost, or a timeout expires", (*_LOST, *_LEFT))
_BREAKS_IN_TRAINING = Entry(
    "a rank is lost, hangs or is out of memory, or a timeout expires",
    (*_BREAKS.causes, messages.OutOfMemory, messages.WorkersInspected),
)
_OVER = Entry("the job is over", (DECISION,))

GENERATION: Machine = {
    (None, GenerationPhase.OPENING): Entry("a plan is chosen", (DECISION,)),
    (GenerationPhase.OPENING, GenerationPhase.STARTING): Entry(
        "its store is open", (messages.StoreOpened,)
    ),
    (GenerationPhase.STARTING, GenerationPhase.RUNNING): Entry(
        "all ranks have their sections", (DECISION,)
    ),
    (GenerationPhase.RUNNING, GenerationPhase.STOPPING): Entry(
        "a VM leaves, a better plan pays, or the job ends", (DECISION,)
    ),
    (GenerationPhase.OPENING, GenerationPhase.BREAKING): _BREAKS,
    (GenerationPhase.STARTING, GenerationPhase.BREAKING): Entry(
        "a rank is lost, stopped or out of memory, a timeout expires, or its checkpoint "
        "cannot be read",
        (
            *_BREAKS_IN_TRAINING.causes,
            messages.CheckpointDamaged,
            messages.CheckpointUnreachable,
        ),
    ),
    (GenerationPhase.RUNNING, GenerationPhase.BREAKING): _BREAKS_IN_TRAINING,
    (GenerationPhase.STOPPING, GenerationPhase.BREAKING): _BREAKS_IN_TRAINING,
    (GenerationPhase.OPENING, None): _OVER,
    (GenerationPhase.STARTING, None): _OVER,
    (GenerationPhase.RUNNING, None): Entry("all ranks stopped, or the job is over", (DECISION,)),
    (GenerationPhase.STOPPING, None): Entry("all ranks stopped, or the job is over", (DECISION,)),
    (GenerationPhase.BREAKING, None): Entry("all ranks are out", _BREAKS.causes),
}

RANK: Machine = {
    (RankPhase.INVITED, RankPhase.STARTED): Entry(
        "has its sections", (messages.GenerationStarted,)
    ),
    **{
        (phase, RankPhase.STOPPED): Entry("stopped with the others", (messages.GenerationStopped,))
        for phase in (RankPhase.INVITED, RankPhase.STARTED)
    },
    **{
        (phase, RankPhase.OUT): Entry("left or died", _LEFT)
        for phase in (RankPhase.INVITED, RankPhase.STARTED)
    },
    **{
        (phase, RankPhase.GONE): Entry("its VM is lost", _LOST)
        for phase in RankPhase
        if phase is not RankPhase.GONE
    },
}

MACHINES: Mapping[type[StrEnum], Machine] = {
    JobPhase: JOB,
    VmPhase: VM,
    GenerationPhase: GENERATION,
    RankPhase: RANK,
}


def entry_of(before: StrEnum | None, after: StrEnum | None) -> Entry:
    """Return the entry of a change of phase.

    Raises:
        KeyError: the tables know of none.
    """
    machine = next(MACHINES[type(phase)] for phase in (before, after) if phase)
    return machine[before, after]
