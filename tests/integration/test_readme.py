"""The commands at the top of README, run as they stand there."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.fakes.gpus import FAKE_NVML, VARIABLE, FakeGpus
from tests.integration.jobs import DEADLINE_S, SPOTTRAIN, Answer
from tests.view import View

from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import read_state

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of a new user; commands run where README is."""
    monkeypatch.chdir(ROOT)
    return tmp_path / "home"


@pytest.fixture(params=[0, 1], ids=["without a GPU", "with a GPU"])
def machine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has so many GPUs, as NVML says."""
    gpus = FakeGpus(tmp_path / "nvml.json", count=request.param)
    path = f"{FAKE_NVML}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(VARIABLE, str(gpus.file))


def run(home: Path, command: str) -> Answer:
    done = subprocess.run(
        [*SPOTTRAIN, *shlex.split(command)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "SPOTTRAIN_HOME": str(home), "OMP_NUM_THREADS": "1"},
        timeout=DEADLINE_S,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def state_of(home: Path, job: str) -> State:
    return read_state(JobDir(home / "jobs" / job))


@pytest.mark.rotated
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("job", ["quickstart", "pool/thesis", "pool/urgent"])
def test_its_jobs_have_a_plan_on_any_machine(home: Path, job: str) -> None:
    done = run(home, f"plan examples/{job}.yaml -o json")
    assert done.code == 0, done.err
    depth, _, width = done.report["plan"].partition("x")
    assert int(depth) * int(width) == 4


@pytest.mark.nightly
@pytest.mark.usefixtures("machine")
def test_the_quickstart_trains_to_its_end_through_all_that_happens(home: Path) -> None:
    assert "\nscripts/quickstart\n" in README
    script = (ROOT / "scripts" / "quickstart").read_text()
    assert '.venv/bin/spottrain quickstart "$@"' in script
    done = run(home, f"quickstart {home.parent / 'mine'}")
    assert done.code == 0, done.err
    tally = View(state_of(home, "quickstart")).tally
    assert tally.preemptions_unnoticed > 0, "a killed machine"
    assert tally.preemptions_noticed > 0, "a preemption with notice"
    assert tally.silent_losses > 0, "one that stops answering"


@pytest.mark.nightly
def test_the_pool_gives_vms_to_the_most_urgent_job_and_ends_by_itself(
    home: Path,
) -> None:
    """Also on a machine with too little of everything: jobs that wait can share it, and each
    comes once the one before it has trained."""
    command = "pool create examples/pool.yaml --until-done"
    assert f"\n.venv/bin/spottrain {command}\n" in README
    done = run(home, command)
    assert done.code == 0, done.err
    ended = {name: state_of(home, name) for name in ("thesis", "paper", "urgent")}
    for state in ended.values():
        assert state.outcome is not None
        assert state.outcome.kind == "succeeded"
    taken = [vm for vm in View(ended["urgent"]).ledger.closed if "." in vm]
    assert taken, "VMs that other jobs had before"
    assert View(ended["thesis"]).tally.preemptions_unnoticed == 1, "its VM is killed"
    assert View(ended["thesis"]).progress.minibatches_lost == 0
