"""What hangs is found, and what is merely slow is left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.adapt.hangs import STEPS, allowed_s, judge, patience_s
from spottrain.wire.model import ALL_RANKS, Doing, ProcessState, WorkerState

COMPUTES = WorkerState(
    slot=0, tasks=9, doing="compute", waits_for=None, still_s=0.0, process="idle"
)
WAITS = replace(COMPUTES, doing="wait", waits_for=ALL_RANKS)
FLOOR_S = 30.0

step_times = st.floats(0.01, 600.0)
doings = st.sampled_from(get_args(Doing))
processes = st.sampled_from(get_args(ProcessState))


@st.composite
def moving(draw: st.DrawFn, most_s: float) -> WorkerState:
    """A rank that began its newest task not longer ago than that."""
    doing: Doing = draw(doings)
    process: ProcessState = draw(processes)
    return replace(
        COMPUTES,
        doing=doing,
        waits_for=ALL_RANKS if doing == "wait" else None,
        process=process,
        still_s=draw(st.floats(0.0, most_s)),
    )


@given(step_times, st.booleans(), st.data())
def test_a_job_whose_ranks_go_from_task_to_task_is_never_broken_off(
    step_s: float, is_first: bool, data: st.DataObject
) -> None:
    """However long it commits nothing: a VM in bursts, an evaluation of hours."""
    quiet_s = patience_s(FLOOR_S, step_s)
    ranks = data.draw(st.lists(moving(0.99 * quiet_s), min_size=1, max_size=6))
    verdict = judge(dict(enumerate(ranks)), len(ranks), quiet_s, is_first=is_first)
    assert verdict.hung == ()
    assert not verdict.is_deadlock


@given(step_times, st.floats(1.0, STEPS - 1.0), st.data())
def test_a_vm_as_slow_as_the_whole_mini_batch_many_times_over_is_left_alone(
    step_s: float, slowness: float, data: st.DataObject
) -> None:
    """One task, a part of a mini-batch, takes as long as so many mini-batches did."""
    slow = replace(data.draw(moving(1.0)), still_s=slowness * step_s)
    verdict = judge({0: slow, 1: WAITS}, 2, patience_s(FLOOR_S, step_s), is_first=False)
    assert verdict.hung == ()


@given(step_times, st.floats(0.0, 0.99))
def test_compiling_before_the_first_mini_batch_takes_its_time(step_s: float, share: float) -> None:
    """In this process, or waiting for one that compiles."""
    quiet_s = patience_s(FLOOR_S, step_s)
    for process in ("busy", "idle"):
        compiles = replace(COMPUTES, process=process, still_s=share * 10 * quiet_s)
        ranks = {0: compiles, 1: replace(WAITS, still_s=compiles.still_s)}
        assert judge(ranks, 2, quiet_s, is_first=True).hung == ()


@given(step_times, st.booleans(), doings, st.data())
def test_a_rank_that_is_stopped_hangs_whatever_it_did(
    step_s: float, is_first: bool, doing: Doing, data: st.DataObject
) -> None:
    quiet_s = patience_s(FLOOR_S, step_s)
    stopped = replace(COMPUTES, doing=doing, process="stopped", still_s=quiet_s)
    others = data.draw(st.lists(moving(0.99 * quiet_s), max_size=5))
    ranks = dict(enumerate([*others, stopped]))
    verdict = judge(ranks, len(ranks), quiet_s, is_first=is_first)
    assert verdict.hung == (len(others),)
    assert verdict.awaited[0] == len(others), "it has been longest at its task"


@given(step_times, st.floats(1.0, 100.0), st.integers(0, 5))
def test_code_that_sleeps_for_ever_is_found_among_ranks_that_wait(
    step_s: float, times: float, place: int
) -> None:
    still_s = times * patience_s(FLOOR_S, step_s)
    ranks = {rank: replace(WAITS, still_s=still_s) for rank in range(6)}
    ranks[place] = replace(COMPUTES, still_s=still_s)
    verdict = judge(ranks, 6, patience_s(FLOOR_S, step_s), is_first=False)
    assert (verdict.hung, verdict.awaited) == ((place,), (place,))


@given(st.floats(0.0, 1e6), step_times)
def test_a_rank_that_waits_does_not_hang_as_long_as_one_does_not_wait(
    still_s: float, step_s: float
) -> None:
    ranks = {0: replace(WAITS, still_s=still_s), 1: COMPUTES}
    verdict = judge(ranks, 2, patience_s(FLOOR_S, step_s), is_first=False)
    assert verdict.hung == ()
    assert not verdict.is_deadlock
    assert verdict.awaited == (1,)


def test_ranks_that_all_wait_for_long_have_lost_a_message() -> None:
    ranks = {0: replace(WAITS, still_s=59.0), 1: replace(WAITS, still_s=500.0)}
    assert not judge(ranks, 2, FLOOR_S, is_first=False).is_deadlock
    ranks[0] = replace(WAITS, still_s=60.0)
    assert judge(ranks, 2, FLOOR_S, is_first=False).is_deadlock
    assert not judge(ranks, 3, FLOOR_S, is_first=False).is_deadlock, "one is not known"


@pytest.mark.parametrize(
    ("doing", "process", "allowed"),
    [
        ("compute", "idle", 30.0),
        ("evaluate", "idle", 30.0),
        ("update", "idle", 30.0),
        ("compute", "busy", 300.0),
        ("compute", "blocked", 300.0),
        ("data", "idle", 300.0),
        ("save", "idle", 900.0),
        ("save", "stopped", 30.0),
        ("wait", "stopped", 30.0),
    ],
)
def test_what_takes_its_time_is_given_it(
    doing: Doing, process: ProcessState, allowed: float
) -> None:
    rank = replace(COMPUTES, doing=doing, process=process)
    assert allowed_s(rank, FLOOR_S, is_first=False) == allowed
