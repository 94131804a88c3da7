"""A job that nothing happens to, from the command line."""

from __future__ import annotations

import pytest
from tests.checkpoints import verify
from tests.integration.jobs import STEPS
from tests.integration.undisturbed import Undisturbed, undisturbed

from spottrain.manifest import list_checkpoints
from spottrain.storage.open import open_store

FIELDS = [
    "state",
    "steps_done",
    "loss_first",
    "loss_last",
    "heldout_loss",
    "heldout_loss_first",
    "preemptions_noticed",
    "preemptions_unnoticed",
    "silent_losses",
    "plans",
    "minibatches_lost",
    "minibatches_recomputed",
    "usd_spent",
    "usd_on_demand",
    "examples_per_s",
    "wall_s",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory)


def test_it_ends_by_itself_with_exit_code_0(job: Undisturbed) -> None:
    assert job.answer.code == 0, job.answer.err
    assert job.answer.report["state"] == "succeeded"
    assert job.answer.report["steps_done"] == STEPS


def test_it_learns(job: Undisturbed) -> None:
    report = job.answer.report
    assert report["heldout_loss"] < report["heldout_loss_first"]
    assert report["loss_last"] < report["loss_first"]


def test_its_report_has_all_fields(job: Undisturbed) -> None:
    report = job.answer.report
    assert [field for field in FIELDS if report.get(field) is None] == []
    (plan,) = report["plans"]
    assert {
        "generation": 1,
        "from_step": 0,
        "to_step": STEPS,
        "reason": "start",
    }.items() <= plan.items()
    workers = plan["pipeline_depth"] * plan["data_parallel_width"]
    assert workers in (1, 2), "two do not always pay, by what was measured"
    assert 0 < report["usd_spent"] < report["usd_on_demand"]
    assert report["minibatches_lost"] == report["minibatches_recomputed"] == 0
    assert report["interruptions"] == []


def test_it_leaves_a_checkpoint_of_its_end(job: Undisturbed) -> None:
    newest, *older = list_checkpoints(open_store(job.checkpoints))
    assert newest.step == STEPS
    verify(open_store(job.checkpoints), newest.name)
    assert [entry.name for entry in (newest, *older)] == job.answer.report["checkpoints"]


def test_it_leaves_no_process_and_no_port(job: Undisturbed) -> None:
    assert job.processes_left == 0
    assert not job.port_left


def test_plain_lines_tell_its_progress_where_there_is_no_terminal(
    job: Undisturbed,
) -> None:
    lines = job.answer.err.splitlines()
    assert any(f"/{STEPS}  loss " in line for line in lines)
    assert any("generation 1 trains" in line for line in lines)
