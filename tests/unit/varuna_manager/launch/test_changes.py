"""What may be different when a job goes on, and what may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.varuna_manager.stored_jobs import events, submit
from tests.unit.varuna_manager.story import SETTINGS
from tests.view import changed

from spottrain.errors import ConfigError
from spottrain.varuna_manager.core.model.commands import Outcome
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.daemon.main import ManagerError
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.launch.changes import (
    Changes,
    change,
    check_steps,
    remarks,
    unfitting,
)
from spottrain.wire.model import CodeDetails, Detail


def listed(**texts: str) -> tuple[Detail, ...]:
    return tuple(Detail(name=name, text=text) for name, text in texts.items())


DETAILS = CodeDetails(
    fingerprint="model",
    sections=(("a",), ("b",)),
    parameters=listed(a="(2, 3) float32 trained", b="(3,) float32 trained"),
    optimizer_state=listed(a_exp_avg="(2, 3) float32"),
    optimizer="torch.optim.adamw.AdamW",
    optimizer_settings=listed(param_groups="1", lr="0.01", weight_decay="0.1"),
    batch=("(9,) int64",),
    dataset_len=50,
    heldout_sets=("heldout",),
    metrics=(),
    learning_rate=0.01,
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"parameters": listed(a="(2, 4) float32 trained", b="(3,) float32 trained")},
            "other parameters: a was (2, 3) float32 trained, is (2, 4) float32 trained",
        ),
        (
            {"parameters": listed(a="(2, 3) float32 trained")},
            "missing parameters: b",
        ),
        (
            {"parameters": (*DETAILS.parameters, *listed(c="() float32"))},
            "new parameters: c",
        ),
        (
            {"sections": (("a", "b"),)},
            "the model is cut into other sections (2, now 1)",
        ),
        ({"optimizer_state": ()}, "missing optimizer state: a_exp_avg"),
    ],
)
def test_what_weights_depend_on_is_refused_by_name(changes: dict[str, object], line: str) -> None:
    assert list(unfitting(DETAILS, replace(DETAILS, **changes))) == [line]  # type: ignore[arg-type]


def test_all_else_may_change_and_is_told() -> None:
    new = replace(
        DETAILS,
        optimizer="torch.optim.adam.Adam",
        optimizer_settings=listed(param_groups="1", lr="0.01", weight_decay="0.2"),
        dataset_len=60,
        heldout_sets=(),
        learning_rate=0.005,
    )
    assert not list(unfitting(DETAILS, new))
    assert list(remarks(DETAILS, new, 8)) == [
        "optimizer: torch.optim.adamw.AdamW, now torch.optim.adam.Adam",
        "examples: 50, now 60",
        "held-out sets: heldout, now none",
        "learning rate in mini-batch 9: 0.01, now 0.005",
        "optimizer's weight_decay: 0.1, now 0.2",
    ]
    assert not list(remarks(DETAILS, DETAILS, 8))


def state(done: int, steps: int, kind: str = "succeeded") -> State:
    outcome = Outcome(kind=kind, exit_code=0, reason="over")  # type: ignore[arg-type]
    settings = replace(SETTINGS, spec=replace(SETTINGS.spec, steps=steps))
    over = State(phase=JobPhase.ENDED, settings=settings, outcome=outcome)
    return changed(over, step=done)


@given(done=st.integers(0, 20), steps=st.integers(1, 20))
def test_a_job_that_has_not_succeeded_takes_any_steps_that_are_not_done(
    done: int, steps: int
) -> None:
    stopped = state(done, 20, "stopped")
    check_steps(stopped, None)
    if steps >= done:
        check_steps(stopped, steps)
    else:
        with pytest.raises(ConfigError, match=f"{done} steps are done already"):
            check_steps(stopped, steps)


@pytest.mark.parametrize(
    ("done", "steps", "message"),
    [
        (20, None, "all 20 steps are done; --steps with more"),
        (20, 20, "all 20 steps are done"),
        (12, 40, "over; to train its weights on launch a new job with init_from: job"),
    ],
)
def test_a_job_that_has_succeeded_needs_more_steps(
    done: int, steps: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_steps(state(done, 20), steps)


def test_a_job_that_has_succeeded_takes_more_steps() -> None:
    check_steps(state(20, 20), 21)


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return submit(tmp_path, str(tmp_path / "checkpoints"))


def refusal(job: JobDir, changes: Changes) -> str:
    """Return why a change is refused; nothing may have changed."""
    before = job.workdir.read_bytes(), events(job)
    with pytest.raises(ConfigError) as refused:
        change(job, changes, print)
    assert before == (job.workdir.read_bytes(), events(job))
    return str(refused.value)


def test_a_job_that_runs_is_not_changed(job: JobDir) -> None:
    with job.locked(ManagerError("there is another one")):
        message = refusal(job, Changes(steps=9))
    assert "stop it with 'spottrain stop demo'" in message


def test_a_job_that_has_ended_for_good_is_not_changed(job: JobDir) -> None:
    job.mark_down()
    assert "init_from: demo" in refusal(job, Changes(code=True))


def test_a_workdir_that_is_not_here_is_to_be_named(job: JobDir) -> None:
    changes = Changes(code=True, workdir=job.path / "elsewhere")
    assert "name it with --workdir" in refusal(job, changes)
