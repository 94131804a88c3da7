"""Planned morphs: live workers change shape, nothing is read from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders import slots_of
from tests.integration.fleet import Fleet, Host, Zygote, make_plan, read_weights
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.wire import messages
from spottrain.wire.model import Reduction, StateHome

STEPS = 16
SLOWLY = {"TINY_SLEEP_S": "0.1"}
"""Slow enough that a wish to stop comes in before the last step is done."""

MORPHS = [
    pytest.param([(2, 2), (3, 1), (1, 4), (4, 1)], id="2x2-3x1-1x4-4x1"),
    pytest.param([(1, 1), (2, 1), (2, 2), (1, 3)], id="1x1-2x1-2x2-1x3"),
    pytest.param([(4, 1), (1, 1), (2, 2), (1, 2)], id="4x1-1x1-2x2-1x2"),
]


@pytest.mark.rotated
@pytest.mark.parametrize("shapes", MORPHS)
def test_planned_morphs_keep_pids_and_open_no_checkpoint(
    zygote: Zygote, tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    spec = job_spec(tmp_path / "reference", steps=STEPS)
    with Fleet(spec, "a", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        reference = fleet.train(lambda _: plan, fleet.initialise())
    spec = job_spec(tmp_path, steps=STEPS)
    known: set[str] = set()

    with Fleet(spec, "abcd", tmp_path / "log", zygote, SLOWLY) as fleet:
        fleet.ready()
        checkpoint = fleet.initialise()
        for number, (depth, width) in enumerate(shapes):
            plan = make_plan(spec, depth, width, "abcd", NUM_SECTIONS)
            planned = {slot.vm_id for slot in plan.slots}
            donors = slots_of(sorted(known - planned))
            fleet.run(plan, checkpoint, donors)
            known |= planned
            fleet.wait_for_step(number + 1)
            if number < len(shapes) - 1:
                fleet.stop()
            done = fleet.wait_for_end(planned | {donor.vm_id for donor in donors})
            assert done == (number == len(shapes) - 1)
            checkpoint_is_gone = tmp_path / "checkpoints" / checkpoint / "manifest.json"
            checkpoint_is_gone.unlink(missing_ok=True)
        pids = fleet.pids()

    assert read_weights(Path(spec.checkpoint_path)) == reference
    assert all(len(of_slot) == 1 for of_slot in pids.values())
    started = [
        r
        for _, r in fleet.history
        if isinstance(r, messages.GenerationStarted) and r.generation > 1
    ]
    assert [r.sections_loaded for r in started] == [0] * len(started)


@pytest.mark.rotated
@pytest.mark.parametrize("state", ["host", "device"])
def test_planned_morphs_leave_groups_on_devices_and_keep_pids(
    zygote: Zygote, tmp_path: Path, state: StateHome
) -> None:
    spec = job_spec(tmp_path, steps=1000, network="nccl")
    hosts = {name: Host(device="tests.fakes.deferred:3") for name in "abcd"}
    with Fleet(spec, "abcd", tmp_path / "log", zygote, SLOWLY, hosts=hosts) as fleet:
        fleet.ready()
        checkpoint = fleet.initialise()
        for number, shape in enumerate([(1, 2), (2, 2), (1, 3)]):
            names = "abcd"[: shape[0] * shape[1]]
            plan = make_plan(spec, *shape, names, NUM_SECTIONS, state=state)
            donors = slots_of("d" if number == 2 else "")
            fleet.run(plan, checkpoint, donors)
            fleet.wait_for_step(number + 1)
            fleet.stop()
            fleet.wait_for_end({*names, *(slot.vm_id for slot in donors)})
        pids = fleet.pids()

    assert all(len(of_slot) == 1 for of_slot in pids.values())


def test_only_sections_whose_owner_changes_move(zygote: Zygote, tmp_path: Path) -> None:
    spec = job_spec(tmp_path, steps=1000)
    with Fleet(spec, "abc", tmp_path / "log", zygote, SLOWLY) as fleet:
        fleet.ready()
        checkpoint = fleet.initialise()
        fleet.run(make_plan(spec, 2, 1, "ab", NUM_SECTIONS), checkpoint)
        fleet.wait_for_step(1)
        fleet.stop()
        fleet.wait_for_end({"a", "b"})
        # Stage 0 stays where it is; c becomes a second replica of stage 1 in a 3x1.
        bounds = {"stage_bounds": (0, 2, 3, 4)}
        fleet.run(make_plan(spec, 3, 1, "abc", NUM_SECTIONS, **bounds), checkpoint)
        fleet.wait_for_step(2)
        moved = {
            name: r.sections_moved
            for name, r in fleet.history
            if isinstance(r, messages.GenerationStarted) and r.generation == 2
        }

    assert moved == {"a": 0, "b": 0, "c": 1}


@pytest.mark.rotated
def test_fast_and_exact_differ_by_rounding_only(zygote: Zygote, tmp_path: Path) -> None:
    losses: dict[Reduction, list[float]] = {}
    reductions: tuple[Reduction, ...] = ("fast", "exact")
    for reduction in reductions:
        (folder := tmp_path / reduction).mkdir()
        spec = job_spec(folder, reduction)
        with Fleet(spec, "ab", folder / "log", zygote) as fleet:
            fleet.ready()
            plan = make_plan(spec, 1, 2, "ab", NUM_SECTIONS)
            fleet.train(lambda _, plan=plan: plan, fleet.initialise())  # type: ignore[misc]
            losses[reduction] = [
                r.loss
                for name, r in fleet.history
                if isinstance(r, messages.MinibatchCommitted) and name == "a"
            ]

    assert losses["fast"] == pytest.approx(losses["exact"], rel=1e-4)
    assert losses["fast"][-1] < losses["fast"][0]
