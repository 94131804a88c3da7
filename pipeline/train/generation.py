"""One generation at one worker: hand over, form groups, train, leave."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store as RendezvousStore

from spottrain.activity import Activity
from spottrain.morphing.schedules.schedule import Work
from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.base.fixed_point import MAX_ATTEMPTS
from spottrain.pipeline.base.heap import trim_heap, tune_for_activations
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.comm.device_group import DeviceGroups, Endpoint
from spottrain.pipeline.comm.groups import (
    TIMEOUT_S,
    Connections,
    connect_rendezvous,
    join,
    leave,
    new_groups,
    release_rendezvous,
    world,
)
from spottrain.pipeline.comm.p2p import PipelineLinks
from spottrain.pipeline.comm.ranks import links_within_vms, memberships, neighbours, tie_groups
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.state import update
from spottrain.pipeline.state.agreement import Agreement, Contribution, MinibatchDecision, fold
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.context import StopRequest, WorkerContext
from spottrain.pipeline.state.copies import PeerCopies
from spottrain.pipeline.state.evacuation import end_worker
from spottrain.pipeline.state.handover import HandoverResult, hand_over
from spottrain.pipeline.state.saving import CheckpointRound
from spottrain.pipeline.train.evaluation import LOSS, Evaluation, weighted_means
from spottrain.pipeline.train.lanes import (
    Computed,
    Lanes,
)
from spottrain.pipeline.train.overlap import Committed, Overlap
from spottrain.pipeline.train.profiling import RankProfiler
from spottrain.pipeline.train.reduction import sum_tied
from spottrain.pipeline.train.sharing import Network, StageSections
from spottrain.wire import messages
from spottrain.wire.messages import RunGeneration
from spottrain.wire.model import Network as NetworkChoice
from spottrain.wire.model import TiedParameter

_REQUESTED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
"""In the message of torch's allocator."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_USES: Mapping[Work, messages.MemoryUse] = {
    Work.FORWARD: "forward",
    Work.RECOMPUTE: "recompute",
    Work.BACKWARD: "backward",
}


def run_generation(context: WorkerContext, command: RunGeneration, pid: int) -> None:
    """Train under ``command.plan`` until stopped or done; report everything.

    Raises:
        GenerationBrokenError, RuntimeError: A peer is gone; memory stays as it is.
        UnreadableCheckpointError: The checkpoint that was named could not be read.
        UserCodeError: The user's code raised.
    """
    rank = _rank_of(context, command)
    context.activity.begin(command.generation)
    context.stages.enter(_stage_of(command, rank))
    context.faults.rank = rank
    versions = (arena.version for arena in context.memory.arenas.values())
    context.faults.step = max(versions, default=0)
    store = connect_rendezvous(command.store_host, command.store_port, TIMEOUT_S)
    try:
        result = hand_over(context, command, rank, store)
    except torch.OutOfMemoryError as error:
        _report_out_of_memory(context, command, error, "handover", None)
        raise
    if rank >= len(command.plan.slots):
        release_rendezvous(store, len(command.participants))
        _report_stop(context, command, result.agreement.step)
        return
    connections = result.connections or join(
        store, "training", rank, len(command.plan.slots), TIMEOUT_S
    )
    if command.save_only:
        _save(context, command, rank, store, connections, result, pid)
        return
    training, end = None, partial(end_worker, context)
    tell = partial(_report_nccl, context, command)
    device_groups = DeviceGroups(context.device, connections, end, tell)
    try:
        with context.device.using():
            groups = _form_groups(
                context, command, rank, result.endpoints, connections, device_groups
            )
            network = Network(store, connections, groups, device_groups)
            training = _Training(context, command, rank, network, result.agreement)
            release_rendezvous(store, len(command.participants))
            training.begin(result, pid)
            training.run()
    except BaseException as error:
        connections.cut()
        if isinstance(error, torch.OutOfMemoryError):
            during, section = training.doing() if training else ("start", None)
            _report_out_of_memory(context, command, error, during, section)
        raise
    finally:
        device_groups.close()
        if training is not None:
            training.close()
        leave()


def _save(
    context: WorkerContext,
    command: RunGeneration,
    rank: int,
    store: RendezvousStore,
    connections: Connections,
    result: HandoverResult,
    pid: int,
) -> None:
    """Write a checkpoint of what is committed; neither model nor data set is needed."""
    plan, held = command.plan, context.memory.arenas
    arenas = {k: held[k] for k in plan.held_by(rank)}
    step, saving = result.agreement.step, None
    try:
        with context.device.using():
            _report_start(context, command, rank, step, result, pid)
            for arena in arenas.values():
                arena.synchronise()
            tracker = TensorTracker(context.memory.num_bytes)
            saving = CheckpointRound(context, command, arenas, rank, store, tracker)
            release_rendezvous(store, len(command.participants))
            saving.save_now(step)
            with context.activity.waiting():
                world().barrier()
    except BaseException:
        connections.cut()
        raise
    finally:
        if saving is not None:
            saving.abandon()
        leave()
    _report_stop(context, command, step)


def _report_stop(context: WorkerContext, command: RunGeneration, step: int) -> None:
    """Report that a rank has done what it had to, though not the job's last step."""
    context.supervisor.report(
        messages.GenerationStopped(
            generation=command.generation, slot=context.slot, step=step, done=False
        )
    )


def _report_start(
    context: WorkerContext,
    command: RunGeneration,
    rank: int,
    step: int,
    result: HandoverResult,
    pid: int,
    updater: update.Updater | None = None,
) -> None:
    """Report that a rank is ready; the first one, what was adopted in the handover."""
    context.supervisor.report(
        messages.GenerationStarted(
            generation=command.generation,
            slot=context.slot,
            pid=pid,
            step=step,
            outcome=result.agreement.outcome,
            sections_moved=result.moved,
            sections_loaded=result.loaded,
        )
    )
    decision = result.agreement.decision
    if rank == 0 and decision is not None:
        context.supervisor.report(
            messages.MinibatchAdopted(
                generation=command.generation,
                step=step,
                skipped=_skip_reason(context, context.memory.arenas, decision),
                **_measured(context, decision, updater),
            )
        )


def _measured(
    context: WorkerContext,
    decision: MinibatchDecision,
    updater: update.Updater | None,
) -> dict[str, Any]:
    """Return what a decision says of its mini-batch, as reports name it."""
    names = (LOSS, *context.loaded.layout.metrics)
    means = weighted_means(names, (decision.loss_sum, decision.weight, *decision.metrics))
    return {
        "loss": means.pop(LOSS, 0.0),
        "grad_norm": update.gradient_norm(decision),
        "weight": decision.weight,
        "learning_rate": updater and updater.learning_rate(decision.step),
        "metrics": tuple(messages.Metric(name=name, value=value) for name, value in means.items()),
    }


def _skip_reason(
    context: WorkerContext, arenas: Mapping[int, SectionArena], decision: MinibatchDecision
) -> messages.SkipReason:
    """Return why a mini-batch changes no parameter."""
    scale = None
    if context.loaded.spec.precision == "fp16":
        scale = next(iter(arenas.values())).numbers.loss_scale
    return update.skip_reason(decision, scale)


def _form_groups(
    context: WorkerContext,
    command: RunGeneration,
    rank: int,
    endpoints: Sequence[Endpoint],
    connections: Connections,
    device_groups: DeviceGroups,
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Form all groups of a plan; ``connections`` are those of the host's."""
    plan, spec = command.plan, context.loaded.spec
    ties = context.loaded.layout.tied
    groups = new_groups(memberships(plan, ties), TIMEOUT_S)
    connections.seal()
    # Gradients are where committed state is.
    layout = context.loaded.layout
    tying = tie_groups(plan, _trainable_ties(layout)) if plan.state == "device" else []
    # What was chosen for gradients is not for the sums within every forward.
    planned: NetworkChoice = plan.network if plan.devices_per_stage_replica == 1 else "auto"
    links = links_within_vms(plan) if plan.links_on_devices else []
    summing = memberships(plan, ())
    device_groups.form(endpoints, spec.network, planned, summing, tying, links, rank, TIMEOUT_S)
    return groups


def _report_nccl(context: WorkerContext, command: RunGeneration, reason: str) -> None:
    report = messages.NcclFailed(generation=command.generation, slot=context.slot, reason=reason)
    context.supervisor.report(report)


def _report_out_of_memory(
    context: WorkerContext,
    command: RunGeneration,
    error: torch.OutOfMemoryError,
    during: messages.MemoryUse,
    section: int | None,
) -> None:
    found = _REQUESTED.search(str(error))
    requested = float(found[1]) * _UNITS[found[2]] if found else 0
    plan = command.plan
    replica = plan.replica_of(_rank_of(context, command))
    report = messages.OutOfMemory(
        generation=command.generation,
        slot=context.slot,
        section=section,
        microbatch_size=plan.microbatch_size_of(min(replica, plan.data_parallel_width - 1)),
        requested_bytes=int(requested),
        device_bytes=context.device.memory_bytes() or 0,
        during=during,
    )
    context.supervisor.report(report)


def _stage_of(command: RunGeneration, rank: int) -> tuple[object, ...] | None:
    """Return what the tasks of a rank depend on; ``None`` for a donor."""
    plan = command.plan
    if rank >= len(plan.slots) or command.save_only:
        return None
    runs = plan.runs_of(rank % plan.pipeline_depth)
    size = plan.microbatch_size_of(plan.replica_of(rank))
    return *runs, plan.segments, size, plan.devices_per_stage_replica


def _rank_of(context: WorkerContext, command: RunGeneration) -> int:
    ranks = [
        rank
        for rank, slot in enumerate(command.participants)
        if (slot.vm_id, slot.index) == (context.vm_id, context.slot)
    ]
    return ranks[0]


class _Training:
    """The training loop of one rank of a plan."""

    def __init__(
        self,
        context: WorkerContext,
        command: RunGeneration,
        rank: int,
        network: Network,
        agreement: Agreement,
    ) -> None:
        plan, spec = command.plan, context.loaded.spec
        self._network = network
        self._context, self._command, self._plan = context, command, plan
        self._rank = rank
        self._stage = stage = StageSections(context, plan, rank, network)
        self._arenas = stage.held
        self._is_stale = spec.semantics == "stale_by_one"
        self._behind = behind = _committer_context(context) if self._is_stale else context
        """Of the thread that commits."""
        self._copies = PeerCopies(behind, command, rank, self._arenas)
        self._tracker = TensorTracker(context.memory.num_bytes, context.stages.known)
        self._lanes = Lanes(context, plan, rank, stage, network, self._tracker)
        self._ties = _trainable_ties(context.loaded.layout)
        self._updater = context.memory.updater(self._arenas, behind.faults)
        self._gatherer = update.Gatherer(plan, len(context.loaded.layout.metrics))
        self._step = agreement.step
        sizes = plan.minibatch_size, plan.microbatch_size
        source = MicrobatchSource(context.loaded.job, spec.seed, *sizes, context.batches.fetch)
        self._saving = CheckpointRound(
            behind, command, self._arenas, rank, network.store, self._tracker
        )
        # Threads begin last, when no code of the user's can raise any more.
        self._links = PipelineLinks(
            *neighbours(plan, rank),
            context.device,
            spec.wire,
            self._lanes.link_groups,
            network.device_groups.link,
        )
        self._lanes.connect(source, self._links)
        self._evaluation = Evaluation(context, command, rank, stage.all, source)
        self._good_step = self._step  # the newest one that has changed the weights
        self._skipped: messages.SkipReason = ""
        """Why the newest mini-batch changed no parameter."""
        self._owes_checkpoint = self._is_save_due = self._is_copy_due = False
        self._agreed_share: messages.ShareMinibatch | None = None
        """To be followed once the pipeline is empty."""
        self._share, self._tuned_bytes = 0, 0
        """Number of the ``ShareMinibatch`` that the executor follows; bytes of the largest
        activation that the heap is tuned for."""
        self._profiler = RankProfiler(context, plan, rank)
        self._since_s = time.monotonic()
        """When the newest commit has ended, or the pipeline was begun to be filled."""
        self._overlap = Overlap(
            context,
            self._lanes,
            self._links,
            network.connections,
            self._commit,
            self._keep,
            self._drains,
            self._as_committer,
        )

    def begin(self, result: HandoverResult, pid: int) -> None:
        """Get what this rank does not hold, and report that it is ready."""
        self._lanes.begin(result.agreement.step, result.agreement.origin)
        _report_start(
            self._context,
            self._command,
            self._rank,
            self._step,
            result,
            pid,
            self._updater,
        )

    def run(self) -> None:
        """Train until all ranks agree to stop, or all steps are done."""
        spec = self._context.loaded.spec
        self._context.faults.step = self._step  # a worker may only save what others trained
        self._tuned_bytes = self._tracker.largest_saved_bytes
        tune_for_activations(self._tuned_bytes)
        with self._as_committer():
            self._evaluate_if_due()
            self._save_if_alone()
            if self._step < spec.steps:
                self._copies.start(self._step)
        stop, early = StopRequest.NONE, self._evaluation.stops_early()
        while self._step < spec.steps and stop == StopRequest.NONE and not early:
            self._profiler.follow(self._step)
            self._lanes.record(self._profiler.recording)
            self._follow_share()
            stop = self._run_overlapped() if self._is_stale else self._minibatch()
            with self._as_committer():
                self._evaluate_if_due()
                early = self._evaluation.stops_early()
                self._keep()
        with self._as_committer():
            self._end(stop, early)

    def _as_committer(self) -> AbstractContextManager[None]:
        """Return the context in which this thread does what another one does else."""
        if not self._is_stale:
            return nullcontext()
        return self._context.activity.showing(self._behind.activity)

    def _keep(self) -> None:
        """Begin what is due after a commit: a checkpoint, and copies on other VMs."""
        self._save_if_due()
        if self._is_copy_due and self._step < self._context.loaded.spec.steps:
            self._copies.start(self._step)

    def _end(self, stop: int, early: str) -> None:
        """Leave the generation with all ranks, its last checkpoint saved if it is due."""
        spec = self._context.loaded.spec
        self._copies.stop()
        self._profiler.finish(self._step)
        done = self._step >= spec.steps or bool(early)
        if done:
            request = self._context.supervisor.stop_request
            done = self._saving.save_last(self._step, request)
        elif stop == StopRequest.STOP_AND_CHECKPOINT:
            self._saving.save_now(self._good_step)
        else:
            self._saving.leave()
        with self._context.activity.waiting():
            self._links.flush()
            self._network.device_groups.finish()
            world().barrier()
        self._context.supervisor.report(
            messages.GenerationStopped(
                generation=self._command.generation,
                slot=self._context.slot,
                step=self._step,
                done=done,
                early=early,
            )
        )

    def _evaluate_if_due(self) -> None:
        """Measure held-out sets; keep the weights if they are the best so far."""
        step = self._step
        if not self._evaluation.is_due(step):
            return
        record = self._evaluation.run(step, self._lanes.at_newest(step))
        self._saving.best_step = record.best_step
        if self._context.loaded.spec.evaluation.every_steps and record.best_step == step:
            stop_request = self._context.supervisor.stop_request
            if self._saving.finish(stop_request):
                self._start_saving()

    def _save_if_alone(self) -> None:
        """Begin a checkpoint where a plan without second copies begins: the loss of a VM
        would undo all that was trained since the checkpoint before."""
        last = self._context.loaded.spec.steps
        plan = self._plan
        is_alone = plan.data_parallel_width == 1 or (plan.shared_state and plan.copies == 1)
        if is_alone and self._step < last:
            self._start_saving()

    def _save_if_due(self) -> None:
        """Begin a checkpoint, or put it off until a mini-batch is finite again: one of
        weights that make losses which are not finite must not push out a good one."""
        due = self._owes_checkpoint or self._is_save_due
        self._owes_checkpoint = due and self._skipped in update.NOT_FINITE
        is_last = self._step == self._context.loaded.spec.steps
        if due and not self._owes_checkpoint and not is_last:
            self._start_saving()

    def _start_saving(self) -> None:
        if self._saving.can_start(self._step):
            self._behind.faults.at(Hook.SNAPSHOT)
            self._saving.start(self._step)

    def doing(self) -> tuple[messages.MemoryUse, int | None]:
        """Return what this rank does, or what an error has ended, and the section."""
        if self._updater.section is not None:
            return "update", self._updater.section
        executor = self._lanes.executor
        if (task := executor.task) is None:
            return "evaluation", None
        model = executor.model
        return _USES[task.work], model.section if model else None

    def close(self) -> None:
        """End the threads; after an error the connections must have been cut.

        A checkpoint that is on its way is abandoned: its store may take its time, and
        what survives in memory is waited for.
        """
        self._profiler.close()
        self._links.close()
        self._saving.abandon()
        self._copies.close()
        self._overlap.close()
        self._lanes.close()

    def _minibatch(self) -> int:
        """Train one mini-batch to its commit; return the strongest stop request."""
        began = self._since_s = time.monotonic()
        step = self._context.faults.step = self._step
        for attempt in range(MAX_ATTEMPTS):
            self._context.activity.note("compute")
            minibatch = self._lanes.open(step, attempt)
            computed = self._lanes.finish(step, minibatch, began)
            committed = self._commit(computed)
            if committed.in_range:
                self._context.batches.adapt(computed.tasks_s)
                return committed.stop
        raise AssertionError("the last attempt takes any finite gradient")

    def _run_overlapped(self) -> int:
        """Train mini-batches beside the commits of those before them, if they may be.

        The first one of a generation shows alone what its tasks take, and those that are
        recorded what takes how long.
        """
        self._since_s = time.monotonic()
        overlaps = self._tracker.is_settled and not self._profiler.is_busy
        return self._overlap.run(self._step, overlaps and self._plan.chunks == 1)

    def _drains(self, step: int) -> bool:
        """Return whether the pipeline must be empty before a mini-batch."""
        is_last = step >= self._context.loaded.spec.steps
        return is_last or self._evaluation.is_due(step)

    def _commit(self, computed: Computed) -> Committed:
        """Reduce, prepare, gather, decide, apply (design: Commit, a to c), report."""
        faults, generation = self._behind.faults, self._command.generation
        activity, step = self._behind.activity, computed.step
        faults.step = step
        with self._network.device_groups.bounded():
            with activity.waiting(), self._profiler.phase("reduction"):
                mine = self._reduce(computed)
            if not any(one.out_of_range for one in mine):
                self._prepare(step, mine)
        faults.at(Hook.PREPARED)
        stop = self._context.supervisor.stop_request()
        share = self._context.supervisor.newest_share()
        trace = self._context.supervisor.newest_trace()
        numbers = (0 if one is None else one.number for one in (share, trace))
        settled, save = self._saving.settled_step(), self._saving.is_due(step + 1)
        with activity.waiting(), self._profiler.phase("commit"):
            all_ranks = self._gatherer.exchange(
                mine,
                stop,
                settled,
                *numbers,
                save=save,
                copied=self._copies.settled_step(),
                copy=self._copies.is_due(step + 1),
            )
        faults.at(Hook.GATHERED)
        if not all_ranks.in_range:
            return Committed(in_range=False)
        stops = all_ranks.stop != StopRequest.NONE
        decision = fold(generation, step, all_ranks.contributions, stops)
        self._skipped = _skip_reason(self._context, self._stage.all, decision)
        self._context.memory.control.decision = decision
        faults.at(Hook.DECIDED)
        with self._profiler.phase("update"):
            self._apply(decision)
        self._note_step(step + 1)
        faults.at(Hook.APPLIED)
        self._saving.settle(all_ranks.settled_step)
        self._is_save_due = all_ranks.save
        self._copies.settle(all_ranks.copied_step)
        self._is_copy_due = all_ranks.copy
        shares = share is not None and all_ranks.share > self._share
        self._agreed_share = share if shares else None
        if all_ranks.trace:
            self._profiler.wanted = trace
        self._report(computed, decision)
        faults.at(Hook.REPORTED)
        drains = shares or self._profiler.is_busy
        return Committed(all_ranks.stop, drains=drains)

    def _note_step(self, step: int) -> None:
        self._step = step
        # With stale gradients, what is kept of the mini-batch before has changed anyway.
        if self._is_stale or self._skipped not in update.NOT_FINITE:
            self._good_step = step

    def _report(self, computed: Computed, decision: MinibatchDecision) -> None:
        """Report a mini-batch that is applied, and what it has cost."""
        largest_bytes = self._tracker.largest_saved_bytes
        if self._tracker.settle() and largest_bytes != self._tuned_bytes:
            tune_for_activations(largest_bytes)
            trim_heap()
        now_s = time.monotonic()
        step_s, interval = now_s - self._since_s, self._saving.interval
        self._since_s = now_s
        interval.observe(step_s, saving=self._saving.is_pending)
        self._copies.observe(step_s)
        chosen = self._rank == 0 and not self._context.loaded.spec.checkpoint_every_steps
        self._context.supervisor.report(
            messages.MinibatchCommitted(
                generation=self._command.generation,
                slot=self._context.slot,
                step=self._step,
                sections=tuple(self._arenas),
                step_s=step_s,
                peak_bytes=self._context.device.peak_bytes() or self._tracker.peak_bytes,
                busy_s=computed.busy_s,
                microbatches=computed.microbatches,
                recomputes=computed.recomputes,
                tasks_s=computed.tasks_s,
                skipped=self._skipped,
                checkpoint_every_steps=interval.every_steps if chosen else 0,
                checkpoint_cost_s=interval.cost_s if chosen else 0.0,
                copied_step=self._copies.copied_step,
                **_measured(self._context, decision, self._updater),
            )
        )

    def _apply(self, decision: MinibatchDecision) -> None:
        self._behind.activity.note("update")
        self._saving.finish_copying()
        with self._tracker.watch():
            self._updater.apply(decision, list(self._arenas), self._lanes.refresh)
        self._lanes.follow(decision)

    def _reduce(self, computed: Computed) -> list[Contribution]:
        """Sum gradients and losses; return what this rank's sections contribute."""
        self._behind.faults.at(Hook.REDUCE)
        reduction = self._lanes.of(computed.step).reduction
        fits = reduction.reduce()
        totals = reduction.total_loss(computed.losses)
        pipeline = self._rank // self._plan.pipeline_depth
        network = self._network
        groups = network.groups, network.device_groups
        sum_tied(self._plan, pipeline, self._ties, self._arenas, *groups)
        self._behind.faults.at(Hook.REDUCED)
        sums = {self._plan.num_sections - 1: totals}
        return update.contributions(self._arenas.values(), self._ties, sums, fits)

    def _prepare(self, step: int, mine: Sequence[Contribution]) -> None:
        """Mark gradients as whole, once the device is done with them."""
        if self._plan.state == "device" or self._plan.shared_state:
            self._context.device.synchronise()
        self._network.device_groups.check()
        with self._context.memory.control.lock:
            for arena, one in zip(self._arenas.values(), mine, strict=True):
                arena.prepare(self._command.generation, step, one)

    def _follow_share(self) -> None:
        """Change this replica's share, if all ranks know a newer one."""
        share = self._agreed_share
        if share is None or share.number <= self._share:
            return
        self._share = share.number
        self._plan = replace(self._plan, replica_bounds=share.replica_bounds)
        self._lanes.share(share.replica_bounds)


def _committer_context(context: WorkerContext) -> WorkerContext:
    """Return the context of a thread beside the one that computes."""
    return replace(context, activity=Activity(), faults=replace(context.faults))


def _trainable_ties(layout: ModelLayout) -> list[TiedParameter]:
    return [tied for tied in layout.tied if layout.specs[tied.name].requires_grad]
