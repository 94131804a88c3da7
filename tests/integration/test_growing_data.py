"""Data sets whose length changes while a job uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.manifest import read_manifest
from spottrain.storage.open import open_store
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec


def growing(folder: Path) -> tuple[JobSpec, Path, dict[str, str]]:
    spec = replace(job_spec(folder), entrypoint="odd_jobs:growing_job")
    file = folder / "length"
    file.write_text("64")
    return spec, file, {"LENGTH_FILE": str(file)}


def outcome(fleet: Fleet) -> str:
    """Wait for a mini-batch, or for what the user is told instead; return that."""

    def found(name: str, report: object) -> str | None:
        match report:
            case messages.UserCodeFailed():
                return report.message
            case messages.MinibatchCommitted():
                return "trained"
            case _:
                return None

    return fleet.wait_for("a mini-batch", found)


def test_workers_with_different_numbers_of_examples_do_not_train_together(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec, file, environment = growing(tmp_path)
    with Fleet(spec, "a", tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        first = fleet.initialise()
        file.write_text("96")
        fleet.add("b")
        fleet.wait_for("b", lambda name, r: name == "b" or None)
        fleet.run(make_plan(spec, 1, 2, "ab", NUM_SECTIONS), first)

        told = outcome(fleet)

    assert "64" in told
    assert "96" in told


@pytest.mark.rotated
def test_a_job_goes_on_with_as_many_examples_as_before_unless_its_code_is_another(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec, file, environment = growing(tmp_path)
    with Fleet(spec, "a", tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        fleet.run(plan, fleet.initialise())
        fleet.wait_for_end({"a"})
        last = fleet.newest_checkpoint()
    assert read_manifest(open_store(spec.checkpoint_path), last).datasets[0].length == 64

    file.write_text("96")
    spec = replace(spec, steps=spec.steps + 2)
    with Fleet(spec, "a", tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        fleet.run(plan, last)
        told = outcome(fleet)
        assert "64" in told
        assert "96" in told

    with Fleet(spec, "a", tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        fleet.run(plan, last, code="other")
        assert outcome(fleet) == "trained"
