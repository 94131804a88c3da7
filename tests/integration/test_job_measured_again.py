"""A job whose profile is that of a busy machine, on one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import HERE, Job

from spottrain.morphing.plan.profiles import is_noisy
from spottrain.wire import messages


def busy_profile(folder: Path) -> Path:
    """Write down that all took a hundred times as long, and varied."""
    profile: dict[str, Any] = json.loads((HERE / "tiny_profile.json").read_text())
    for one in profile["microbatches"]:
        for section in one["sections"]:
            for name in ("forward_s", "backward_s", "recompute_s"):
                section[name] *= 100
            section["forward_spread"] = section["backward_spread"] = 1.0
    path = folder / "busy.json"
    path.write_text(json.dumps(profile))
    return path


@pytest.mark.rotated
def test_it_is_measured_again_while_workers_keep_what_they_have(tmp_path: Path) -> None:
    settings = {"profile": str(busy_profile(tmp_path)), "steps": 100_000}
    with Job(tmp_path, "busy", resources={"max_vms": 1}, **settings) as job:
        assert job.launch("--detach").code == 0
        state = job.until("it is measured", lambda s: s if is_calm(s) else None)
        step = state.history.progress.step
        state = job.until_trains(step + 20)
        started = [report for _, report in job.reports(messages.GenerationStarted)]
        assert started[-1].step >= step > 0
        assert state.history.progress.minibatches_recomputed == 0
        assert job.run("down", job.name).code == 0


def is_calm(state: Any) -> bool:
    profile = state.preparation.profile
    return profile is not None and not is_noisy(profile)
