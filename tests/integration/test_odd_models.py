"""Models and optimizers that are uncommon but allowed, on every shape the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration import odd_jobs
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.pipeline.model.skeleton import materialise
from spottrain.wire import messages
from spottrain.wire.model import Reduction


def weights(
    zygote: Zygote,
    folder: Path,
    job: str,
    shape: tuple[int, int],
    reduction: Reduction = "exact",
    **changes: Any,
) -> dict[str, bytes]:
    folder.mkdir()
    spec = replace(job_spec(folder, reduction, steps=3), entrypoint=f"odd_jobs:{job}")
    with Fleet(spec, "abcd"[: shape[0] * shape[1]], folder / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, *shape, "abcd", NUM_SECTIONS, **changes)
        return fleet.train(lambda _: plan, fleet.initialise())


def by_name(tensors: dict[str, bytes]) -> dict[str, bytes]:
    """Return tensors without their sections in front of their names."""
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items()}


@pytest.mark.rotated
@pytest.mark.parametrize(
    "job",
    [
        "frozen_job",
        "bfloat16_job",
        "float16_job",
        "shared_job",
        "unused_job",
        "detached_job",
        "attached_job",
        "conditional_job",
        "stateless_job",
        "recurrent_job",
    ],
)
def test_uncommon_models_train_to_the_same_bits_on_every_shape(
    zygote: Zygote, tmp_path: Path, job: str
) -> None:
    reference = weights(zygote, tmp_path / "1x1", job, (1, 1))

    assert weights(zygote, tmp_path / "4x1", job, (4, 1)) == reference
    # One micro-batch in one replica, three in the other: fewer than stages.
    uneven: dict[str, Any] = {"replica_bounds": (0, 1, 4)}
    assert weights(zygote, tmp_path / "uneven", job, (2, 2), **uneven) == reference
    assert weights(zygote, tmp_path / "chunks", job, (2, 2), chunks=2) == reference
    assert weights(zygote, tmp_path / "cut", job, (2, 1), segments=2) == reference


@pytest.mark.rotated
@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(
    ("job", "names"),
    [
        ("conditional_job", [f"blocks.{k}.never" for k in range(4)]),
        ("detached_job", ["blocks.0.up.weight", "blocks.1.norm.weight"]),
        ("unused_job", ["spare"]),
    ],
)
def test_parameters_that_get_no_gradient_do_not_decay(
    zygote: Zygote, tmp_path: Path, job: str, names: list[str], reduction: Reduction
) -> None:
    trained = by_name(weights(zygote, tmp_path / "2x2", job, (2, 2), reduction))

    begin = materialise(getattr(odd_jobs, job)(), seed=1)
    for name in names:
        first = begin.get_parameter(name).detach().numpy().tobytes()
        assert trained[name] == first, name


@pytest.mark.rotated
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_hooks_and_attributes_of_parameters_are_those_of_the_model(
    zygote: Zygote, tmp_path: Path, reduction: Reduction
) -> None:
    shape = (2, 2)
    trained = by_name(weights(zygote, tmp_path / "2x2", "attached_job", shape, reduction))

    begin = materialise(odd_jobs.attached_job(), seed=1).get_parameter("embedding.weight")
    rows = begin.detach().numpy().tobytes()
    half = len(rows) // 2
    assert trained["embedding.weight"][:half] == rows[:half]
    assert trained["embedding.weight"][half:] != rows[half:]


@pytest.mark.rotated
@pytest.mark.parametrize("job", ["frozen_job", "bfloat16_job", "float16_job"])
def test_uncommon_models_train_in_fast_mode(zygote: Zygote, tmp_path: Path, job: str) -> None:
    assert weights(zygote, tmp_path / "2x2", job, (2, 2), "fast")


@pytest.mark.rotated
@pytest.mark.parametrize("job", ["distributed_job", "initialising_job"])
def test_user_code_sees_no_process_group_but_its_own(
    zygote: Zygote, tmp_path: Path, job: str
) -> None:
    reference = weights(zygote, tmp_path / "reference", "plain_job", (1, 1))

    assert weights(zygote, tmp_path / "2x2", job, (2, 2)) == reference


@pytest.mark.rotated
def test_secrets_stay_out_of_logs_and_reports(zygote: Zygote, tmp_path: Path) -> None:
    token, log = "tok-0a1b2c", tmp_path / "log"
    spec = replace(job_spec(tmp_path), entrypoint="odd_jobs:leaking_job", secrets=("MY_TOKEN",))
    with Fleet(spec, "a", log, zygote, {"MY_TOKEN": token}) as fleet:
        fleet.ready()
        fleet.run(make_plan(spec, 1, 1, "a", NUM_SECTIONS), fleet.initialise())
        failed = fleet.wait_for(
            "error", lambda _, r: r if isinstance(r, messages.UserCodeFailed) else None
        )
        fleet.wait_for("end", lambda _, r: isinstance(r, messages.GenerationBroken) or None)

    assert "cannot log in with ***" in failed.message
    assert token not in failed.traceback
    assert "uses ***" in log.read_text()
    assert token not in log.read_text() + str(fleet.history)


@pytest.mark.rotated
def test_a_section_without_anything_to_train_is_calibrated(zygote: Zygote, tmp_path: Path) -> None:
    spec = replace(job_spec(tmp_path), entrypoint="odd_jobs:frozen_job")
    with Fleet(spec, "a", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        fleet.machines["a"].send(messages.Calibrate())
        profile = fleet.wait_for(
            "profile",
            lambda _, r: r.profile if isinstance(r, messages.Calibrated) else None,
        )

    backwards_s = [section.backward_s for section in profile.microbatches[0].sections]
    assert 0 < backwards_s[0] < max(backwards_s[1:]) / 2  # it takes to do nothing


def test_held_out_examples_without_weight_have_no_loss(zygote: Zygote, tmp_path: Path) -> None:
    spec = replace(job_spec(tmp_path, steps=1), entrypoint="odd_jobs:weightless_job")
    with Fleet(spec, "a", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        fleet.run(plan, fleet.initialise(), evaluate=True)

        assert fleet.wait_for_end({"a"})

    assert not [r for _, r in fleet.history if isinstance(r, messages.Evaluated)]


def test_an_evaluation_does_not_pile_up_what_the_next_stage_cannot_take(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec = replace(job_spec(tmp_path, steps=0), entrypoint="odd_jobs:hurried_job")
    notes = tmp_path / "notes"
    notes.touch()
    with Fleet(spec, "ab", tmp_path / "log", zygote, {"NOTES": str(notes)}) as fleet:
        fleet.ready()
        plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS)
        fleet.run(plan, fleet.initialise())

        assert fleet.wait_for_end({"a", "b"})

    assert len(notes.read_text().splitlines()) == 2 * 50
    assert not notes.with_suffix(".hurried").exists()
