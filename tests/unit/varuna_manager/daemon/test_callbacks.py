"""Calls of a user's functions, by real processes, in the folder of a job that nobody trains."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import model_facts
from tests.unit.varuna_manager.measured_jobs import evaluated, store, trained
from tests.unit.varuna_manager.story import SETTINGS

from spottrain.errors import ConfigError
from spottrain.manifest import Owner, write_owner
from spottrain.storage.open import open_store
from spottrain.varuna_manager.config.job import parse_config
from spottrain.varuna_manager.config.track import TrackConfig
from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.daemon.callbacks import Callbacks
from spottrain.varuna_manager.daemon.tracking import FINISH_S, Trackers
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Cursor, GenerationBegan, Measurements
from spottrain.varuna_manager.launch.workdir import pack
from spottrain.varuna_manager.offers.checks import check_callbacks

JOBS = Path(__file__).parents[3] / "integration"
LIMIT_S = 10.0
BEGINNING = GenerationBegan(generation=1, step=0), evaluated(1, 0), trained(1, 1)


@pytest.fixture
def measured() -> Measurements:
    measurements = store()
    measurements.write(BEGINNING)
    return measurements


def job(folder: Path, entrypoint: str, *callbacks: str) -> JobDir:
    job = JobDir(folder / "job")
    (job.path / "tracking").mkdir(parents=True)
    code = folder / "code"
    code.mkdir()
    for name in ("tiny_job.py", "callback_jobs.py"):
        shutil.copy(JOBS / name, code)
    config = parse_config(
        {
            "name": "job",
            "entrypoint": f"callback_jobs:{entrypoint}",
            "workdir": str(code),
            "minibatch_size": 8,
            "steps": 5,
            "env": {"TOLD": str(folder)},
        },
        "job.yaml",
    )
    facts = replace(
        model_facts(),
        heldout_sets=("heldout",),
        callbacks=callbacks or ("on_evaluate",),
        callback_limit_s=LIMIT_S,
    )
    job.write(config, facts)
    pack(code, [Path("tiny_job.py"), Path("callback_jobs.py")], job.workdir)
    return job


def call(job: JobDir, measured: Measurements, *options: str) -> str:
    """Let a new process's worth of calls happen; return what failed."""
    with closing(Callbacks(job, "", *options)) as callbacks:
        cursor = callbacks.begin()
        while (page := measured.changes(cursor)).cursor != cursor:
            callbacks.take(page)
            cursor = Cursor(*page.cursor)
        return callbacks.idle(ends=False)


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "on_evaluate").read_text().splitlines()]


def test_a_step_is_called_for_once_and_the_newest_of_several_alone(
    tmp_path: Path, measured: Measurements
) -> None:
    here = job(tmp_path, "job")
    assert call(here, measured) == ""
    assert call(here, measured) == "", "a process after a restart"
    (only,) = told(tmp_path)
    assert only == {
        "job": "job",
        "step": 0,
        "metrics": {"heldout/loss": 1000.0},
        "folder": None,
        "outcome": "",
    }
    measured.write([evaluated(1, 1), trained(1, 2), evaluated(1, 2), trained(1, 3)])
    measured.write([GenerationBegan(generation=2, step=1), trained(2, 2)])
    assert call(here, measured) == ""
    measured.write([evaluated(2, 2), trained(2, 3), evaluated(2, 3)])
    assert call(here, measured) == ""
    assert [one["step"] for one in told(tmp_path)] == [0, 1, 3]


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("entrypoint", "says"),
    [
        ("hanging_job", "no answer within 10 s"),
        ("dying_job", "ended with -9"),
        ("filling_job", "free some"),
    ],
)
def test_a_call_that_hangs_dies_or_fills_the_disk_is_ended_and_told(
    tmp_path: Path, measured: Measurements, entrypoint: str, says: str
) -> None:
    here = job(tmp_path, entrypoint)
    # Others may use the disk: it ends whether there are more bytes free or fewer.
    free = shutil.disk_usage(tmp_path).free
    reserve_bytes = free - (256 << 20) if entrypoint == "filling_job" else 0
    trouble = call(here, measured, "--reserve", str(reserve_bytes))
    assert trouble.startswith("on_evaluate of step 0: ")
    assert says in trouble
    assert not (here.path / "callbacks").exists(), "what it has written is gone"
    assert call(here, measured) == trouble, "it is told until a call succeeds, and not repeated"


def test_a_call_that_fails_is_told_in_status_and_to_the_manager_whose_job_goes_on(
    tmp_path: Path,
) -> None:
    here = job(tmp_path, "dying_job")
    submitted = e.JobSubmitted(at_s=1.0, settings=SETTINGS)
    with closing(Journal(here.journal)) as journal:
        journal.record(submitted)
    write_owner(open_store(here.checkpoints), Owner(uid=SETTINGS.uid, name="job"))
    with closing(Measurements(here.measurements)) as file:
        file.write(BEGINNING)

    async def first_failure() -> str:
        told = asyncio.get_running_loop().create_future()

        def tell(trouble: str) -> None:
            if not told.done():
                told.set_result(trouble)

        trackers = Trackers(here, TrackConfig(), LIMIT_S)
        trackers.on_failed_call = tell
        trackers.wake()
        trouble: str = await told
        await trackers.finish(FINISH_S)
        return trouble

    trouble = asyncio.run(first_failure())
    assert trouble.startswith("on_evaluate of step 0: ")
    assert json.loads(here.tracking_status.read_text()) == {"callbacks": trouble}
    state, _ = step.step(State(), submitted)
    failed = e.CommandFailed(at_s=2.0, command="callback", vm_ids=(), reason=trouble)
    after, _ = step.step(state, failed)
    assert after.last_message == f"callback failed: {trouble}"
    assert after.phase is JobPhase.ACTIVE


def test_callbacks_are_refused_where_the_manager_has_no_torch() -> None:
    facts = replace(model_facts(), callbacks=("on_best", "on_end"))
    check_callbacks(facts, on_vm=False)
    with pytest.raises(ConfigError, match=r"on_best, on_end .* no torch; remove them"):
        check_callbacks(facts, on_vm=True)
