"""What agents, people and pools ask of a job's manager, behind its control channel."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import GenerationPhase
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant
from spottrain.varuna_manager.daemon.effects import EffectRunner
from spottrain.varuna_manager.daemon.metrics import JobMetrics
from spottrain.varuna_manager.daemon.ports import EventSink
from spottrain.varuna_manager.daemon.sessions import (
    AgentSessions,
    MeasurementStreams,
    OutOfStepError,
)
from spottrain.varuna_manager.daemon.vm_logs import VmLogs
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.traces import Traces, TraceSet, TracesRefusedError
from spottrain.varuna_manager.launch.limits import check as check_limits
from spottrain.wire import messages

HEALTH_S = 5.0
"""A manager whose loop or disk takes longer is not healthy."""
_PAGE_BYTES = 64 * 1024
"""Written to find out whether the journal could be."""
_BROKEN = (messages.GenerationBroken, messages.WorkerDied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements in the queue."""

    vm_id: str
    at_s: float
    until: int
    """Number of the next one of this VM."""
    reports: tuple[messages.Measurement, ...]


class Flush:
    """In the queue: what was measured is to be written now."""


Taken = asyncio.Future[Sequence[c.Command]]
"""Done once an item of the queue was taken, and its events are journalled."""


class Requests:
    """Answers requests; each is answered once what it says is journalled.

    Args:
        sink: Where events go.
        put: Queues what is no event.
        effects: Knows which agents were started, and polls the cloud.
        sessions: Of the agents.
        streams: Of their measurements.
        logs: Of the VMs.
        job: The job's folder.
    """

    def __init__(
        self,
        sink: EventSink,
        put: Callable[[Measured | Flush], Taken],
        effects: EffectRunner,
        sessions: AgentSessions,
        streams: MeasurementStreams,
        metrics: JobMetrics,
        logs: VmLogs,
        job: JobDir,
    ) -> None:
        self._sink, self._put = sink, put
        self._effects, self._sessions, self._streams = effects, sessions, streams
        self._metrics, self._logs = metrics, logs
        self._job, self._traces = job, Traces(job.traces)

    async def register(self, registration: messages.Registration) -> None:
        """Register a VM's agent; each does it once, before anything else."""
        self._sessions.renew(registration.vm_id)
        self._streams.forget(registration.vm_id)
        event = e.AgentRegistered(
            at_s=self._sink.now_s(),
            vm_id=registration.vm_id,
            num_slots=registration.num_slots,
            private_address=registration.private_address,
        )
        await self._sink.feed(event)
        self._sessions.watch(registration.vm_id)

    async def refuse(self, vm_id: str, software_version: str) -> None:
        """Give a VM up whose agent has other software, unless it is about to be replaced:
        one of an earlier manager is."""
        if self._effects.has_started(vm_id):
            name, ours = self._sink.state.job.spec.name, self._sink.state.manager_version
            reason = (
                f"its agent runs spottrain {software_version}, the manager {ours}: "
                "spottrain was changed on this machine since the manager started; 'spottrain "
                f"stop {name}', then 'spottrain resume {name}'"
            )
            await self._sink.feed(
                e.AgentRefused(at_s=self._sink.now_s(), vm_id=vm_id, reason=reason)
            )

    async def receive(self, batch: messages.ReportBatch) -> messages.ReportAnswer:
        """Take reports; return what this manager has of the VM's.

        Raises:
            OutOfStepError: the VM is gone, or facts before this batch are missing.
        """
        vm = self._sink.state.fleet.vms.get(batch.vm_id)
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
        taken = list[Taken]()
        for number, report in enumerate(new, first):
            earlier = [one for one in measured if one.after <= number]
            measured = measured[len(earlier) :]
            taken += self._queue_measured(batch.vm_id, earlier, len(measured))
            fact = e.ReportReceived(
                at_s=self._sink.now_s(), vm_id=batch.vm_id, number=number, report=report
            )
            taken.append(self._sink.feed(fact))
        taken += self._queue_measured(batch.vm_id, measured, 0)
        if any(isinstance(report, _BROKEN) for report in new):
            self._effects.poller.poll_now()
        if taken:
            await asyncio.gather(*taken)
        received = max(vm.reports_received, batch.first + len(batch.reports))
        return self._streams.answer(batch, received)

    def _queue_measured(
        self, vm_id: str, measured: Sequence[messages.Measured], left: int
    ) -> list[Taken]:
        """Queue measurements of a batch; ``left`` of it are still to come."""
        if not measured:
            return []
        reports = tuple(one.report for one in measured)
        until = self._streams.next_of(vm_id) - left
        item = Measured(vm_id=vm_id, at_s=self._sink.now_s(), until=until, reports=reports)
        return [self._put(item)]

    async def stop(self, *, by: str, checkpoint: bool, now: bool) -> None:
        """Record that a person wants the job to stop."""
        await self._sink.feed(
            e.StopRequested(at_s=self._sink.now_s(), by=by, checkpoint=checkpoint, now=now)
        )

    async def change_limits(self, *, by: str, limits: tuple[Limit, ...], sure: bool) -> None:
        """Record new limits.

        Raises:
            LimitsRefusedError: they would end the job, and the person has not confirmed.
        """
        event = e.LimitsChanged(at_s=self._sink.now_s(), by=by, limits=limits)
        if not sure:
            check_limits(self._sink.state, event)
        await self._sink.feed(event)

    async def receive_grant(self, grant: PoolGrant) -> None:
        """Record what the job's pool grants it."""
        await self._sink.feed(e.GrantReceived(at_s=self._sink.now_s(), grant=grant))

    def metrics_text(self) -> bytes:
        """Return the job's metrics in Prometheus' text format."""
        return self._metrics.text()

    async def trouble(self) -> str:
        """Return why this manager cannot do its work now; empty if it can."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._put(Flush())  # taken in its turn
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
        generation = self._sink.state.training.generation
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
            self._sessions.send(vm_id, command)
        return begun

    async def receive_logs(self, tails: messages.LogTails) -> None:
        """Keep the ends of a VM's logs, until whole ones are fetched from it."""
        await self._logs.keep(tails, self._sink.state.fleet.vms.get(tails.vm_id))

    async def receive_trace(self, vm_id: str, trace: messages.TraceWritten, content: bytes) -> None:
        """Keep a rank's trace in the job's folder.

        Raises:
            TracesRefusedError: it is not expected from this VM.
        """
        self._traces.add(vm_id, trace, content)


def _try_to_write(folder: Path) -> None:
    """Write as the journal would.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PAGE_BYTES))
        file.flush()
        os.fsync(file.fileno())
