"""The agents' sessions: which VMs may call, their outboxes, and which are silent.

In memory only: what must survive a restart is in the core's state. A heartbeat takes the
same time however large the fleet is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, KeysView, Mapping
from dataclasses import dataclass, field

from spottrain.errors import SpottrainError
from spottrain.varuna_manager.jobs.folder import GpuUses
from spottrain.varuna_manager.jobs.identity import token_sha256
from spottrain.wire.messages import (
    Command,
    Heartbeat,
    HeartbeatAnswer,
    Measured,
    ReportAnswer,
    ReportBatch,
)
from spottrain.wire.model import GpuUse

_RECONNECT_S, _RECONNECT_S_PER_VM = 5.0, 0.0026
"""Twice what 10,000 agents took on two cores, 13.3 s (docs/operating.md): most of it
is a TLS handshake for each."""


def reconnect_s(num_vms: int) -> float:
    """Return how long agents that outlived a manager may take to reach the next one."""
    return _RECONNECT_S + num_vms * _RECONNECT_S_PER_VM


class OutOfStepError(SpottrainError):
    """An agent's numbers do not follow those received before: the agent must exit."""


@dataclass(slots=True)
class _Session:
    token_sha256: str
    silent: bool = False
    sequence: int = -1
    delivered: int | None = None
    """Commands that the agent has received; unknown until it first calls this process."""
    commands: deque[Command] = field(default_factory=deque)
    """The next commands, in order."""
    waiting: asyncio.Future[None] | None = None
    """The long poll that is open."""
    gpus: tuple[GpuUse, ...] = ()
    """What its GPUs did when it last called."""


class AgentSessions:
    """The sessions of all agents of one job.

    Args:
        clock: Monotonic seconds.
        on_heard: Called with the id of a VM that was silent and has called again.
    """

    def __init__(self, clock: Callable[[], float], on_heard: Callable[[str], None]) -> None:
        self._clock = clock
        self._on_heard = on_heard
        self._sessions: dict[str, _Session] = {}
        self._vm_of: dict[str, str] = {}
        self._heard_at: dict[str, float] = {}
        """When VMs that are watched and not silent were heard, or their grace ends."""

    def admit(self, vm_id: str, token_hash: str) -> None:
        """Let the holder of a token (given by its sha256) speak for a VM."""
        session = self._sessions.get(vm_id)
        if session is None or session.token_sha256 != token_hash:
            self.revoke(vm_id)
            self._sessions[vm_id] = _Session(token_hash)
            self._vm_of[token_hash] = vm_id

    def revoke(self, vm_id: str) -> None:
        """Fence a VM: its requests are refused from now on."""
        self._heard_at.pop(vm_id, None)
        if session := self._sessions.pop(vm_id, None):
            del self._vm_of[session.token_sha256]
            _wake(session)

    def renew(self, vm_id: str) -> None:
        """Begin a VM's session anew: a new agent of it registers, and counts from 0."""
        if session := self._sessions.get(vm_id):
            self.revoke(vm_id)
            self.admit(vm_id, session.token_sha256)

    @property
    def admitted(self) -> KeysView[str]:
        """The VMs whose agents may call."""
        return self._sessions.keys()

    def vm_of(self, token: str) -> str | None:
        """Return the VM that the holder of ``token`` may speak for."""
        return self._vm_of.get(token_sha256(token))

    def watch(self, vm_id: str, grace_s: float = 0.0) -> None:
        """Expect heartbeats of a VM from now on (or from ``grace_s`` later)."""
        if vm_id in self._sessions:
            self._heard_at[vm_id] = self._clock() + grace_s

    def silent(self, suspect_s: float) -> list[str]:
        """Return the VMs not heard for more than ``suspect_s``; each is returned once."""
        since_s = self._clock() - suspect_s
        found = [vm_id for vm_id, at_s in self._heard_at.items() if at_s < since_s]
        for vm_id in found:
            del self._heard_at[vm_id]
            self._sessions[vm_id].silent = True
        return found

    def forgive(self) -> None:
        """Restart all silence timers: this process did not listen."""
        self.excuse(self._heard_at)

    def excuse(self, vm_ids: Collection[str]) -> None:
        """Restart the silence timers of some VMs: they cannot call. No grace gets shorter."""
        now_s = self._clock()
        for vm_id in vm_ids:
            if vm_id in self._heard_at:
                self._heard_at[vm_id] = max(self._heard_at[vm_id], now_s)

    def send(self, vm_id: str, command: Command) -> None:
        """Put a command into a VM's outbox; a fenced VM gets nothing."""
        if session := self._sessions.get(vm_id):
            session.commands.append(command)
            _wake(session)

    async def heartbeat(self, beat: Heartbeat, wait_s: float) -> HeartbeatAnswer:
        """Answer a heartbeat: at once if commands wait, else after ``wait_s``.

        Raises:
            OutOfStepError: a newer one has been heard, or the VM was fenced.
        """
        session = self._sessions[beat.vm_id]
        if beat.sequence < session.sequence:
            raise OutOfStepError(
                f"heartbeat is stale: got sequence {beat.sequence} after "
                f"{session.sequence}; only one agent may speak for a VM"
            )
        session.sequence, session.gpus = beat.sequence, beat.gpus
        self._hear(beat.vm_id, session)
        _drop_delivered(session, beat.received)
        if not session.commands:
            await _wait(session, wait_s)
        if self._sessions.get(beat.vm_id) is not session:
            raise OutOfStepError(f"VM {beat.vm_id} has been given up")
        return HeartbeatAnswer(commands=tuple(session.commands))

    def gpus(self) -> GpuUses:
        """Return what the GPUs of VMs that are heard did last, by VM."""
        return {
            vm_id: session.gpus
            for vm_id, session in self._sessions.items()
            if session.gpus and not session.silent
        }

    def release(self) -> None:
        """Answer every open long poll now, so that the server can close."""
        for session in self._sessions.values():
            _wake(session)

    def _hear(self, vm_id: str, session: _Session) -> None:
        self._heard_at[vm_id] = self._clock()
        if session.silent:
            session.silent = False
            self._on_heard(vm_id)


class MeasurementStreams:
    """Which measurements of which VM have come, and which of them are written.

    In memory only: an agent keeps what is not written, and sends it again to a manager
    that has begun anew. Nothing here ever fences a VM.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        """Number of the measurement that is expected next, by VM."""
        self._written: dict[str, int] = {}

    def take(self, batch: ReportBatch) -> tuple[Measured, ...] | None:
        """Return the measurements of a batch that are new.

        None if some before it are missing: the answer asks for them again. Its facts must
        wait, too, as the last of them may end the VM before it has sent the others.
        """
        expected = self._next.setdefault(batch.vm_id, batch.oldest_measurement)
        if batch.first_measurement > expected:
            return None
        new = batch.measurements[expected - batch.first_measurement :]
        self._next[batch.vm_id] = expected + len(new)
        return new

    def forget(self, vm_id: str) -> None:
        """Expect a new agent of a VM, whose numbers begin anew."""
        self._next.pop(vm_id, None)
        self._written.pop(vm_id, None)

    def wrote(self, until: Mapping[str, int]) -> None:
        """Note that measurements are written, those below a number of each VM."""
        self._written.update(until)

    def answer(self, batch: ReportBatch, received: int) -> ReportAnswer:
        """Return the answer to a batch.

        Args:
            batch: After ``take``.
            received: Facts of its VM that are journalled.
        """
        expected = self._next[batch.vm_id]
        return ReportAnswer(
            received=received,
            measured=self._written.get(batch.vm_id, batch.oldest_measurement),
            next_measurement=expected,
        )

    def next_of(self, vm_id: str) -> int:
        """Return the number of the measurement that is expected next."""
        return self._next[vm_id]


def _drop_delivered(session: _Session, received: int) -> None:
    """Drop the commands that the agent has; after a restart, take over its count."""
    if session.delivered is None:
        session.delivered = received
    while session.commands and session.delivered < received:
        session.commands.popleft()
        session.delivered += 1


def _wake(session: _Session) -> None:
    if session.waiting is not None and not session.waiting.done():
        session.waiting.set_result(None)


async def _wait(session: _Session, wait_s: float) -> None:
    """Wait until there is a command, or ``wait_s`` have passed."""
    _wake(session)  # An older poll's connection is dead, or its agent would not call again.
    waiting = asyncio.get_running_loop().create_future()
    session.waiting = waiting
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await waiting
