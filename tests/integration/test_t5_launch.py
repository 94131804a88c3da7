"""An encoder and a decoder from the command line: two stages, of which one is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import HERE, Job, trains, until, weights
from tests.view import View

from spottrain.varuna_manager.core.model.state import State

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.nightly

STAGE_BYTES = 2_600_000
"""Too little for the whole model, enough for half of it."""


def t5(folder: Path, name: str, **settings: Any) -> Job:
    job = Job(folder, name, entrypoint="t5_job:job", steps=60, profile=None, **settings)
    shutil.copy(HERE / "t5_job.py", job.folder / "workdir")
    return job


def two_stages_after(losses: int) -> Any:
    def found(state: State) -> bool:
        generation = View(state).current_generation
        shape = generation.plan.shape if generation is not None else ""
        lost = View(state).tally.preemptions_unnoticed
        return bool(trains(state)) and shape == "2x1" and lost == losses

    return found


def test_a_t5_in_two_stages_that_loses_a_machine_has_the_bits_of_one(tmp_path: Path) -> None:
    with t5(tmp_path, "one", resources={"max_vms": 1}) as alone:
        answer = alone.launch("-o", "json")
        assert answer.code == 0, answer.err
        wanted = weights(alone.checkpoint_root)
    zone = {"name": "a", "capacity": 2, "slot_memory_bytes": STAGE_BYTES}
    with t5(tmp_path, "two", resources={"max_vms": 2}, local={"zones": [zone]}) as job:
        job.pace(0.3)
        assert job.launch("--detach").code == 0
        job.until("two stages train", two_stages_after(0))
        job.market("kill", machine=1)
        job.market("capacity", zone="a", count=2)
        job.until("two stages train again", two_stages_after(1))
        job.pace(0.0)
        until("the end", lambda: not job.dir.is_managed())
        assert job.run("report", "two", "-o", "json").report["state"] == "succeeded"
        assert weights(job.checkpoint_root) == wanted
