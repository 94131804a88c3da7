"""The manager's event loop: real time, one journal, one server, one provider.

Whatever happens becomes an event in the queue of ``eventlog.loop``. Measurements go through the same queue, so that each keeps its place among the facts of its
agent, but they are no events. The watches look at them and make events where decisions
depend on it. They are written in batches, and acknowledged once they are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, assert_never

from spottrain.cloud.port.clock import Clock
from spottrain.cloud.port.provider import CloudProvider
from spottrain.errors import one_line
from spottrain.eventlog.journal import JournalError, JournalWriteError
from spottrain.eventlog.loop import Loop
from spottrain.files import make_folder
from spottrain.printable import printable
from spottrain.redaction import redacted
from spottrain.storage.store import DeniedError, StorageError
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import GenerationPhase, VmPhase, VmRecord
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.daemon.effects import EffectRunner
from spottrain.varuna_manager.daemon.folder_watch import FolderSight, FolderWatch
from spottrain.varuna_manager.daemon.metrics import JobMetrics
from spottrain.varuna_manager.daemon.server import ControlChannel
from spottrain.varuna_manager.daemon.sessions import (
    AgentSessions,
    MeasurementStreams,
    OutOfStepError,
    reconnect_s,
)
from spottrain.varuna_manager.daemon.tracking import Trackers
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.identity import Identity, token_sha256
from spottrain.varuna_manager.jobs.journal import Journal, Step
from spottrain.varuna_manager.jobs.measurements import Measurements, Sample
from spottrain.varuna_manager.jobs.replication import JournalReplication, backfill
from spottrain.varuna_manager.jobs.samples import Sampler, samples_of
from spottrain.varuna_manager.jobs.traces import (
    Traces,
    TraceSet,
    TracesRefusedError,
)
from spottrain.varuna_manager.jobs.vm_history import VmHistory
from spottrain.varuna_manager.launch.limits import check as check_limits
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
HEALTH_S = 5.0
"""A manager whose loop or disk takes longer is not healthy."""
_CHECKS_PER_SUSPICION = 5
_PAGE_BYTES = 64 * 1024
"""Written to find out whether the journal could be."""
_MAX_LOGS, _LOG_BYTES = 32, 64 * 1024
"""Of a VM, whose token may be in other hands: the disk is for the journal."""
_LAST_BYTES, _LAST_WORDS = 16 * 1024, 300
"""What is read of a failed VM's log, and characters of its last line that are told."""
_BROKEN = (messages.GenerationBroken, messages.WorkerDied)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Measurements in the queue."""

    vm_id: str
    at_s: float
    until: int
    """Number of the next one of this VM."""
    reports: tuple[messages.Measurement, ...]


class _Flush:
    """In the queue: what was measured is to be written now."""


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
        self._traces = Traces(self._job.traces)
        self._effects = EffectRunner(self, provider, self.sessions, identity, url)
        self.channel = ControlChannel(
            self,
            self.sessions,
            self.state.job.spec,
            workdir,
            identity.admin_token(),
            identity.metrics_token(),
        )
        self._log_writer = _LogWriter()
        self._is_unjournalled = False
        """Whether the job is being ended, as the journal cannot be written any more."""
        self._metrics = JobMetrics(lambda: self.state, self.now_s, self.sessions.gpus)
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
        if self._trackers is not None and self.state.history.progress.highest_step:
            self._trackers.wake()
        outcome: c.Outcome = await self.take_events()
        return outcome

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

    def _events_of(self, item: e.Event | _Measured | _Flush) -> Iterator[e.Event]:
        match item:
            case _Flush():
                self._is_flushing = True
            case _Measured():
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
            if not vm.has_trained and (line := last_line(self._logs_of(vm_id, vm), vm_id)):
                words[vm_id] = line
        return replace(event, last_words=words) if words else event

    def _logs_of(self, vm_id: str, vm: VmRecord | None) -> Path:
        """Return the folder of a VM's logs."""
        folder = self._job.cloud
        if vm is not None and (folder / vm.offer.cloud).is_dir():  # one of several
            folder /= vm.offer.cloud
        return folder / "vms" / vm_id

    def _measure(self, measured: _Measured) -> Iterator[e.Event]:
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
                MEASURED_S, lambda: self._put(_Flush())
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
            command: To be performed.
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
        suspect_s = self.state.job.suspect_s
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

    async def register(self, registration: messages.Registration) -> None:
        """Register a VM's agent; each does it once, before anything else."""
        self.sessions.renew(registration.vm_id)
        self._streams.forget(registration.vm_id)
        event = e.AgentRegistered(
            at_s=self.now_s(),
            vm_id=registration.vm_id,
            num_slots=registration.num_slots,
            private_address=registration.private_address,
        )
        await self.feed(event)
        self.sessions.watch(registration.vm_id)

    async def refuse(self, vm_id: str, software_version: str) -> None:
        """Give a VM up whose agent has other software, unless it is about to be replaced:
        one of an earlier manager is."""
        if self._effects.has_started(vm_id):
            name, ours = self.state.job.spec.name, self.state.manager_version
            reason = (
                f"its agent runs spottrain {software_version}, the manager {ours}: "
                "spottrain was changed on this machine since the manager started; 'spottrain "
                f"stop {name}', then 'spottrain resume {name}'"
            )
            await self.feed(e.AgentRefused(at_s=self.now_s(), vm_id=vm_id, reason=reason))

    async def receive(self, batch: messages.ReportBatch) -> messages.ReportAnswer:
        """Take reports; return what this manager has of the VM's.

        Raises:
            OutOfStepError: the VM is gone, or facts before this batch are missing.
        """
        vm = self.state.fleet.vms.get(batch.vm_id)
        if vm is None or batch.first > vm.reports_received:
            raise OutOfStepError(
                f"reports of {batch.vm_id} are out of order: got number {batch.first}, "
                f"expected {vm.reports_received if vm else 'none'}"
            )
        if (fresh := self._streams.take(batch)) is None:
            return self._streams.answer(batch, vm.reports_received)
        measured = list(fresh)
        new = batch.reports[vm.reports_received - batch.first :]
        first = batch.first + len(batch.reports) - len(new)
        taken = list[asyncio.Future[Sequence[c.Command]]]()
        for number, report in enumerate(new, first):
            earlier = [one for one in measured if one.after <= number]
            measured = measured[len(earlier) :]
            taken += self._queue_measured(batch.vm_id, earlier, len(measured))
            fact = e.ReportReceived(
                at_s=self.now_s(), vm_id=batch.vm_id, number=number, report=report
            )
            taken.append(self.feed(fact))
        taken += self._queue_measured(batch.vm_id, measured, 0)
        if any(isinstance(report, _BROKEN) for report in new):
            self._effects.poller.poll_now()
        if taken:
            await asyncio.gather(*taken)
        received = max(vm.reports_received, batch.first + len(batch.reports))
        return self._streams.answer(batch, received)

    def _queue_measured(
        self, vm_id: str, measured: Sequence[messages.Measured], left: int
    ) -> list[asyncio.Future[Sequence[c.Command]]]:
        """Queue measurements of a batch; ``left`` of it are still to come."""
        if not measured:
            return []
        reports = tuple(one.report for one in measured)
        until = self._streams.next_of(vm_id) - left
        item = _Measured(vm_id=vm_id, at_s=self.now_s(), until=until, reports=reports)
        return [self._put(item)]

    async def stop(self, *, by: str, checkpoint: bool, now: bool) -> None:
        """Record that a person wants the job to stop."""
        await self.feed(e.StopRequested(at_s=self.now_s(), by=by, checkpoint=checkpoint, now=now))

    async def change_limits(self, *, by: str, limits: tuple[Limit, ...], sure: bool) -> None:
        """Record new limits.

        Raises:
            LimitsRefusedError: they would end the job, and the person has not confirmed.
        """
        event = e.LimitsChanged(at_s=self.now_s(), by=by, limits=limits)
        if not sure:
            check_limits(self.state, event)
        await self.feed(event)

    async def receive_grant(self, grant: PoolGrant) -> None:
        """Record what the job's pool grants it."""
        await self.feed(e.GrantReceived(at_s=self.now_s(), grant=grant))

    def metrics_text(self) -> bytes:
        """Return the job's metrics in Prometheus' text format."""
        return self._metrics.text()

    async def trouble(self) -> str:
        """Return why this manager cannot do its work now; empty if it can."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._put(_Flush())  # taken in its turn
                await asyncio.to_thread(_try_to_write, self._job.path)
        except TimeoutError:
            return f"no event was taken in, or no file written, for {HEALTH_S:g} s"
        except OSError as error:
            return f"the job's folder cannot be written: {error.strerror}"
        return ""

    async def trace(self, minibatches: int, content: messages.TraceContent) -> TraceSet:
        """Tell every VM of the generation that runs to record its next mini-batches.

        The core has no part in it: nothing that it decides depends on a trace.

        Raises:
            TracesRefusedError: nothing trains now.
        """
        generation = self.state.training.generation
        if generation is None or generation.phase is not GenerationPhase.RUNNING:
            raise TracesRefusedError(
                "nothing trains at the moment: 'spottrain status' shows what the job does"
            )
        ranks = tuple(slot.vm_id for slot in generation.plan.slots)
        begun = self._traces.begin(generation.number, ranks, minibatches)
        command = messages.TraceMinibatches(
            generation=begun.generation,
            number=begun.number,
            minibatches=minibatches,
            content=content,
        )
        for vm_id in sorted(set(ranks)):
            self.sessions.send(vm_id, command)
        return begun

    async def receive_logs(self, tails: messages.LogTails) -> None:
        """Keep the ends of a VM's logs, until whole ones are fetched from it."""
        folder = self._logs_of(tails.vm_id, self.state.fleet.vms.get(tails.vm_id))
        if (folder / "agent.json").exists():
            return  # it is the VM's own, where its logs are
        try:
            await self._log_writer.write(folder, self._job.path, tails)
        except OSError as error:
            logger.warning("%s: logs are not kept: %s", tails.vm_id, error)

    async def receive_trace(self, vm_id: str, trace: messages.TraceWritten, content: bytes) -> None:
        """Keep a rank's trace in the job's folder.

        Raises:
            TracesRefusedError: it is not expected from this VM.
        """
        self._traces.add(vm_id, trace, content)


class _LogWriter:
    """Writes logs of VMs in a thread of its own, which the end of the process does not await:
    a disk that takes its time holds nothing else up."""

    def __init__(self) -> None:
        self._queue = queue.SimpleQueue[tuple[Future[None], Path, Path, messages.LogTails]]()
        self._waiting = set[str]()
        """VMs whose logs are to be written: later ones of the same VM come again."""
        self._thread: threading.Thread | None = None

    async def write(self, folder: Path, job: Path, tails: messages.LogTails) -> None:
        """Write the ends of a VM's logs into a folder of the job, unless some wait already.

        Raises:
            OSError: They cannot be written.
        """
        if tails.vm_id in self._waiting:
            return
        self._waiting.add(tails.vm_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="vm logs", daemon=True)
            self._thread.start()
        written = Future[None]()
        written.add_done_callback(lambda _: self._waiting.discard(tails.vm_id))
        self._queue.put((written, folder, job, tails))
        await asyncio.wrap_future(written)

    def _run(self) -> None:
        while True:
            written, folder, job, tails = self._queue.get()
            if not written.set_running_or_notify_cancel():
                continue
            try:
                _write_logs(folder, job, tails)
            except OSError as error:
                written.set_exception(error)
            else:
                written.set_result(None)


def _write_logs(folder: Path, job: Path, tails: messages.LogTails) -> None:
    make_folder(folder, within=job)
    known = {path.name for path in folder.iterdir()}
    for log in tails.logs:
        name = Path(log.name).name
        known.add(name)
        if len(known) > _MAX_LOGS:
            raise OSError(f"it has sent {_MAX_LOGS} logs under other names")
        text = log.text.encode(errors="backslashreplace")[-_LOG_BYTES:]
        (folder / name).write_bytes(text)


def last_line(folder: Path, vm_id: str) -> str:
    """Return the last line of an agent's log, cut; empty if none is known.

    Args:
        folder: Of the VM's logs.
        vm_id: The VM.
    """
    try:
        with (folder / "agent.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            text = printable(redacted(log.read().decode(errors="replace")))
    except OSError:
        return ""
    said = map(one_line, text.splitlines())
    # That it was told to end is no reason.
    lines = [line for line in said if line and f"agent of {vm_id} ends: terminated" not in line]
    return lines[-1][:_LAST_WORDS] if lines else ""


def _try_to_write(folder: Path) -> None:
    """Write as the journal would.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PAGE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _log_fields(event: e.Event, after: State) -> dict[str, object]:
    """Return what a program that reads logs asks of a line of news."""
    what = event.report if isinstance(event, e.ReportReceived) else event
    generation = after.training.generation
    return {
        "event": type(what).__name__,
        "generation": None if generation is None else generation.number,
        "reason": after.activity,
    }
