from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.codec import decode, encode
from spottrain.errors import WireError
from spottrain.pipeline.state.agreement import (
    Agreement,
    Contribution,
    MinibatchDecision,
    Move,
    RankRecord,
    SectionRecord,
    agree,
    applies,
    fold,
    kept_state,
    moves,
)

Mark = tuple[int, int]  # (generation, step)
GENERATION = 9


def share(section: int) -> Contribution:
    return Contribution(section, 0.0, 0.0, 1.0 + section, False)


def copy(section: int, version: int, origin: int = 0, mark: Mark | None = None) -> SectionRecord:
    generation, step = mark or (None, None)
    mine = share(section) if mark else None
    return SectionRecord(section, version, origin, generation, step, mine)


def rank(
    number: int, *sections: SectionRecord, decision: MinibatchDecision | None = None
) -> RankRecord:
    return RankRecord(number, sections, decision)


def decided(generation: int, step: int) -> MinibatchDecision:
    return MinibatchDecision(generation, step, 0.0, 0.0, 5.0, False, False)


def kept(section: int, version: int, origin: int = 0) -> SectionRecord:
    return dataclasses.replace(copy(section, version, origin), is_copy=True)


# --- agree, case by case ------------------------------------------------------------------


def test_nothing_in_the_air_stays_as_it_is() -> None:
    records = [rank(0, copy(0, 5)), rank(1, copy(1, 5))]
    assert agree(2, records, GENERATION, 3) == Agreement("same", 5, 0, None)


def test_what_a_lost_rank_held_is_taken_from_copies_of_one_step() -> None:
    """Rank 1 is lost with section 1; ranks 0 and 2 keep copies, and one has a newer one."""
    records = [
        rank(0, copy(0, 9), kept(0, 6), kept(2, 6), kept(0, 8)),
        rank(1, copy(2, 9), kept(2, 6), kept(1, 6), kept(1, 4)),
    ]
    agreement = agree(3, records, GENERATION, 3)
    assert agreement == Agreement("dropped", 6, 0, None)
    assert kept_state(3, records) == (6, 0)
    owners = {0: (0,), 1: (0,), 2: (1,)}
    assert moves(3, records, agreement, owners) == (Move(1, 1, 0),)


def test_copies_count_only_if_every_section_has_one_of_the_same_step() -> None:
    records = [
        rank(0, copy(0, 9), kept(0, 6)),
        rank(1, kept(1, 4), kept(1, 6, origin=1)),
    ]
    assert agree(2, records, GENERATION, 3).outcome == "restored"
    assert kept_state(2, records) is None
    unusable = [rank(0, kept(0, -1)), rank(1, kept(1, -1))]
    assert kept_state(2, unusable) is None


def test_a_step_prepared_by_every_section_is_folded_again() -> None:
    records = [rank(0, copy(0, 5, mark=(0, 5))), rank(1, copy(1, 5, mark=(0, 5)))]
    agreement = agree(2, records, GENERATION, 3)
    folded = fold(0, 5, [share(0), share(1)], stop=False)
    assert agreement == Agreement("adopted", 6, 0, folded)
    assert [applies(r, agreement) for r in records] == [(0,), (1,)]


def test_to_save_only_nothing_is_updated_that_need_not_be() -> None:
    held = [copy(0, 5, mark=(0, 5)), copy(1, 5, mark=(0, 5))]
    records = [rank(k, one, decision=decided(0, 5)) for k, one in enumerate(held)]
    agreement = agree(2, records, GENERATION, 3, saves_only=True)
    assert agreement == Agreement("dropped", 5, 0, None)
    assert [applies(r, agreement) for r in records] == [(), ()]
    ahead = [rank(0, copy(0, 6, mark=(0, 5)), decision=decided(0, 5)), records[1]]
    agreement = agree(2, ahead, GENERATION, 3, saves_only=True)
    assert agreement == Agreement("adopted", 6, 0, decided(0, 5))


def test_a_decision_found_anywhere_is_adopted_as_it_was_written() -> None:
    decision = dataclasses.replace(decided(0, 5), stop=True)
    records = [
        rank(0, copy(0, 5, mark=(0, 5))),
        rank(1, copy(1, 5, mark=(0, 5)), decision=decision),
    ]
    assert agree(2, records, GENERATION, 3) == Agreement("adopted", 6, 0, decision)


def test_a_rank_that_lags_behind_an_applied_step_applies_it_too() -> None:
    records = [
        rank(0, copy(0, 6, mark=(0, 5)), decision=decided(0, 5)),
        rank(1, copy(1, 5, mark=(0, 5))),
    ]
    agreement = agree(2, records, GENERATION, 3)
    assert agreement == Agreement("adopted", 6, 0, decided(0, 5))
    assert [applies(r, agreement) for r in records] == [(), (1,)]


def test_a_step_that_one_section_had_not_prepared_is_dropped() -> None:
    records = [rank(0, copy(0, 5, mark=(0, 5))), rank(1, copy(1, 5))]
    assert agree(2, records, GENERATION, 3) == Agreement("dropped", 5, 0, None)


def test_a_replica_that_had_not_prepared_copies() -> None:
    records = [
        rank(0, copy(0, 5, mark=(0, 5))),
        rank(1, copy(0, 5)),
    ]
    agreement = agree(1, records, GENERATION, 3)
    assert (agreement.outcome, agreement.step) == ("adopted", 6)
    assert applies(records[1], agreement) == ()
    assert moves(1, records, agreement, {0: (0, 1)}) == (Move(0, 0, 1),)


def test_a_mark_of_another_generation_does_not_complete_a_step() -> None:
    records = [rank(0, copy(0, 5, mark=(1, 5))), rank(1, copy(1, 5, mark=(0, 5)))]
    assert agree(2, records, GENERATION, 3).outcome == "dropped"


def test_a_mark_on_a_section_that_has_moved_on_is_of_the_past() -> None:
    records = [rank(0, copy(0, 6, mark=(0, 5))), rank(1, copy(1, 6, mark=(0, 5)))]
    agreement = agree(2, records, GENERATION, 3)
    assert (agreement.outcome, agreement.step) == ("same", 6)
    assert [applies(r, agreement) for r in records] == [(), ()]


def test_a_section_without_a_copy_is_restored_with_all_others() -> None:
    records = [rank(0, copy(0, 5)), rank(1, copy(1, -1)), rank(2)]
    agreement = agree(2, records, GENERATION, 3)
    assert agreement == Agreement("restored", 3, GENERATION, None)
    everybody = {0: (0,), 1: (1, 2)}
    assert moves(2, records, agreement, everybody) == (
        Move(0, None, 0),
        Move(1, None, 1),
        Move(1, None, 2),
    )


def test_a_first_start_restores_the_checkpoint_of_step_0() -> None:
    agreement = agree(1, [rank(0), rank(1)], 1, 0)
    assert agreement == Agreement("restored", 0, 1, None)


def test_equal_versions_of_different_origin_are_not_mixed() -> None:
    records = [rank(0, copy(0, 6, origin=1)), rank(1, copy(1, 6, origin=2))]
    assert agree(2, records, GENERATION, 3).outcome == "restored"


def test_a_common_older_state_is_better_than_an_older_checkpoint() -> None:
    records = [
        rank(0, copy(0, 9, origin=2)),
        rank(1, copy(0, 6, origin=1)),
        rank(2, copy(1, 6, origin=1)),
    ]
    assert agree(2, records, GENERATION, 3) == Agreement("dropped", 6, 1, None)
    assert agree(2, records, GENERATION, 7).outcome == "restored"


def test_a_lagging_section_whose_decision_is_lost_cannot_catch_up() -> None:
    # Section 0 was copied after it was applied: its contribution did not come along.
    records = [rank(0, copy(0, 6)), rank(1, copy(1, 5, mark=(0, 5)))]
    assert agree(2, records, GENERATION, 3).outcome == "restored"


# --- moves ----------------------------------------------------------------------------------


def test_load_is_spread_over_replicas() -> None:
    both = [copy(k, 5) for k in range(4)]
    records = [rank(0, *both), rank(1, *both), rank(2), rank(3)]
    agreement = agree(4, records, GENERATION, 0)
    owners = dict.fromkeys(range(4), (2, 3))
    sources = [move.source for move in moves(4, records, agreement, owners)]
    assert sources.count(0) == sources.count(1) == 4


def test_a_rank_that_has_a_section_receives_nothing() -> None:
    records = [rank(0, copy(0, 5), copy(1, 5)), rank(1, copy(1, 4))]
    agreement = agree(2, records, GENERATION, 0)
    assert moves(2, records, agreement, {0: (0,), 1: (1,)}) == (Move(1, 0, 1),)


# --- fold and the wire ----------------------------------------------------------------------

FINITE = st.floats(0, 1e300, allow_nan=False)
SHARES = st.lists(st.tuples(FINITE, FINITE, FINITE, st.booleans()), min_size=1)


@given(SHARES, st.randoms(use_true_random=False))
def test_a_fold_has_the_same_bits_in_whatever_order_shares_come(
    values: list[tuple[float, float, float, bool]], random: Random
) -> None:
    shares = [Contribution(k, *value) for k, value in enumerate(values)]
    mixed = list(shares)
    random.shuffle(mixed)
    decision = fold(1, 2, mixed, stop=True)
    assert decision == fold(1, 2, shares, stop=True)
    total = 0.0
    for one in shares:
        total += one.square_norm
    assert decision.square_norm == total
    assert decision.overflow == any(one.overflow for one in shares)


def test_a_record_survives_json() -> None:
    record = rank(3, copy(0, 5, mark=(1, 5)), copy(1, -1), decision=decided(1, 4))
    assert decode(RankRecord, encode(record)) == record
    without_origin = encode(copy(0, 5)).replace('"origin":0,', "")
    with pytest.raises(WireError, match="origin is missing"):
        decode(SectionRecord, without_origin)


# --- Whatever the records -------------------------------------------------------------------

NUM_SECTIONS = 3
MARKS = st.none() | st.tuples(st.integers(0, 2), st.integers(0, 3))
COPIES = st.builds(copy, st.integers(0, 2), st.integers(-1, 3), st.integers(0, 2), MARKS)


@st.composite
def fleets(draw: st.DrawFn) -> list[RankRecord]:
    records = []
    for number in range(draw(st.integers(1, 5))):
        held = draw(st.lists(COPIES, max_size=3, unique_by=lambda c: c.section))
        decision = draw(st.none() | st.builds(decided, st.integers(0, 2), st.integers(0, 3)))
        records.append(rank(number, *held, decision=decision))
    return records


def states_after(record: RankRecord, agreement: Agreement) -> dict[int, Mark]:
    states = {c.section: (c.version, c.origin) for c in record.sections}
    for section in applies(record, agreement):
        assert agreement.decision is not None
        states[section] = agreement.decision.step + 1, agreement.decision.generation
    return states


@given(fleets(), st.integers(0, 4), st.randoms(use_true_random=False))
def test_every_rank_concludes_the_same_from_the_same_records(
    records: list[RankRecord], checkpoint_step: int, random: Random
) -> None:
    agreement = agree(NUM_SECTIONS, records, GENERATION, checkpoint_step)
    mixed = list(records)
    random.shuffle(mixed)
    assert agree(NUM_SECTIONS, mixed, GENERATION, checkpoint_step) == agreement
    owners = {k: tuple(r.rank for r in records) for k in range(NUM_SECTIONS)}
    assert moves(NUM_SECTIONS, mixed, agreement, owners) == moves(
        NUM_SECTIONS, records, agreement, owners
    )


@given(fleets(), st.integers(0, 4), st.booleans())
def test_after_applying_and_moving_every_owner_stands_at_the_agreed_state(
    records: list[RankRecord], checkpoint_step: int, saves_only: bool
) -> None:
    agreement = agree(NUM_SECTIONS, records, GENERATION, checkpoint_step, saves_only=saves_only)
    wanted = (agreement.step, agreement.origin)
    states = {r.rank: states_after(r, agreement) for r in records}
    owners = {k: tuple(r.rank for r in records) for k in range(NUM_SECTIONS)}
    for move in moves(NUM_SECTIONS, records, agreement, owners):
        assert (move.source is None) == (agreement.outcome == "restored")
        if move.source is not None:
            assert states[move.source][move.section] == wanted
    received = {(m.section, m.target) for m in moves(NUM_SECTIONS, records, agreement, owners)}
    for k, ranks in owners.items():
        for r in ranks:
            assert ((k, r) in received) != (
                states[r].get(k) == wanted and agreement.outcome != "restored"
            )


@given(fleets(), st.integers(0, 4), st.booleans())
def test_no_agreement_is_older_than_the_checkpoint_or_a_state_all_hold(
    records: list[RankRecord], checkpoint_step: int, saves_only: bool
) -> None:
    agreement = agree(NUM_SECTIONS, records, GENERATION, checkpoint_step, saves_only=saves_only)
    held = [
        {
            (c.version, c.origin)
            for r in records
            for c in r.sections
            if c.section == k and c.version >= 0
        }
        for k in range(NUM_SECTIONS)
    ]
    common = [version for version, _ in set.intersection(*held)]
    assert agreement.step >= max([checkpoint_step, *common])
