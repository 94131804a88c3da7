"""The manager's event loop: real time, one journal, one server, one provider.

Whatever happens becomes an event in the queue of ``eventlog.loop``. Measurements go through the same queue, so that each keeps its place among the facts of its
agent, but they are no events. The watches look at them and make events where decisions
depend on it. They are written in batches, and acknowledged once they are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, assert_never

from spottrain.cloud.port.clock import Clock
from spottrain.cloud.port.provider import CloudProvider
from spottrain.eventlog.journal import JournalError, JournalWriteError
from spottrain.eventlog.loop import Loop
from spottrain.storage.store import DeniedError, StorageError
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.daemon.effects import EffectRunner
from spottrain.varuna_manager.daemon.folder_watch import FolderSight, FolderWatch
from spottrain.varuna_manager.daemon.metrics import JobMetrics
from spottrain.varuna_manager.daemon.requests import Flush, Measured, Requests
from spottrain.varuna_manager.daemon.server import ControlChannel
from spottrain.varuna_manager.daemon.sessions import (
    AgentSessions,
    MeasurementStreams,
    reconnect_s,
)
from spottrain.varuna_manager.daemon.tracking import Trackers
from spottrain.varuna_manager.daemon.vm_logs import VmLogs
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.identity import Identity, token_sha256
from spottrain.varuna_manager.jobs.journal import Journal, Step
from spottrain.varuna_manager.jobs.measurements import Measurements, Sample
from spottrain.varuna_manager.jobs.replication import JournalReplication, backfill
from spottrain.varuna_manager.jobs.samples import Sampler, samples_of
from spottrain.varuna_manager.jobs.vm_history import VmHistory
from spottrain.varuna_manager.reporting.history import replay
from spottrain.varuna_manager.watch.watches import Watches
from spottrain.version import software_version
from spottrain.wire import messages

logger = logging.getLogger(__name__)

C = TypeVar("C", c.LaunchVms, c.TerminateVms, c.ReserveVm, c.AcquireVm, c.ReleaseJob)

CLOCK_POLL_S = 5.0
"""Between two readings of the wall clock."""
BACKFILL_PAUSE_S = 0.05
"""Between two parts of the past that are filled in: the journal is written meanwhile."""
BACKFILL_RETRY_S = 60.0
"""Between two attempts to fill in the past."""
MEASURED_S = 1.0
"""How long measurements may wait to be written together, unless an event is."""
_CHECKS_PER_SUSPICION = 5


class ManagerLoop(Loop[State, e.Event, c.Command]):
    """One job's manager in real time.

    Args:
        journal: Open for writing; begins with ``JobSubmitted``.
        measurements: Open for writing.
        provider: The cloud to rent from.
        identity: The manager's certificates and tokens.
        url: Where agents reach this manager.
        workdir: The user's code, packed.
        copy: Copies the journal to the checkpoint store, if given.
        trackers: Write what is measured to files and elsewhere, if given.
    """

    def __init__(
        self,
        journal: Journal,
        measurements: Measurements,
        provider: CloudProvider,
        identity: Identity,
        url: str,
        workdir: Path,
        copy: JournalReplication | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        state, self.past = replay(journal)
        super().__init__(journal, replace(state, recent=journal.recent()))
        self._copy, self._trackers = copy, trackers
        self._measurements = measurements
        self._sampler = Sampler()
        self._watches = Watches()
        self._streams = MeasurementStreams()
        self._samples: list[Sample] = []
        """Not written yet."""
        self._unwritten: dict[str, int] = {}
        """Up to which measurement of each VM they go."""
        self._flush: asyncio.TimerHandle | None = None
        self._is_flushing = False
        """Whether what was measured is to be written now."""
        self._clock = Clock(self.state.now_s)
        self._lives = VmHistory(self.state)
        self._identity = identity
        self.sessions = AgentSessions(time.monotonic, self._on_heard)
        self._job = JobDir(workdir.parent)
        self._logs = VmLogs(self._job)
        self._effects = EffectRunner(self, provider, self.sessions, identity, url)
        self._metrics = JobMetrics(lambda: self.state, self.now_s, self.sessions.gpus)
        self.requests = Requests(
            self,
            self._put,
            self._effects,
            self.sessions,
            self._streams,
            self._metrics,
            self._logs,
            self._job,
        )
        self.channel = ControlChannel(
            self.requests,
            self.sessions,
            self.state.job.spec,
            workdir,
            identity.admin_token(),
            identity.metrics_token(),
        )
        self._is_unjournalled = False
        """Whether the job is being ended, as the journal cannot be written any more."""
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> c.Outcome:
        """Manage the job to its end; return how it ended."""
        self._readmit()
        version, pid = software_version(), os.getpid()
        self.feed(e.ManagerStarted(at_s=self.now_s(), software_version=version, pid=pid))
        self._effects.list_checkpoints()
        for work in (
            self._effects.watch_store(),
            self._effects.list_profiles(),
            self._poll_clouds(),
            self._watch_silence(),
            self._watch_machine(),
        ):
            self._start(work)
        if self._copy is not None:
            self._start(self._copy.run())
            self._start(self._backfill(self._copy))
        if self._trackers is not None:
            self._trackers.on_failed_call = self._call_failed
            if self.state.history.progress.highest_step:
                self._trackers.wake()
        outcome: c.Outcome = await self.take_events()
        return outcome

    @property
    def has_ended(self) -> bool:
        """True if the job is over and nothing is rented any more."""
        return self.state.phase is JobPhase.ENDED

    def _call_failed(self, reason: str) -> None:
        if not self.has_ended:
            failed = e.CommandFailed(
                at_s=self.now_s(), command="callback", vm_ids=(), reason=reason
            )
            self.feed(failed)

    async def _close(self) -> None:
        for handle in (self._timer, self._flush):
            if handle is not None:
                handle.cancel()
        await super()._close()
        self._effects.close()
        self.sessions.release()

    def now_s(self) -> float:
        """Seconds since the epoch, by the manager's clock."""
        return self._clock.now_s()

    # --- events in ------------------------------------------------------------------------

    def feed(self, event: e.Event) -> asyncio.Future[Sequence[c.Command]]:
        """See ``Loop``.

        Raises:
            FencedError: It shows VMs of a manager that has taken the job over.
        """
        if isinstance(event, e.VmsListed) and self._copy is not None:
            self._copy.check_intents(vm.intent for vm in event.vms)
        return super().feed(event)

    def _events_of(self, item: e.Event | Measured | Flush) -> Iterator[e.Event]:
        match item:
            case Flush():
                self._is_flushing = True
            case Measured():
                yield from self._measure(item)
            case e.VmsListed() | e.VmsReturned():
                yield from self._watches.pending(self._ahead, item.at_s)
                yield self._with_last_words(item)
            case _:
                # A decision is made on the newest progress.
                yield from self._watches.pending(self._ahead, item.at_s)
                yield item

    def _with_last_words(self, event: e.VmsListed | e.VmsReturned) -> e.Event:
        """Return an event about VMs with what those that never trained have logged."""
        if isinstance(event, e.VmsReturned):
            gone = set(event.vm_ids)
        else:
            alive = {vm.vm_id for vm in event.vms if vm.state.is_alive}
            gone = self._ahead.fleet.vms.keys() - alive
        words = {}
        for vm_id in gone & self._ahead.fleet.vms.keys():
            vm = self._ahead.fleet.vms[vm_id]
            if isinstance(event, e.VmsListed) and event.cloud not in ("", vm.offer.cloud):
                continue
            if not vm.has_trained and (line := self._logs.last_line(vm)):
                words[vm_id] = line
        return replace(event, last_words=words) if words else event

    def _measure(self, measured: Measured) -> Iterator[e.Event]:
        """Show measurements to the watches, and have them written."""
        at_s, vm_id = measured.at_s, measured.vm_id
        for report in measured.reports:
            state = self._ahead
            self._samples += self._sampler.measured(report, at_s, state)
            if isinstance(report, messages.MinibatchCommitted):
                yield from self._watches.observe(state, vm_id, report, at_s)
        self._unwritten[vm_id] = measured.until

    def _note(self, step: Step) -> None:
        before, event, after, _ = step
        self.past.note(before, event, after)
        self._lives.note(before, event.at_s, after)
        ended = after.history.generations[-1:]
        if ended != before.history.generations[-1:] and ended[0].broke:
            # Who completed a checkpoint may have gone before it could say so.
            self._effects.list_checkpoints()
        if after.last_message != before.last_message:
            logger.info("%s", after.last_message, extra=_log_fields(event, after))
        self._samples += samples_of(event)

    def _needs_writing(self, steps: Sequence[Step]) -> bool:
        return bool(steps) or (self._is_flushing and bool(self._unwritten))

    def _append(self, steps: Sequence[Step]) -> None:
        with self._metrics.journal_write.time():
            # First what cannot be asked for again once the events are there.
            if self._samples:
                self._measurements.write(self._samples)
            super()._append(steps)

    async def _write(self, steps: Sequence[Step]) -> None:
        """Write what was decided and measured.

        If that cannot be the job is ended with what is in memory: without a journal nobody
        would know what is rented.
        """
        if not self._is_unjournalled:
            try:
                await super()._write(steps)
            except JournalError as error:
                logger.error("%s; the job is ended", error)
                self._is_unjournalled = True
                self.feed(e.FolderSeen(at_s=self.now_s(), trouble=str(error), is_gone=True))
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self._copy is not None:
            self._copy.wake()
        if self._trackers is not None and self._samples:
            self._trackers.wake()
        self._streams.wrote(self._unwritten)
        self._samples, self._unwritten = [], {}

    def _taken(self, steps: Sequence[Step]) -> None:
        self._is_flushing = False
        if self._unwritten and self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(
                MEASURED_S, lambda: self._put(Flush())
            )
        if not steps:
            return
        if ended := self._lives.take_ended():
            self._start(self._effects.market.ended(ended))
        for vm_id in self.sessions.admitted - self.state.fleet.vms.keys():
            self.sessions.revoke(vm_id)

    def _for_readers(self) -> str:
        return self.past.snapshot()

    async def _backfill(self, copy: JournalReplication) -> None:
        """Fill in the measurements that a takeover has left in the store."""
        while self._measurements.pending():
            try:
                await backfill(self._measurements, copy, BACKFILL_PAUSE_S)
            except (StorageError, JournalWriteError) as error:
                logger.warning("%s; trying again to fetch measurements", error)
                await asyncio.sleep(BACKFILL_RETRY_S)

    # --- commands out -----------------------------------------------------------------------

    def _perform(self, command: c.Command) -> None:
        """Start to perform a command; its outcome comes back as an event."""
        match command:
            case c.LaunchVms():
                self._start(self._ask_cloud(self._effects.launch, command, self._seq))
            case c.StartAgent():
                self._start(self._effects.start_agent(command))
            case c.TerminateVms():
                self._start(self._ask_cloud(self._effects.terminate, command))
            case c.ReserveVm():
                self._start(self._ask_cloud(self._effects.keep, command))
            case c.AcquireVm():
                self._start(self._ask_cloud(self._effects.take, command))
            case c.ReleaseJob():
                self._start(self._ask_cloud(self._effects.release, command))
            case c.AskProvider():
                self._start(self._effects.ask(command))
            case c.ComputePlan():
                self._start(self._effects.plan(command))
            case c.ListCheckpoints():
                self._effects.list_checkpoints()
            case c.KeepProfile():
                self._start(self._effects.keep_profile(command))
            case c.Send(vm_id=vm_id, command=message):
                self.sessions.send(vm_id, message)
            case c.SetTimer(at_s=at_s):
                self._set_timer(at_s)
            case c.Finish(outcome=outcome):
                if not self._is_unjournalled:
                    self._save_snapshot()
                self._end(outcome)
            case _:
                assert_never(command)

    async def _ask_cloud(
        self,
        effect: Callable[[C], Coroutine[Any, Any, None]],
        command: C,
        seq: int | None = None,
    ) -> None:
        """Perform what changes the cloud, unless another manager has taken over.

        Args:
            effect: Performs ``command``.
            seq: The event that must be in a durable copy of the journal before.
        """
        try:
            if self._copy is not None:
                await self._copy.permit(seq)
        except DeniedError as error:
            assert isinstance(command, c.LaunchVms)
            self.feed(
                e.LaunchRefused(
                    at_s=self.now_s(),
                    intent=command.intent,
                    reason=f"nobody knows whether another manager has the job: {error}",
                    refusal="auth",
                )
            )
            return
        await effect(command)

    def _set_timer(self, at_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_s is not None:
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, at_s - self.now_s()),
                lambda: self.feed(e.TimerFired(at_s=self.now_s())),
            )

    # --- agents -----------------------------------------------------------------------------

    def _readmit(self) -> None:
        """Admit the agents that outlived the previous manager."""
        grace_s = reconnect_s(len(self.state.fleet.vms))
        for vm in self.state.fleet.vms.values():
            if vm.phase is not VmPhase.RETURNING:
                token = self._identity.vm_token(vm.vm_id)
                self.sessions.admit(vm.vm_id, token_sha256(token))
            if vm.phase in (VmPhase.REGISTERED, VmPhase.READY):
                self.sessions.watch(vm.vm_id, grace_s)

    async def _watch_silence(self) -> None:
        """Feed VMs that have fallen silent."""
        suspect_s = self.state.job.manager.suspect_s
        pause_s = suspect_s / _CHECKS_PER_SUSPICION
        while True:
            checked_at_s = time.monotonic()
            await asyncio.sleep(pause_s)
            if time.monotonic() - checked_at_s > pause_s + suspect_s / 2:
                # This process was stopped itself: whether VMs called meanwhile is unknown.
                self.sessions.forgive()
                continue
            self.sessions.excuse(self._effects.unreachable_vms())
            for vm_id in self.sessions.silent(suspect_s):
                self.feed(e.VmSilent(at_s=self.now_s(), vm_id=vm_id))

    async def _poll_clouds(self) -> None:
        """Poll the clouds, once it is known what time it is: nothing is rented before."""
        if self._clock.is_unsettled:
            ahead_s = self._clock.settle(await self._effects.cloud_time_s())
            if ahead_s:
                logger.warning(
                    "the clock of this machine is %.0f s off; the job keeps its cloud's: "
                    "set it right",
                    ahead_s,
                )
            self.feed(e.TimerFired(at_s=self.now_s()))
        await self._effects.poller.run()

    async def _watch_machine(self) -> None:
        """Feed changes of the wall clock and the job's folder, and that nothing is
        committed any more."""
        watch, seen = FolderWatch(self._job), FolderSight()
        while True:
            for name in await asyncio.to_thread(watch.restore):
                logger.warning("%s was deleted: it was written again", name)
            sight = await asyncio.to_thread(watch.look)
            if sight != seen:
                seen = sight
                self.feed(e.FolderSeen(at_s=self.now_s(), **sight._asdict()))
            if by_s := self._clock.set_by_s():
                self.feed(e.ClockSet(at_s=self.now_s(), by_s=by_s))
            for event in self._watches.stalled(self.state, self.now_s()):
                self.feed(event)
            if gpus := self.sessions.gpus():
                await asyncio.to_thread(self._job.keep_gpu_uses, gpus)
            await asyncio.sleep(CLOCK_POLL_S)

    def _on_heard(self, vm_id: str) -> None:
        self.feed(e.VmHeard(at_s=self.now_s(), vm_id=vm_id))


def _log_fields(event: e.Event, after: State) -> dict[str, object]:
    """Return what a program that reads logs asks of a line of news."""
    what = event.report if isinstance(event, e.ReportReceived) else event
    generation = after.training.generation
    return {
        "event": type(what).__name__,
        "generation": None if generation is None else generation.number,
        "reason": after.activity,
    }
