"""Run-length-encoded schedules, and the interleaved schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.lists import compact_schedule
from spottrain.morphing.schedules.schedule import (
    Task,
    Work,
    expand,
    format_schedule,
    max_in_flight,
)
from spottrain.wire.plan import ScheduleKind

kinds: st.SearchStrategy[ScheduleKind] = st.sampled_from(["varuna", "1f1b", "gpipe"])


@given(kinds, st.integers(1, 6), st.integers(1, 60), st.booleans())
def test_facts_of_a_compact_list_are_those_of_the_list_at_length(
    kind: ScheduleKind, depth: int, count: int, recompute: bool
) -> None:
    schedule = compact_schedule(kind, depth, count, recompute=recompute)
    lists = expand(schedule)
    assert schedule.pipeline_depth == len(lists) == depth
    assert schedule.num_tasks == sum(map(len, lists))
    assert schedule.max_in_flight == tuple(map(max_in_flight, lists))
    assert format_schedule(schedule) == [" ".join(map(str, tasks)) for tasks in lists]


def test_a_billion_micro_batches_take_little_room() -> None:
    for kind in ("varuna", "1f1b", "gpipe", "interleaved"):
        chunks = 2 if kind == "interleaved" else 1
        schedule = compact_schedule(kind, 4, 1_000_000_000, recompute=False, chunks=chunks)
        assert schedule.num_tasks == 4 * 2 * chunks * 1_000_000_000
        patterns = [pattern for runs in schedule.lists for pattern, _ in runs]
        assert sum(map(len, patterns)) < 10_000


def test_varunas_rule_goes_on_after_a_fast_forward_as_it_began() -> None:
    """Begin and end of a long list are those of a shorter one of the same phase."""
    long, short = (
        format_schedule(compact_schedule("varuna", 5, count, recompute=True))
        for count in (3000, 300)
    )
    for a, b in zip(long, short, strict=True):
        works_a, works_b = ("".join(word[0] for word in text.split()) for text in (a, b))
        assert works_a[:300] == works_b[:300]
        assert works_a[-300:] == works_b[-300:]


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_an_interleaved_stage_does_everything_once_and_a_chunk_in_order(
    depth: int, chunks: int, groups: int, recompute: bool
) -> None:
    count = depth * groups
    schedule = compact_schedule("interleaved", depth, count, recompute=recompute, chunks=chunks)
    for p, tasks in enumerate(expand(schedule)):
        assert len(set(tasks)) == len(tasks)
        for chunk in range(chunks):
            loss = p == depth - 1 and chunk == chunks - 1
            for work in Work:
                own = [t.microbatch for t in tasks if t[0] is work and t.chunk == chunk]
                does = work is not Work.RECOMPUTE or (recompute and not loss)
                assert own == list(range(count if does else 0))


@given(st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_one_chunk_interleaved_is_1f1b(depth: int, groups: int, recompute: bool) -> None:
    count = depth * groups
    one = compact_schedule("interleaved", depth, count, recompute=recompute)
    plain = compact_schedule("1f1b", depth, count, recompute=recompute)
    assert expand(one) == expand(plain)


def test_interleaved_goes_through_the_chunks_in_groups() -> None:
    schedule = compact_schedule("interleaved", 2, 4, recompute=False, chunks=2)
    assert format_schedule(schedule) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]
    assert str(Task(Work.BACKWARD, 3, 1)) == "B3.1"


@pytest.mark.parametrize(
    ("kind", "count", "chunks", "message"),
    [
        ("interleaved", 6, 2, "multiples of the stages: got 6 for 4; take 4 or 8"),
        ("interleaved", 3, 2, "got 3 for 4; take 4"),
        ("interleaved", 4, 0, "needs 1 to 42 chunks per stage: got 0"),
        ("interleaved", 4, 43, "needs 1 to 42 chunks per stage: got 43"),
        ("varuna", 10**40, 1, "at most 5e.18 tasks: got 1000"),
        (
            "1f1b",
            4,
            2,
            "only interleaved schedules have several chunks per stage: got 2 for 1f1b",
        ),
    ],
)
def test_chunks_that_do_not_fit_are_refused(
    kind: ScheduleKind, count: int, chunks: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        compact_schedule(kind, 4, count, recompute=True, chunks=chunks)
