"""The beginning of a generation: agree on the surviving state, then move sections."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import torch
from torch.distributed.distributed_c10d import Store as RendezvousStore

from spottrain.codec import from_data
from spottrain.errors import SpottrainError, UserCodeError
from spottrain.manifest import (
    CheckpointError,
    DamagedError,
    DatasetLength,
    Manifest,
    damage_of,
    misfit,
    other_length,
    parse_name,
    read_manifest,
)
from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.comm.collectives import gather_json
from spottrain.pipeline.comm.device_group import Endpoint
from spottrain.pipeline.comm.groups import TIMEOUT_S, Connections, join, leave, world
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.state.agreement import (
    Agreement,
    Move,
    RankRecord,
    agree,
    applies,
    kept_state,
    moves,
)
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.checkpoint import load_section, state_name
from spottrain.pipeline.state.context import WorkerContext
from spottrain.pipeline.state.staging import copy_section, receive_sections, send_sections
from spottrain.storage.store import StorageError
from spottrain.units import counted
from spottrain.wire import messages
from spottrain.wire.messages import RunGeneration
from spottrain.wire.plan import Plan

DELAYED = "weights before"
"""Key under which a checkpoint has a parameter's value of one mini-batch before. No
optimizer's: theirs are names in Python."""
_TELL_S = 5.0
"""Between two words of a handover that takes its time."""


class MisfitError(UserCodeError):
    """A checkpoint is whole, but of another model, or of other settings of the job."""


class UnreadableCheckpointError(CheckpointError):
    """The checkpoint that a section had to come from cannot be read here.

    Args:
        report: What the manager is told of it.
    """

    def __init__(self, report: messages.CheckpointDamaged | messages.CheckpointUnreachable) -> None:
        super().__init__(report.reason)
        self.report = report

    @classmethod
    def of(cls, name: str, error: SpottrainError) -> Self:
        """Return what an error says of checkpoint ``name``."""
        if isinstance(error, DamagedError):
            return cls(damage_of(name, error))
        return cls(messages.CheckpointUnreachable(name=name, reason=str(error)))


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """Outcome of the handover at one rank."""

    agreement: Agreement
    moved: int
    """Sections that came from another rank's memory."""
    loaded: int
    """Sections that came from the checkpoint store."""
    endpoints: Sequence[Endpoint]
    """What each rank of the plan could sum its device's tensors with."""
    connections: Connections | None = None
    """Of the group, which the ranks of the plan go on with; None: donors had a part in
    it, and all have left it."""


def owners_of(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the ranks that must hold each section when training begins."""
    return {section: plan.holders_of(section) for section in range(plan.num_sections)}


def hand_over(
    context: WorkerContext, command: RunGeneration, rank: int, store: RendezvousStore
) -> HandoverResult:
    """Bring every section to the ranks that own it under the new plan.

    All participants call this, donors too, and form a group; where there are no donors it
    is left open for training, as to form another takes a good part of a recovery. Only
    sections whose owner changes move; a checkpoint is opened only when a section has no
    copy left in any memory.

    Raises:
        GenerationBrokenError: A participant left.
        UserCodeError: Ranks have data sets of different lengths.
        UnreadableCheckpointError: The checkpoint could not be read.
        MisfitError: It is not one of the job as it is now.
    """
    connections = join(store, "handover", rank, len(command.participants), TIMEOUT_S)
    connections.seal()  # what is opened to read a checkpoint is none of them
    handover = _Handover(context, command, rank)
    try:
        with context.device.using():
            result = handover.run()
    except BaseException:
        connections.cut()
        handover.close()
        leave()
        raise
    handover.close()
    if len(command.participants) > len(command.plan.slots):
        leave()
        return result
    connections.watch()
    return dataclasses.replace(result, connections=connections)


class _Handover:
    def __init__(self, context: WorkerContext, command: RunGeneration, rank: int) -> None:
        self._context, self._command, self._rank = context, command, rank
        self._memory = context.memory
        self._sender = ThreadPoolExecutor(1, "hand over")
        self._told_s = time.monotonic()
        self._num_sections = command.plan.num_sections
        self._mine = command.plan.held_by(rank) if rank < len(command.plan.slots) else ()

    def run(self) -> HandoverResult:
        self._context.faults.at(Hook.JOINED)
        records, endpoints = self._exchange()
        entry = parse_name(self._command.checkpoint)
        step, generation = entry.step if entry else 0, self._command.generation
        agreement = agree(
            self._num_sections,
            records,
            generation,
            step,
            saves_only=self._command.save_only,
        )
        self._context.faults.at(Hook.AGREED)
        self._adopt(agreement, records[self._rank])
        owners = owners_of(self._command.plan)
        moving = moves(self._num_sections, records, agreement, owners)
        kept = kept_state(self._num_sections, records)
        self._memory.keep_copies(lambda c: c.content in (kept, (agreement.step, agreement.origin)))
        self._memory.hold(self._mine)
        self._take_back(agreement)
        self._move([move for move in moving if move.source is not None], agreement)
        mine = [move for move in moving if move.target == self._rank]
        loads = [move.section for move in mine if move.source is None]
        self._load(loads, agreement)
        self._context.faults.at(Hook.MOVED)
        world().barrier()
        # From here on every section is where it belongs: other copies may be released.
        self._memory.keep_only(self._mine)
        lasts = kept if self._command.plan.peer_copies else None
        self._memory.keep_copies(lambda c: c.content == lasts)
        num_loaded = len(loads)
        endpoints = endpoints[: len(self._command.plan.slots)]
        return HandoverResult(agreement, len(mine) - num_loaded, num_loaded, endpoints)

    def _exchange(self) -> tuple[list[RankRecord], list[Endpoint]]:
        memory = self._memory
        memory.undo_unfinished()
        memory.move_home(self._command.plan.state)
        mine = RankRecord(self._rank, memory.records(), memory.control.decision)
        datasets = [dataclasses.asdict(one) for one in self._context.loaded.datasets]
        endpoint = dataclasses.asdict(Endpoint.of(self._context.device))
        parts = dataclasses.asdict(mine), endpoint, datasets
        rows = gather_json(parts)
        self._check_lengths([[DatasetLength(**one) for one in row[2]] for row in rows])
        records = [from_data(RankRecord, record) for record, _, _ in rows]
        return records, [Endpoint(**endpoint) for _, endpoint, _ in rows]

    def _check_lengths(self, ranks: Sequence[Sequence[DatasetLength]]) -> None:
        """Check that all ranks of the plan have the same examples, as far as that shows.

        Raises:
            UserCodeError: They do not.
        """
        if self._command.save_only:  # no example is asked for
            return
        places = self._command.plan.slots
        for place, datasets in zip(places, ranks, strict=False):
            if (found := other_length(ranks[0], datasets)) is not None:
                name, first, length = found
                raise UserCodeError(
                    f"{name} has {counted(first, 'example')} on VM {places[0].vm_id}, {length} on VM "
                    f"{place.vm_id}: all must train on the same ones; see to it that data "
                    "do not change while a job uses them, then resume the job"
                )

    def _adopt(self, agreement: Agreement, mine: RankRecord) -> None:
        """Store the agreed decision, then apply it to prepared sections."""
        if agreement.decision is None:
            return
        self._memory.control.decision = agreement.decision
        self._memory.apply(agreement.decision, applies(mine, agreement), self._context.faults)

    def _take_back(self, agreement: Agreement) -> None:
        """Go back to the agreed state where only a copy on this VM has it."""
        for section in self._mine:
            found = self._memory.find(section, (agreement.step, agreement.origin))
            if found is not None and found.is_copy:
                copy_section(found, self._memory.arenas[section])

    def _move(self, moving: Sequence[Move], agreement: Agreement) -> None:
        mine = [
            (self._leaving(move.section, agreement), move.target)
            for move in moving
            if move.source == self._rank
        ]
        sent = self._sender.submit(self._send, mine)
        coming = [
            (self._memory.arenas[move.section], move.source)
            for move in moving
            if move.target == self._rank and move.source is not None
        ]
        for arena in receive_sections(coming):
            arena.set_version(agreement.step, agreement.origin)
            self._tell(arena.section)
        sent.result()

    def _send(self, leaving: Sequence[tuple[SectionArena, int]]) -> None:
        with self._context.device.using():
            send_sections(leaving)

    def _leaving(self, section: int, agreement: Agreement) -> SectionArena:
        arena = self._memory.find(section, (agreement.step, agreement.origin))
        assert arena is not None
        return arena

    def close(self) -> None:
        """End the thread; after an error the connections must have been cut."""
        self._sender.shutdown()

    def _tell(self, section: int) -> None:
        """Let the manager know, now and then, that this takes its time."""
        if time.monotonic() < self._told_s + _TELL_S:
            return
        self._told_s = time.monotonic()
        number = self._command.generation
        report = messages.SectionPrepared(generation=number, section=section)
        self._context.supervisor.report(report)

    def _load(self, sections: Sequence[int], agreement: Agreement) -> None:
        if not sections:
            return
        name, store = self._command.checkpoint, self._context.checkpoints
        try:
            manifest = read_manifest(store, name)
            check_fits(self._context.loaded, self._command, manifest)
            for section in sections:
                arena = self._memory.arenas[section]
                arena.invalidate()
                tensors = load_section(store, manifest, section)
                fill(arena, tensors, manifest.step)
                arena.synchronise()
                arena.set_version(agreement.step, agreement.origin)
                self._tell(section)
        except (CheckpointError, StorageError) as error:
            raise UnreadableCheckpointError.of(name, error) from error


def check_fits(loaded: LoadedJob, command: RunGeneration, manifest: Manifest) -> None:
    """Check that a checkpoint is of the job as it is now.

    Raises:
        MisfitError: It is not.
    """
    other = other_length(manifest.datasets, loaded.datasets)
    if other and manifest.code == command.code and not command.save_only:
        name, was, now = other
        raise MisfitError(
            f"{name} had {counted(was, 'example')} when {manifest.name} was saved: it has "
            f"{now} now, so that mini-batches would be of others; bring the data back to "
            "what they were, or launch a new job with init_from"
        )
    # A journal that was lost in part may not know of the plan that saved it.
    models = {loaded.fingerprint, *command.known_models}
    why = misfit(manifest, loaded.spec, models, command.numerics)
    if why:
        raise MisfitError(
            f"checkpoint {manifest.name} in {loaded.spec.checkpoint_path} is of {why}: go "
            "back to what it was saved with, or launch a new job with init_from"
        )


def fill(arena: SectionArena, tensors: Mapping[str, torch.Tensor], step: int) -> None:
    """Copy a section's tensors, as a checkpoint names them, into its arena.

    Args:
        arena: Of the section.
        tensors: Of a checkpoint.
        step: Its mini-batches. Before the first one there is no earlier version of the
            parameters: where two are kept, both are the first.

    Raises:
        MisfitError: A tensor is missing or has another shape or type. Optimizer
            state of a parameter may be missing as a whole: it never had a gradient.
    """
    parameters = _parameters(arena, step)
    if not step:
        own = {name: tensors[name] for name in arena.parameters if name in tensors}
        delayed = {state_name(name, DELAYED): value for name, value in own.items()}
        tensors = {**delayed, **tensors} if arena.versions > 1 else tensors
    try:
        arena.numbers.restore(tensors)
    except ValueError as error:
        raise MisfitError(
            f"section {arena.section} holds {error} of other parameters; the checkpoint "
            "is of another model"
        ) from error
    arena.with_state = frozenset(
        name
        for name, values in arena.state.items()
        if any(state_name(name, key) in tensors for key in values)
    )
    for name, target in (parameters | _state(arena, arena.with_state)).items():
        source = tensors.get(name)
        if source is None or (source.shape, source.dtype) != (
            target.shape,
            target.dtype,
        ):
            raise MisfitError(
                f"section {arena.section} must hold {name} as {tuple(target.shape)} "
                f"{target.dtype}: got {None if source is None else source.shape}; "
                "the checkpoint is of another model or optimizer"
            )
        target.copy_(source)


def saved_tensors(arena: SectionArena) -> dict[str, torch.Tensor]:
    """Return parameters and optimizer state under the names that checkpoints use."""
    return _parameters(arena, arena.version) | _state(arena, arena.with_state)


def _parameters(arena: SectionArena, version: int) -> dict[str, torch.Tensor]:
    """Return the parameters of a version, and those before it where they are kept."""
    tensors = dict(arena.parameters_at(version))
    for name, before in arena.parameters_at(version - 1).items():
        if before is not tensors[name]:
            tensors[state_name(name, DELAYED)] = before
    return tensors


def _state(arena: SectionArena, parameters: Collection[str]) -> dict[str, torch.Tensor]:
    return {
        state_name(name, key): value
        for name, values in arena.state.items()
        if name in parameters
        for key, value in values.items()
    }
