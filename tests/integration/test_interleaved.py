"""Every schedule that a plan may name, in the runtime: the same bits from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.faults import environment_of
from tests.integration.fleet import Fleet, Zygote, make_plan, read_weights
from tests.integration.struck_runs import NUM_SECTIONS, Undisturbed, job_spec

from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Reduction
from spottrain.wire.plan import Plan

DEEP_SECTIONS = 8
STEPS = 4
INPUT_BYTES = 2 * 8 * 16 * 4
NAMES = "abcdef"
SLOWLY = {"TINY_SLEEP_S": "0.1"}
INTERLEAVED: dict[str, Any] = {"chunks": 2}


def deep_spec(folder: Path, reduction: Reduction = "exact") -> JobSpec:
    """Twelve virtual nodes, and no checkpoint before the last step."""
    return replace(
        job_spec(folder, reduction, steps=STEPS),
        entrypoint="odd_jobs:deep_job",
        minibatch_size=24,
        checkpoint_every_steps=100,
    )


def train_deep(
    zygote: Zygote, folder: Path, depth: int, width: int, **changes: Any
) -> tuple[dict[str, bytes], Fleet]:
    folder.mkdir(exist_ok=True)
    spec = deep_spec(folder, changes.pop("reduction", "exact"))
    names = NAMES[: depth * width]
    with Fleet(spec, names, folder / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, depth, width, names, DEEP_SECTIONS, **changes)
        return fleet.train(lambda _: plan, fleet.initialise()), fleet


@pytest.fixture(scope="module")
def undisturbed(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], Fleet]:
    return train_deep(zygote, tmp_path_factory.mktemp("undisturbed"), 1, 1)


def reports(fleet: Fleet, kind: type[Any]) -> list[Any]:
    return [r for _, r in fleet.history if isinstance(r, kind)]


def assert_memory_is_released(fleet: Fleet, inputs: int) -> None:
    """Peaks do not grow by what each mini-batch would leave behind.

    Inputs that wait for their forward make them differ a little. The first mini-batch
    is counted otherwise.
    """
    peaks: dict[str, list[int]] = {}
    for name, r in fleet.history:
        if isinstance(r, messages.MinibatchCommitted) and r.step > 1:
            peaks.setdefault(name, []).append(r.peak_bytes)
    for seen in peaks.values():
        assert seen[-1] - seen[0] < (len(seen) - 1) * inputs * INPUT_BYTES


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("depth", "width", "chunks", "recompute"),
    [
        (2, 1, 2, False),
        (2, 1, 4, True),
        (2, 2, 2, True),
        (2, 2, 2, False),
        (2, 3, 3, False),
        (3, 2, 2, True),
        (4, 1, 2, False),
    ],
)
def test_an_interleaved_pipeline_trains_to_the_same_bits(
    zygote: Zygote,
    undisturbed: tuple[dict[str, bytes], Fleet],
    tmp_path: Path,
    depth: int,
    width: int,
    chunks: int,
    recompute: bool,
) -> None:
    result, fleet = train_deep(zygote, tmp_path, depth, width, chunks=chunks, recompute=recompute)

    assert result == undisturbed[0]
    (evaluated,) = reports(fleet, messages.Evaluated)
    assert evaluated.loss == reports(undisturbed[1], messages.Evaluated)[0].loss
    assert_memory_is_released(fleet, 12 // width * chunks)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("schedule", "bound", "recompute"),
    [
        ("varuna", 1, True),
        ("varuna", None, False),
        ("1f1b", None, True),
        ("1f1b", 2, False),
        ("gpipe", None, False),
        ("gpipe", 2, True),
    ],
)
def test_any_other_schedule_and_bound_trains_to_the_same_bits(
    zygote: Zygote,
    undisturbed: tuple[dict[str, bytes], Fleet],
    tmp_path: Path,
    schedule: str,
    recompute: bool,
    bound: int | None,
) -> None:
    result, _ = train_deep(
        zygote,
        tmp_path,
        3,
        1,
        schedule=schedule,
        recompute=recompute,
        in_flight_bound=bound,
    )

    assert result == undisturbed[0]


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("depth", "width", "changes"),
    [
        (1, 1, {"segments": 3}),
        (1, 2, {"segments": 8}),
        (2, 1, {"segments": 2, "schedule": "1f1b"}),
        (3, 1, {"segments": 3, "schedule": "gpipe"}),
        (2, 2, {"segments": 9, "in_flight_bound": 2}),
        (2, 1, {"segments": 2, "chunks": 2}),
    ],
)
def test_recompute_in_segments_trains_to_the_same_bits(
    zygote: Zygote,
    undisturbed: tuple[dict[str, bytes], Fleet],
    tmp_path: Path,
    depth: int,
    width: int,
    changes: dict[str, Any],
) -> None:
    result, fleet = train_deep(zygote, tmp_path, depth, width, **changes)

    assert result == undisturbed[0]
    (evaluated,) = reports(fleet, messages.Evaluated)
    assert evaluated.loss == reports(undisturbed[1], messages.Evaluated)[0].loss
    assert_memory_is_released(fleet, 12 // width * 8)


@pytest.mark.rotated
def test_fast_mode_differs_from_exact_by_rounding_only(
    zygote: Zygote, undisturbed: tuple[dict[str, bytes], Fleet], tmp_path: Path
) -> None:
    _, fleet = train_deep(zygote, tmp_path, 2, 2, reduction="fast", **INTERLEAVED)

    losses = {r.step: r.loss for r in reports(fleet, messages.MinibatchCommitted)}
    exact = {r.step: r.loss for r in reports(undisturbed[1], messages.MinibatchCommitted)}
    assert losses == pytest.approx(exact, rel=1e-4)


@pytest.mark.rotated
def test_deaths_and_morphs_between_layouts_open_no_checkpoint(
    zygote: Zygote, undisturbed: tuple[dict[str, bytes], Fleet], tmp_path: Path
) -> None:
    spec = deep_spec(tmp_path)
    marks = [tmp_path / "mark-0", tmp_path / "mark-1"]
    script = [
        {"hook": "backward", "rank": 1, "step": 1, "action": "kill_worker"},
        {"hook": "recompute", "rank": 0, "step": 2, "action": "kill_worker"},
    ]
    for blow, mark in zip(script, marks, strict=True):
        blow["mark"] = str(mark)
    environment = environment_of(script)
    shapes: list[tuple[int, int, dict[str, Any]]] = [
        (2, 2, INTERLEAVED),
        (3, 1, {"segments": 2}),
        (2, 1, {"chunks": 4}),
    ]
    waiting = iter(shapes)

    def choose(machines: Sequence[str]) -> Plan:
        depth, width, changes = next(waiting)
        if fleet.generation == 1:
            (tmp_path / "checkpoints" / checkpoint / "manifest.json").unlink()
        return make_plan(spec, depth, width, machines, DEEP_SECTIONS, **changes)

    with Fleet(spec, "abcd", tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        checkpoint = fleet.initialise()
        result = fleet.train(choose, checkpoint)

    assert all(mark.exists() for mark in marks)
    assert result == undisturbed[0]
    assert fleet.committed_twice() == []
    later = [r for r in reports(fleet, messages.GenerationStarted) if r.generation > 1]
    assert later
    assert [r.sections_loaded for r in later] == [0] * len(later)


def test_going_over_to_another_layout_moves_only_what_changes_its_owner(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec = job_spec(tmp_path, steps=1000)
    with Fleet(spec, "ab", tmp_path / "log", zygote, SLOWLY) as fleet:
        fleet.ready()
        checkpoint = fleet.initialise()
        for number, changes in enumerate(({}, INTERLEAVED, {})):
            plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS, **changes)
            fleet.run(plan, checkpoint)
            fleet.wait_for_step(number + 1)
            fleet.stop()
            fleet.wait_for_end({"a", "b"})
        moved = [
            (r.generation, r.sections_moved, r.sections_loaded)
            for r in reports(fleet, messages.GenerationStarted)
        ]

    # Of (0, 1) and (2, 3), sections 1 and 2 go over to (0, 2) and (1, 3), and back.
    assert sorted(moved) == [(1, 0, 2)] * 2 + [(2, 1, 0)] * 2 + [(3, 1, 0)] * 2


@pytest.mark.rotated
@pytest.mark.parametrize("layouts", [(INTERLEAVED, {}), ({}, INTERLEAVED)])
def test_a_checkpoint_of_one_layout_is_read_under_the_other(
    zygote: Zygote,
    undisturbed_in: Undisturbed,
    tmp_path: Path,
    layouts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    before, after = layouts
    spec = job_spec(tmp_path)

    with Fleet(spec, "ab", tmp_path / "log", zygote, SLOWLY) as fleet:
        fleet.ready()
        fleet.run(make_plan(spec, 2, 1, "ab", NUM_SECTIONS, **before), fleet.initialise())
        fleet.wait_for_step(1)
        fleet.stop(checkpoint=True)
        assert not fleet.wait_for_end({"a", "b"})
        checkpoint = reports(fleet, messages.CheckpointSaved)[-1].name
    with Fleet(spec, "cdef", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, 2, 2, "cdef", NUM_SECTIONS, **after)
        fleet.run(plan, checkpoint)
        assert fleet.wait_for_end(set("cdef"))

    assert {r.sections_loaded for r in reports(fleet, messages.GenerationStarted)} == {2}
    assert read_weights(Path(spec.checkpoint_path)) == undisturbed_in("fp32")


def test_workers_take_the_microbatch_size_from_the_plan(zygote: Zygote, tmp_path: Path) -> None:
    results = []
    for size in (2, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        spec = replace(job_spec(folder, steps=2), microbatch_size=size)
        with Fleet(spec, "ab", folder / "log", zygote) as fleet:
            fleet.ready()
            plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS, microbatch_size=4)
            results.append(fleet.train(lambda _, plan=plan: plan, fleet.initialise()))  # type: ignore[misc]

    assert results[0] == results[1]
