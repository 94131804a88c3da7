"""Checkpoints of real workers, where the disk does not do as it is told."""

from __future__ import annotations

from pathlib import Path

from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.wire import messages


def test_a_checkpoint_is_saved_though_an_old_one_cannot_be_deleted(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec = job_spec(tmp_path)
    stuck = tmp_path / "checkpoints" / "step-0-g0-00000001" / "manifest.json"
    stuck.mkdir(parents=True)  # where a file should be: it cannot be unlinked
    with Fleet(spec, "a", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        fleet.train(lambda _: plan, fleet.initialise())

    reports = [r for _, r in fleet.history]
    saved = [r.step for r in reports if isinstance(r, messages.CheckpointSaved)]
    failed = [r.reason for r in reports if isinstance(r, messages.CheckpointFailed)]
    assert (saved[0], saved[-1]) == (0, spec.steps)
    assert len(failed) == len(saved) - 1
    assert "cannot delete" in failed[0]
