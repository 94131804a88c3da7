"""Reading traces: all formats, put in order, refused where they make no sense."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.spot import spot_group

from spottrain.morphing.errors import PlanError
from spottrain_lab.traces.traces import (
    VmInterval,
    joined,
    limited,
    parse_trace,
)

EVENTS = "1000,add,a\n1000,add,b\n4000,remove,a\n5000,add,c\n11000,remove,c\n"
COUNTS = "2021-12-11, 00:00:00, 3\n2021-12-11, 00:00:10, 1\n2021-12-11, 00:01:00, 2\n"


def samples(counts: Sequence[float], **metadata: Any) -> str:
    """Return a trace as SkyPilot writes it, a look every ten seconds."""
    return json.dumps({"metadata": {"gap_seconds": 10} | metadata, "data": counts})


def test_numbers_at_even_times_are_read_as_their_rows_would_be() -> None:
    rows = "\n".join(
        f"2021-12-11, 00:{at // 60:02}:{at % 60:02}, {count}"
        for at, count in zip(range(0, 80, 10), (3, 1, 1, 1, 1, 1, 2, 2), strict=True)
    )
    trace = parse_trace(samples([3, 1, 1, 1, 1, 1, 2]), seed=4)
    assert trace == parse_trace(rows, seed=4)
    assert trace.end_s == 70  # the last number holds for a gap, too


def test_events_become_lives_from_the_first_row_on() -> None:
    trace = parse_trace(EVENTS)
    assert trace.lives == (
        VmInterval(vm_id="a", from_s=0.0, until_s=3.0),
        VmInterval(vm_id="b", from_s=0.0, until_s=math.inf),
        VmInterval(vm_id="c", from_s=4.0, until_s=10.0),
    )
    assert trace.end_s == 10.0
    assert trace.notices == ()
    assert trace.max_vms() == 2
    assert trace.vm_s() == 3 + 10 + 6


def test_counts_become_lives_that_add_up_to_them() -> None:
    trace = parse_trace(COUNTS)
    assert trace.end_s == 60.0
    assert sorted(vm.until_s for vm in trace.lives) == [10.0, 10.0, math.inf, math.inf]
    assert trace.vm_s() == 3 * 10 + 50


def test_a_seed_draws_which_vms_go() -> None:
    first = [parse_trace(COUNTS, seed=seed).lives for seed in (1, 1)]
    assert first[0] == first[1]
    assert len({parse_trace(COUNTS, seed=seed).lives for seed in range(9)}) > 1


@given(st.integers(0, 99))
def test_rows_out_of_order_are_sorted_with_a_notice(seed: int) -> None:
    rows = COUNTS.splitlines()
    random.Random(seed).shuffle(rows)
    trace = parse_trace("\n".join(rows))
    assert trace.lives == parse_trace(COUNTS).lives
    disordered = rows != COUNTS.splitlines()
    assert [n for n in trace.notices if "sorted" in n] == list(trace.notices)
    assert bool(trace.notices) == disordered


def test_duplicate_rows_are_left_out_with_a_notice() -> None:
    trace = parse_trace(EVENTS + "11000,remove,c\n\n")
    assert trace.lives == parse_trace(EVENTS).lives
    assert trace.notices == ("1 duplicate rows left out",)


def test_rows_that_change_nothing_are_left_out_with_a_notice() -> None:
    trace = parse_trace(EVENTS + "12000,remove,stranger\n13000,add,b\n")
    assert len(trace.lives) == 3
    assert trace.notices[0].startswith("2 rows changed nothing")


def test_a_name_may_be_used_again() -> None:
    trace = parse_trace("0,add,a\n1000,remove,a\n2000,add,a\n3000,remove,a\n")
    assert [(vm.from_s, vm.until_s) for vm in trace.lives] == [(0.0, 1.0), (2.0, 3.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the trace is empty"),
        ("0,add,a\n", "the trace has no length"),
        ("0,add,a\n99999999999999999999,remove,a\n", "must last 315576000 s"),
        (
            "0,add,a\n1,kill,a\n",
            "row 2 of the trace has an unknown format: got '1,kill,a'",
        ),
        ("0,add,a\n-1,remove,a\n", "row 2"),
        ("0,add,a\nnan,remove,a\n", "row 2"),
        (EVENTS + COUNTS, "row 6"),
        (COUNTS + "2021-12-11, 00:02:00, -1\n", "row 4"),
        (COUNTS + "2021-13-11, 00:02:00, 1\n", "row 4"),
        ("at,what,who\n" + EVENTS, "row 1"),
        (COUNTS + "2021-12-11, 00:02:00, 1000000000\n", "row 4"),
        (
            "{" + "x" * 9999,
            r"cannot be read \(JSONDecodeError\): got '{x{59}\.\.\.'; write",
        ),
        ("x" * 9999, r"got 'x{60}\.\.\.'; write"),
        ("{}", "cannot be read .KeyError"),
        (samples([1, 0], gap_seconds="a minute"), "gap_seconds of the trace must be"),
        (
            samples([1, 0], gap_seconds=0),
            "gap_seconds of the trace must be seconds: got 0",
        ),
        (samples([]), "data of the trace must be a list"),
        (samples([1, -1]), "number 1 in data of the trace .* got -1"),
        (samples([1, 0.5]), "number 1 in data"),
        (samples([True]), "number 0 in data"),
        (samples([10**400]), "number 0 in data"),
        (samples([math.nan]), "number 0 in data"),
    ],
)
def test_nonsense_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_trace(text)


@given(st.integers(0, 999))
def test_no_life_ends_before_it_begins(seed: int) -> None:
    trace = spot_group(seed)
    assert all(0 <= vm.from_s < vm.until_s for vm in trace.lives)
    assert trace.lives == tuple(sorted(trace.lives, key=lambda vm: vm.from_s))


@given(st.integers(0, 500), st.integers(1, 13))
def test_a_smaller_fleet_has_what_is_there_up_to_its_size(seed: int, vms: int) -> None:
    trace = spot_group(seed)
    small = limited(trace, vms)
    moments = sorted({vm.from_s for vm in trace.lives} | {0.0, trace.end_s / 3})
    for at_s in moments:
        there, held = (
            sum(vm.from_s <= at_s < vm.until_s for vm in one.lives) for one in (trace, small)
        )
        assert held == min(there, vms)


def test_zones_are_one_group_until_the_shortest_trace_ends() -> None:
    trace, other = parse_trace(EVENTS), parse_trace(COUNTS)
    both = joined([trace, other])
    assert both.end_s == 10.0
    assert both.max_vms() == 5
    assert [vm.vm_id for vm in both.lives][:2] == ["0/a", "0/b"]
    assert joined([trace]) == trace
