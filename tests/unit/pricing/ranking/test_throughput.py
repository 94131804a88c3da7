"""What fleets do: plans made once, and bounds on them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pricing.ranked import JOB, MACHINE, THROUGHPUTS, TOO_SMALL, machines

from spottrain.pricing.ranking.machine import MachineShape
from spottrain.pricing.ranking.throughput import ThroughputCache

FOR_MONEY = ThroughputCache(replace(JOB, objective="examples_per_dollar"))


@given(machines, st.integers(1, 5), st.sampled_from([THROUGHPUTS, FOR_MONEY]))
def test_no_plan_beats_the_bounds(
    machine: MachineShape, vms: int, throughputs: ThroughputCache
) -> None:
    exact = throughputs.of(machine, vms)
    if exact.why_not:
        return
    tighter = throughputs.tighter_bound(machine, vms)
    best = throughputs.upper_bound(machine, vms)
    each = [p.examples_per_s / p.vms for p in (exact, tighter, best)]
    assert each[0] <= each[1] * (1 + 1e-9)
    assert each[1] <= each[2] * (1 + 1e-9)
    assert best.vms <= exact.vms <= vms


def test_a_fleet_is_planned_once() -> None:
    throughputs = ThroughputCache(JOB)
    first = throughputs.of(MACHINE, 2)
    assert throughputs.of(MACHINE, 2) is first


def test_faster_gpus_and_networks_train_more() -> None:
    slow, fast = (THROUGHPUTS.of(replace(MACHINE, speed=v), 2) for v in (1.0, 2.0))
    assert fast.examples_per_s > 1.5 * slow.examples_per_s
    narrow, wide = (THROUGHPUTS.of(replace(MACHINE, network_bytes_per_s=v), 4) for v in (1e7, 1e10))
    assert wide.examples_per_s > narrow.examples_per_s


def test_where_the_model_does_not_fit_it_says_why() -> None:
    throughput = THROUGHPUTS.of(TOO_SMALL, 4)
    assert throughput.why_not
    assert THROUGHPUTS.tighter_bound(TOO_SMALL, 4).why_not in ("", throughput.why_not)


def test_machines_that_a_plan_for_money_leaves_out_are_not_paid_for() -> None:
    slow_links = replace(MACHINE, network_bytes_per_s=1e6)
    assert FOR_MONEY.of(slow_links, 4).vms < 4
    assert THROUGHPUTS.of(slow_links, 4).vms == 4
    held = ThroughputCache(replace(JOB, objective="examples_per_dollar"), min_vms=3)
    assert held.of(slow_links, 4).vms >= 3


def test_all_that_vms_send_each_other_counts() -> None:
    throughputs = ThroughputCache(replace(JOB, schedule="varuna"))
    throughput = throughputs.of(MACHINE, 2)
    assert throughput.shape in ("1x2", "2x1")
    gradients, activations = 2 * 4 * 16 * 10**6, 2 * 16 * 10**6
    assert throughput.sent_bytes == (gradients if throughput.shape == "1x2" else activations)
    assert throughputs.of(replace(MACHINE, gpus=2), 1).sent_bytes == 0
