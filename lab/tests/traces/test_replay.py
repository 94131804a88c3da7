"""Replays: hand-made stories, books that add up, and every rule below the bound."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.tiers import costly
from tests.unit.morphing.conftest import DATA, REPOSITORY
from tests.unit.morphing.spot import lives, shapes, spot_group, workload

from spottrain.codec import decode
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.workload import Workload
from spottrain_lab.traces.look_ahead import LookAhead, predicted, sampled
from spottrain_lab.traces.redundancy import Redundancy
from spottrain_lab.traces.replay import (
    CostModel,
    FleetView,
    MorphRule,
    ReplayResult,
    TimeUse,
    replay,
)
from spottrain_lab.traces.rules import (
    RULES,
    AtEveryChange,
    RestartAll,
    WhenItPays,
    WidthOnly,
    compare,
)
from spottrain_lab.traces.shapes import Shape, Shapes
from spottrain_lab.traces.traces import Trace, parse_trace

FOREVER = math.inf
QUICK = CostModel(morph_s=5.0, join_s=0.0, restart_s=50.0, checkpoint_every_s=100.0)


class Fixed:
    """Shapes that are as fast as a test says, by number of VMs; state moves at once."""

    def __init__(self, **step_s: float) -> None:
        self.workload: Workload = workload(minibatch_size=64)
        self.known = {
            int(name[1:]): Shape(depth=1, width=int(name[1:]), step_s=step, move_bytes=0)
            for name, step in step_s.items()
        }

    def best(self, slots: int, lag_share: float = 0.0) -> Shape | None:
        fitting = [n for n in self.known if n <= slots]
        return self.known[max(fitting)] if fitting else None


class TwoDeep(Fixed):
    """Pipelines of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.known = {
            2 * width: Shape(depth=2, width=width, step_s=20.0 / width, move_bytes=0)
            for width in (1, 2)
        }


def play(
    trace: Trace,
    known: object,
    rule: type[AtEveryChange | Redundancy],
    room: CostModel = QUICK,
) -> ReplayResult:
    assert isinstance(known, Shapes | Fixed)
    return replay(trace, known, rule(known), room)  # type: ignore[arg-type]


def spent(outcome: ReplayResult) -> dict[str, float]:
    return {k.value: v for k, v in outcome.seconds.items() if v}


def test_undisturbed_training_pauses_once() -> None:
    outcome = play(lives((0, FOREVER), end_s=100), Fixed(n1=10.0), WhenItPays)
    assert outcome.examples == 9 * 64
    assert spent(outcome) == {"paused": 5.0, "training": 90.0, "unfinished": 5.0}
    assert outcome.usd == pytest.approx(100 / 3600 * 2.0)
    assert outcome.morphs == 1


def test_a_loss_drops_the_mini_batch_and_no_more_where_a_replica_survives() -> None:
    trace = lives((0, FOREVER), (0, 58), end_s=100)
    outcome = play(trace, Fixed(n1=10.0, n2=5.0), WhenItPays)
    assert spent(outcome) == {
        "paused": 10.0,
        "training": 50.0 + 30.0,
        "dropped": 3.0,
        "unfinished": 7.0,
    }
    assert outcome.examples == (10 + 3) * 64


def test_without_a_replica_all_since_the_checkpoint_is_lost() -> None:
    trace = lives((0, 58), (70, FOREVER), end_s=120)
    outcome = play(trace, Fixed(n1=10.0), WhenItPays)
    assert spent(outcome) == {
        "paused": 10.0,
        "recomputed": 50.0,
        "dropped": 3.0,
        "waiting": 12.0,
        "training": 40.0,
        "unfinished": 5.0,
    }
    safe = replace(QUICK, checkpoint_every_s=20.0)
    assert play(trace, Fixed(n1=10.0), WhenItPays, safe).examples == (4 + 4) * 64


def test_a_loss_of_both_holders_of_a_stage_falls_back_and_of_others_does_not() -> None:
    def after(*lost: int) -> float:
        spans = [(0, 61.0 if i in lost else FOREVER) for i in range(4)]
        outcome = play(lives(*spans, end_s=100), TwoDeep(), WhenItPays)
        return outcome.seconds[TimeUse.RECOMPUTED]

    # VMs a and b hold stage 0, c and d stage 1.
    assert [after(0, 1), after(2, 3)] == [50.0, 50.0]
    assert [after(0, 2), after(1, 3), after(0)] == [0.0, 0.0, 0.0]


def test_a_notice_of_a_mini_batchs_time_saves_it() -> None:
    trace = lives((0, FOREVER), (0, 58), end_s=100)
    known = Fixed(n1=10.0, n2=5.0)
    noticed = play(trace, known, WhenItPays, replace(QUICK, notice_s=6.0))
    assert noticed.seconds[TimeUse.DROPPED] == 0
    late = play(trace, known, WhenItPays, replace(QUICK, notice_s=2.0))
    assert late.seconds[TimeUse.DROPPED] == 3.0


def test_a_vm_that_only_passes_by_is_never_used() -> None:
    trace = lives((0, FOREVER), (10, 60), end_s=100)
    slow = replace(QUICK, join_s=50.0)
    assert play(trace, Fixed(n1=10.0, n2=1.0), AtEveryChange, slow).morphs == 1


def test_growth_that_gains_little_waits_where_the_original_morphs_at_once() -> None:
    trace = lives((0, FOREVER), (20, FOREVER), end_s=1000)
    known = Fixed(n1=10.0, n2=9.9)
    assert play(trace, known, AtEveryChange).morphs == 2
    patient = play(trace, known, WhenItPays)
    assert patient.morphs == 2, "after 500 s in peace"
    assert play(replace(trace, end_s=400), known, WhenItPays).morphs == 1


def test_width_only_keeps_the_first_depth() -> None:
    depths = set()

    class Seen(WidthOnly):
        def recover(self, view: FleetView) -> Shape | None:
            shape = super().recover(view)
            depths.add(shape.depth if shape else None)
            return shape

    trace = lives(*[(0, FOREVER)] * 6, *[(30, FOREVER)] * 8, end_s=100)
    assert play(trace, shapes(6), Seen).morphs == 2
    assert len(depths) == 1


def test_restarts_throw_back_to_the_checkpoint_at_every_change() -> None:
    trace = lives((0, FOREVER), (165, FOREVER), end_s=300)
    outcome = play(trace, Fixed(n1=10.0, n2=5.0), RestartAll)
    assert spent(outcome) == {
        "paused": 100.0,
        "training": 50.0 + 85.0,
        "recomputed": 60.0,
        "dropped": 5.0,
    }


def test_a_trace_with_too_few_vms_says_how_many_are_needed() -> None:
    trace = lives((0, FOREVER), (0, FOREVER), end_s=10)
    with pytest.raises(PlanError, match=r"got at most 2 GPUs of .* needs 6; take"):
        compare(trace, shapes(6), QUICK)


@pytest.mark.parametrize("name", ["morph_s", "checkpoint_every_s", "notice_s"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_constants_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"{name} must be"):
        CostModel(**{name: value})


@costly
@example(3147, 3, 30.0, 1.0)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 3, 6]),
    st.sampled_from([0.0, 2.0, 30.0]),
    st.sampled_from([0.0, 1.0, 20.0]),
)
def test_books_add_up_and_no_rule_beats_the_bound(
    seed: int, depth_at_least: int, notice_s: float, morph_s: float
) -> None:
    trace, known = spot_group(seed), shapes(depth_at_least)
    if known.best(trace.max_vms()) is None:
        return
    room = replace(QUICK, notice_s=notice_s, morph_s=morph_s, join_s=3.0)
    comparison = compare(trace, known, room)
    assert [o.rule for o in comparison.outcomes] == [rule.name for rule in RULES]
    for outcome in comparison.outcomes:
        assert sum(outcome.seconds.values()) == pytest.approx(trace.end_s)
        assert min(outcome.seconds.values()) >= -1e-6
        # A redundant plan's mini-batch outlives a loss, which the bound rules out.
        if outcome.rule != Redundancy.name:
            assert outcome.examples <= comparison.max_examples
    assert comparison == compare(trace, known, room)


@pytest.mark.nightly
@pytest.mark.parametrize(("fewest", "at_least"), [(1, 1.0), (3, 0.98)])
def test_over_many_groups_ours_is_the_best_rule(fewest: int, at_least: float) -> None:
    """Where the model barely fits, a second replica is worth what nobody can foresee."""
    totals = [0.0] * len(RULES)
    known, room = shapes(fewest), replace(QUICK, join_s=3.0)
    for seed in range(60):
        trace = spot_group(seed)
        comparison = compare(trace, known, room)
        for i, outcome in enumerate(comparison.outcomes):
            totals[i] += outcome.examples / max(1, comparison.max_examples)
    ours, *others = totals
    assert ours >= at_least * max(others)


# --- Baselines of the literature ----------------------------------------------------------


class Neighbours(TwoDeep):
    """The same pipelines; a VM that does two stages takes twice as long."""

    def at_depth(self, depth: int, slots: int) -> Shape | None:
        return self.best(slots)


class Covered(Redundancy):
    def _redundant(self, shape: Shape | None) -> Shape | None:
        return shape and replace(shape, covered_step_s=2 * shape.step_s)


def test_a_redundant_neighbour_finishes_the_mini_batch_more_slowly() -> None:
    # One pipeline of two VMs, mini-batches of 20 s from 5 s on; b is lost in the second.
    trace = lives((0, FOREVER), (0, 30), end_s=200)
    outcome = play(trace, Neighbours(), Covered)
    assert outcome.morphs == 1
    assert outcome.examples == 64 * (2 + 3), "ends at 25, 60, 100, 140, 180"
    assert spent(outcome) == {"paused": 5.0, "training": 175.0, "unfinished": 20.0}


def test_redundancy_does_not_survive_the_loss_of_two_neighbours() -> None:
    trace = lives((0, 30), (0, 30), (40, FOREVER), (40, FOREVER), end_s=100)
    outcome = play(trace, Neighbours(), Covered)
    assert outcome.seconds[TimeUse.RECOMPUTED] == 20.0
    trace = lives((0, 30), (0, FOREVER), (40, FOREVER), end_s=100)
    assert play(trace, Neighbours(), Covered).seconds[TimeUse.RECOMPUTED] == 0.0


def test_redundant_forwards_cost_only_what_does_not_fit_into_idle_time() -> None:
    known = shapes(3)
    rule = Redundancy(known)
    view = replay_view(known, usable=6)
    shape = rule.recover(view)
    assert shape is not None
    plain = known.at(shape.depth, shape.width)
    assert plain is not None
    assert plain.step_s <= shape.step_s <= 1.5 * plain.step_s
    assert shape.step_s < shape.covered_step_s <= 2 * plain.step_s


def replay_view(known: Shapes, usable: int) -> FleetView:
    return FleetView(
        now_s=0.0,
        usable=usable,
        shape=None,
        changed_at_s=0.0,
        losses_at_s=(),
        counts=[(0.0, usable)],
        covered=0,
        costs=QUICK,
    )


@given(st.lists(st.integers(0, 64), min_size=1, max_size=12))
def test_forecasts_stay_within_what_was_seen(samples: list[int]) -> None:
    found = predicted(samples)
    assert len(found) == 12
    assert all(0 <= count <= max(samples) for count in found)
    if len(set(samples)) == 1:
        assert set(found) == set(samples)


def test_a_falling_number_is_expected_to_fall_on() -> None:
    assert predicted([12, 11, 10, 9])[:3] == [8, 7, 6]
    assert predicted([8, 9, 8, 9])[:2] == [8, 9], "it swings"
    counts = [(0.0, 9), (100.0, 7), (170.0, 8)]
    assert sampled(counts, 200.0) == [9, 9, 7, 8]


def test_the_look_ahead_does_not_grow_for_vms_that_it_expects_to_lose() -> None:
    known = Fixed(n1=20.0, n2=10.0)
    rule = LookAhead(known)  # type: ignore[arg-type]
    view = replace(
        replay_view(known, usable=2),  # type: ignore[arg-type]
        now_s=180.0,
        shape=known.known[1],
        costs=replace(QUICK, morph_s=40.0),
    )
    grown = replace(view, counts=[(0.0, 1), (120.0, 2)])
    assert rule.leave_for(grown) == known.known[2]
    falling = replace(view, counts=[(0.0, 5), (60.0, 4), (120.0, 3), (175.0, 2)])
    assert rule.leave_for(falling) is None


# --- The real traces ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> Shapes:
    example = REPOSITORY / "examples" / "profiles" / "gpt2-2.5b-v100.json"
    return Shapes(decode(Workload, example.read_text()))


def real(name: str) -> Trace:
    return parse_trace((DATA / "traces" / name).read_text())


def test_real_traces_are_read_whole() -> None:
    events, counts = real("aws-p3-us-east.csv"), real("gcp-a100-us-east1-b.txt")
    assert (events.max_vms(), counts.max_vms()) == (32, 64)
    assert events.end_s == pytest.approx(11.37 * 3600, rel=1e-3)
    assert counts.end_s == pytest.approx(27.0 * 3600, rel=1e-3)
    assert events.notices == counts.notices == ()


def test_on_real_traces_ours_is_within_a_tenth_of_the_bound_on_the_mean(
    large: Shapes,
) -> None:
    shares = []
    for name in ("aws-p3-us-east.csv", "gcp-a100-us-east1-b.txt"):
        comparison = compare(real(name), large, CostModel())
        ours, *others = (o.examples for o in comparison.outcomes)
        shares.append(ours / comparison.max_examples)
        # On the calm trace a morph at every change does as well.
        assert ours >= 0.998 * max(others)
    assert sum(shares) / len(shares) >= 0.9


def test_the_p3_trace_is_replayed_within_five_seconds(large: Shapes) -> None:
    trace = real("aws-p3-us-east.csv")
    fresh = Shapes(large.workload)
    began_s = time.process_time()
    compare(trace, fresh, CostModel())
    assert time.process_time() - began_s < 60


def test_the_example_agrees_with_the_published_times(large: Shapes) -> None:
    """Varuna, table 7: measured mini-batch times of the 2.5B model, mini-batch 8192."""
    full = Shapes(replace(large.workload, minibatch_size=8192))
    measured_s = {(27, 2): 116.8, (18, 3): 96.6, (9, 7): 70.1, (6, 10): 75.2}
    for (depth, width), expected_s in measured_s.items():
        shape = full.at(depth, width)
        assert shape is not None
        assert shape.step_s == pytest.approx(expected_s, rel=0.1)
    assert large.workload.profile.origin == "written"


def test_every_rule_is_a_rule(large: Shapes) -> None:
    rules: list[MorphRule] = [rule(large) for rule in RULES]
    assert len({rule.name for rule in rules}) == len(RULES)
