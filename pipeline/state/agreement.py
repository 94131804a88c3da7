"""Agreement of survivors on the mini-batch that was in flight (design 6, Commit).

The first exchange of a generation gathers one ``RankRecord`` from every participant,
donors included; each then computes ``agree``, ``applies`` and ``moves`` from the same
records and so comes to the same conclusion without another message.

**Identity.** The content of a section is named by (version, origin): how many
mini-batches it has applied, and the generation whose gradients applied the last one
(or that restored it from a checkpoint). A generation trains on from one agreed state,
so equal names mean equal content, bit for bit, also where a memory was left out of
generations or went another way (the log matching property of Raft, section 5.3).

**Rule.** A state (version, origin) can be reached when every section has a copy of it,
or a copy one version below it that is prepared in that origin (then the decision must
be found, or be folded again from contributions of all sections). Survivors take the
highest state that can be reached; when there is none, or the checkpoint is newer, the
checkpoint. So a committed mini-batch is lost only when it cannot be reached any more.

What the runtime owes to this rule:

1. Every participant, donors too, stores the decision of an agreement before it applies,
   sends or receives a section.
2. A mark is taken back before the gradients under it change, and before a copy or a
   checkpoint is written over the section (version -1 while that lasts).
3. Origin and version change together: the undo slot saves both, the version is last.

A rank may also keep copies of earlier states (``is_copy``): they count like any other. Those
of the newest state that is whole outlive a handover, until a newer one is whole.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Outcome = Literal["same", "adopted", "dropped", "restored"]


@dataclass(frozen=True, slots=True)
class Contribution:
    """One section's part of the decision, the same bits on all its replicas."""

    section: int
    loss_sum: float
    """Summed over replicas; 0 but in the last section."""
    weight: float
    """Summed over replicas; 0 but in the last section."""
    square_norm: float
    """Squared norm of the reduced gradients, a tied parameter in its first section."""
    overflow: bool
    """Gradients are not finite: the mini-batch changes no parameter. In a decision: or
    its loss is not."""
    out_of_range: bool = False
    """Gradients do not fit into their fixed point: there is no decision, the mini-batch
    is computed again. Such a section is never marked as prepared."""
    metrics: tuple[float, ...] = ()
    """Sum and weight of every metric, summed over replicas; none but in the last
    section."""


@dataclass(frozen=True, slots=True)
class MinibatchDecision:
    """The decision to apply mini-batch ``step``, the same for all sections."""

    generation: int
    """The generation whose gradients are applied, even when a later one adopts them."""
    step: int
    """Takes sections from version ``step`` to ``step + 1``."""
    loss_sum: float
    weight: float
    square_norm: float
    overflow: bool
    stop: bool
    """All stop after this mini-batch; False when it was folded again by survivors."""
    metrics: tuple[float, ...] = ()
    """As in ``Contribution``."""

    @property
    def changes(self) -> bool:
        """True if the mini-batch changes parameters."""
        return not self.overflow and self.weight > 0


@dataclass(frozen=True, slots=True)
class SectionRecord:
    """One copy of one section in a slot's memory."""

    section: int
    version: int
    """Mini-batches applied; -1 when unusable, such as half copied."""
    origin: int
    """Generation whose gradients led to this version, or that restored it."""
    prepared_generation: int | None
    prepared_step: int | None
    contribution: Contribution | None
    """The prepared contribution; kept with the mark, also after it was applied."""
    is_copy: bool = False
    """Kept beside what is trained, see ``pipeline.state.copies``."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Everything that one participant of the exchange holds."""

    rank: int
    sections: tuple[SectionRecord, ...]
    """A section may be there several times, in different states."""
    decision: MinibatchDecision | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """The state of all sections when the generation begins to train."""

    outcome: Outcome
    """same: nothing was in flight. adopted: copies that lag are brought to the step.
    dropped: something newer was seen that cannot be completed. restored: checkpoint."""
    step: int
    """Version of every section afterwards; the next mini-batch to train."""
    origin: int
    """Origin of every section afterwards."""
    decision: MinibatchDecision | None
    """The decision that led to the step, where known: store it first, then apply it."""


@dataclass(frozen=True, slots=True)
class Move:
    """Transfer of a section to ``target`` from ``source``; ``None``: the checkpoint."""

    section: int
    source: int | None
    target: int


def fold(
    generation: int, step: int, contributions: Iterable[Contribution], stop: bool
) -> MinibatchDecision:
    """Sum contributions in section order, so that every rank gets the same bits.

    Args:
        generation: Generation that computed the gradients.
        step: Mini-batch, counted from 0.
        contributions: One of each section, in any order.
        stop: Whether any rank asks to stop.
    """
    loss_sum = weight = square_norm = 0.0
    overflow, metrics = False, tuple[float, ...]()
    # Not sum(): from Python 3.12 on it compensates, which gives other bits.
    for contribution in sorted(contributions, key=lambda c: c.section):
        loss_sum += contribution.loss_sum
        weight += contribution.weight
        square_norm += contribution.square_norm
        overflow |= contribution.overflow
        metrics = contribution.metrics or metrics
    overflow |= not (math.isfinite(loss_sum) and math.isfinite(weight))
    return MinibatchDecision(
        generation, step, loss_sum, weight, square_norm, overflow, stop, metrics
    )


def agree(
    num_sections: int,
    records: Sequence[RankRecord],
    generation: int,
    checkpoint_step: int,
    *,
    saves_only: bool = False,
) -> Agreement:
    """Return the highest state that all sections can reach.

    A generation that only saves takes one that needs no update, if there is one: the
    update may be what has failed.

    Args:
        num_sections: Sections of the model.
        records: State of each participant, in any order.
        generation: The generation that begins; names the state after a restore.
        checkpoint_step: Version of the newest complete checkpoint.
        saves_only: Whether the generation only saves what is committed.
    """
    states = sorted(_states(records), reverse=True)
    if saves_only:
        committed = agree(
            num_sections, [_committed(r) for r in records], generation, checkpoint_step
        )
        if committed.outcome != "restored":
            outcome = _outcome(records, committed, states[0])
            return replace(committed, outcome=outcome, decision=None)
    for version, origin in states:
        if version < checkpoint_step:
            break
        decision = _decision(num_sections, records, version, origin)
        agreement = Agreement("same", version, origin, decision)
        if len(_holders(records, agreement)) == num_sections:
            outcome = _outcome(records, agreement, states[0])
            return Agreement(outcome, version, origin, decision)
    return Agreement("restored", checkpoint_step, generation, None)


def _committed(record: RankRecord) -> RankRecord:
    """Return what a participant holds without what it has prepared or decided."""
    sections = tuple(
        replace(copy, prepared_generation=None, prepared_step=None, contribution=None)
        for copy in record.sections
    )
    return RankRecord(record.rank, sections, None)


def applies(record: RankRecord, agreement: Agreement) -> tuple[int, ...]:
    """Return the sections that this rank first applies from prepared gradients."""
    decision = agreement.decision
    if decision is None:
        return ()
    wanted = (decision.step, decision.generation)
    return tuple(s.section for s in record.sections if _lifts_from(s) == wanted)


def moves(
    num_sections: int,
    records: Sequence[RankRecord],
    agreement: Agreement,
    owners: Mapping[int, tuple[int, ...]],
) -> tuple[Move, ...]:
    """Return the transfers that remain after every rank has done its ``applies``.

    Args:
        num_sections: Sections of the model.
        records: As given to ``agree``.
        agreement: As returned by ``agree``.
        owners: Ranks that must hold each section when training begins.

    Returns:
        Moves in the order of sections, then of targets; load is spread over sources.
    """
    holders = {} if agreement.outcome == "restored" else _holders(records, agreement)
    load: Counter[int] = Counter()
    result = []
    for section in range(num_sections):
        sources = holders.get(section, [])
        for target in sorted(set(owners[section]) - set(sources)):
            source = min(sources, key=lambda r: (load[r], r), default=None)
            if source is not None:
                load[source] += 1
            result.append(Move(section, source, target))
    return tuple(result)


def kept_state(num_sections: int, records: Sequence[RankRecord]) -> tuple[int, int] | None:
    """Return the newest (version, origin) of which there is a kept copy of every section."""
    sections: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for copy in (copy for record in records for copy in record.sections):
        if copy.is_copy and copy.version >= 0:
            sections[copy.version, copy.origin].add(copy.section)
    whole = (s for s, found in sections.items() if len(found) == num_sections)
    return max(whole, default=None)


def _lifts_from(copy: SectionRecord) -> tuple[int, int] | None:
    """Return (step, generation) of the prepared gradients that fit this copy."""
    if copy.prepared_step is None or copy.prepared_generation is None:
        return None
    if copy.version < 0 or copy.version != copy.prepared_step:
        return None
    return copy.prepared_step, copy.prepared_generation


def _states(records: Sequence[RankRecord]) -> set[tuple[int, int]]:
    """Return every (version, origin) that some copy has or could be brought to."""
    states = set()
    for copy in (copy for record in records for copy in record.sections):
        if copy.version >= 0:
            states.add((copy.version, copy.origin))
        if lift := _lifts_from(copy):
            states.add((lift[0] + 1, lift[1]))
    return states


def _decision(
    num_sections: int, records: Sequence[RankRecord], version: int, origin: int
) -> MinibatchDecision | None:
    """Return the decision that led to (version, origin): stored, or folded again."""
    in_order = sorted(records, key=lambda r: r.rank)
    for record in in_order:
        decision = record.decision
        if decision and (decision.step + 1, decision.generation) == (version, origin):
            return decision
    found = {
        copy.section: copy.contribution
        for copy in (copy for record in in_order for copy in record.sections)
        if copy.contribution is not None
        and copy.prepared_generation == origin
        and copy.prepared_step == version - 1
    }
    if len(found) < num_sections:
        return None
    return fold(origin, version - 1, found.values(), stop=False)


def _holders(records: Sequence[RankRecord], agreement: Agreement) -> dict[int, list[int]]:
    """Return, of each section, the ranks that have the agreed state after applying."""
    wanted = (agreement.step, agreement.origin)
    holders: dict[int, list[int]] = {}
    for record in sorted(records, key=lambda r: r.rank):
        ready = {s.section for s in record.sections if (s.version, s.origin) == wanted}
        for section in sorted(ready | set(applies(record, agreement))):
            holders.setdefault(section, []).append(record.rank)
    return holders


def _outcome(
    records: Sequence[RankRecord], agreement: Agreement, newest: tuple[int, int]
) -> Outcome:
    """Name the outcome, for people and for the manager's count of losses."""
    if newest[0] > agreement.step:
        return "dropped"
    if any(applies(record, agreement) for record in records):
        return "adopted"
    return "same"
