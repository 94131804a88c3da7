"""Workloads of pools: the formats in which they are read, and those that are drawn."""

from __future__ import annotations

import json
import math

import pytest

from spottrain.errors import ConfigError
from spottrain.varuna_manager.pool.simulation import generate
from spottrain.varuna_manager.pool.simulation.workload import (
    read_gavel,
    read_jobs,
    read_throughputs,
)

KINDS = ("fast", "slow")
CSV = """worker_type,job_type,scale_factor,steps_per_s
fast,LM (batch size 8),1,4.0
fast,LM (batch size 8),2,9.0
fast,LM (batch size 4),2,12.0
slow,LM (batch size 8),1,1.0
slow,A3C,1,2.0
fast,A3C,1,2.0
"""
ROW = "LM (batch size 8)\tpython3 main.py\tlm\t-n\t1\t4000\t2\t5\t-1.000000\t60"


def test_a_trace_is_read_with_throughputs_at_a_constant_batch() -> None:
    [one] = read_gavel(ROW, read_throughputs(CSV), KINDS)
    assert (one.work, one.size, one.weight, one.arrived_s) == (4000, 2, 5, 60)
    assert one.deadline_s == math.inf
    assert one.throughputs == ({1: 4.0, 2: 9.0}, {1: 1.0})
    # Two VMs are credited twice one: 9 is more than linear.
    assert one.elastic() == ({1: 4.0, 2: 8.0}, {1: 1.0})
    assert one.fixed() == ({2: 9.0}, {})
    [small] = read_gavel(ROW.replace("\t2\t5", "\t1\t5"), read_throughputs(CSV), KINDS)
    # Half the batch on each of two: 12 steps of 4 examples are 6 of 8.
    assert small.throughputs[0] == {1: 4.0, 2: 6.0}


def test_throughputs_are_read_from_gavels_json() -> None:
    document = {"fast": {"('A3C', 1)": {"null": 2.5, "('A3C', 1)": [1.0, 1.0]}}}
    assert read_throughputs(json.dumps(document)) == {("fast", "A3C", 1): 2.5}


def test_deadlines_are_multiples_of_the_time_on_the_fastest_kind() -> None:
    row = ROW.replace("-1.000000", "1.5")
    [one] = read_gavel(row, read_throughputs(CSV), KINDS)
    assert one.deadline_s == pytest.approx(60 + 1.5 * 4000 / 9)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("one\ttwo", "line 1: got 2 columns; give 10"),
        (ROW.replace("4000", "many"), "line 1: steps: must be a valid number"),
        (ROW.replace("4000", "0"), "line 1: steps: must be greater than 0: got '0'"),
        (ROW.replace("\t2\t5", "\t2\tnan"), "line 1: priority: must be a finite"),
        (ROW.replace("LM", "XX"), "no throughput of XX"),
    ],
)
def test_other_traces_are_refused(text: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        read_gavel(text, read_throughputs(CSV), KINDS)


def test_jobs_of_our_own_format_are_read() -> None:
    one = {"name": "a", "work": 10, "size": 2, "throughputs": {"fast": {"2": 3}}}
    [found] = read_jobs(json.dumps({"jobs": [one]}), KINDS)
    assert found.throughputs == ({2: 3.0}, {})
    with pytest.raises(ConfigError, match="two jobs of one name"):
        read_jobs(json.dumps({"jobs": [one, one]}), KINDS)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"work": 0}, r"jobs\[0\].work: must be greater than 0: got 0"),
        ({"size": 0}, r"jobs\[0\].size: must be greater than 0"),
        ({"weight": -1}, r"jobs\[0\].weight: must be greater than or equal to 0.001"),
        ({"arrived_s": -4}, r"jobs\[0\].arrived_s: must be greater than or equal"),
        ({"wight": 2}, r"jobs\[0\].wight: unknown key; did you mean weight"),
        ({"throughputs": {"fast": {"0": 3}}}, "must be greater than 0"),
    ],
)
def test_numbers_that_no_job_has_are_refused(change: dict[str, object], wanted: str) -> None:
    one = {"name": "a", "work": 10, "size": 2, "throughputs": {"fast": {"2": 3}}}
    with pytest.raises(ConfigError, match=wanted):
        read_jobs(json.dumps({"jobs": [{**one, **change}]}), KINDS)


def test_drawn_workloads_are_those_of_the_paper() -> None:
    assert [j.size for j in generate.virtualflow_three(3)] == [4, 2, 4]
    twenty = generate.virtualflow_twenty(3)
    assert len(twenty) == 20
    assert all(1 <= j.size <= 16 for j in twenty)
