"""``import spottrain`` drives jobs: answers and refusals, without a manager."""

from __future__ import annotations

import builtins
import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.varuna_manager.measured_jobs import evaluated, trained
from tests.unit.varuna_manager.stored_jobs import submit

import spottrain
from spottrain.errors import ConfigError, SpottrainError
from spottrain.varuna_manager.api import job as api
from spottrain.varuna_manager.api.actions import ManagerGoneError
from spottrain.varuna_manager.core.model.events import StopRequested
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements


@pytest.fixture
def demo(tmp_path: Path) -> spottrain.Job:
    """A job without a manager, which never rented anything."""
    submit(tmp_path, f"file://{tmp_path}/store")
    return spottrain.job("demo")


def stop(job: spottrain.Job) -> None:
    with closing(Journal(job.folder / "journal.sqlite")) as journal:
        journal.record(StopRequested(at_s=time.time(), by="a test", now=True))


def test_a_job_is_found_by_name_and_one_that_is_not_there_names_those_that_are(
    demo: spottrain.Job,
) -> None:
    assert [job.name for job in spottrain.jobs()] == ["demo"]
    with pytest.raises(ConfigError, match=r"no job other on this machine.*: demo"):
        spottrain.job("other")


def test_a_handle_keeps_its_job_when_another_takes_the_name(
    demo: spottrain.Job, tmp_path: Path
) -> None:
    stop(demo)
    demo.down()
    assert repr(demo) == "<spottrain.Job demo: down, step 0 of 5>"
    submit(tmp_path, f"file://{tmp_path}/other")
    assert (demo.name, demo.status()["state"]) == ("demo.1", "down")
    assert spottrain.job("demo").status()["state"] == "unmanaged"


def test_waiting_for_a_job_without_a_manager_says_what_to_do(demo: spottrain.Job) -> None:
    with pytest.raises(ManagerGoneError, match="'spottrain resume demo'"):
        demo.wait()
    with pytest.raises(ConfigError, match="has no running manager"):
        demo.stop()


def test_waiting_for_a_job_that_was_stopped_returns_its_status(demo: spottrain.Job) -> None:
    stop(demo)
    assert demo.wait()["state"] == "stopped"


@contextlib.contextmanager
def managed(job: spottrain.Job) -> Iterator[None]:
    """Hold the lock of a job's manager."""
    with JobDir(job.folder).locked(SpottrainError("taken"), as_process=False):
        yield


def test_an_interrupt_ends_the_waiting_alone(
    demo: spottrain.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with managed(demo):
        monkeypatch.setattr("time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt, match="job demo runs on"):
            demo.wait()
        with pytest.raises(TimeoutError, match=r"has not ended in 0 s, and runs on"):
            demo.wait(timeout_s=0)


def test_metrics_are_columns_of_one_length(
    demo: spottrain.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(demo.metrics()["loss"]) == list(demo.evaluations()["set"]) == []
    rows = [trained(1, step, metrics={"accuracy": 0.1}) for step in (1, 2)]
    with closing(Measurements(demo.folder / "measurements.sqlite")) as measured:
        measured.write([*rows, trained(1, 3), evaluated(1, 2, "dev")])
    frame = demo.metrics()
    assert list(frame["step"]) == [1, 2, 3]
    assert "set" not in frame
    assert list(demo.metrics(last=1)["step"]) == [3]
    imports = builtins.__import__

    def without_pandas(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)
        return imports(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    columns = demo.metrics()
    assert columns["metrics.accuracy"] == [0.1, 0.1, None]
    assert {len(column) for column in columns.values()} == {3}
    assert demo.evaluations()["set"] == ["dev"]


def test_a_damaged_job_does_not_hide_the_others(demo: spottrain.Job) -> None:
    (demo.folder / "journal.sqlite").write_bytes(b"not a journal " * 500)
    (job,) = spottrain.jobs()
    with pytest.raises(SpottrainError, match="journal"):
        job.status()
    assert "journal" in repr(job)
    assert "journal" in job._repr_html_()


def test_the_panel_of_a_notebook_is_escaped_html(demo: spottrain.Job) -> None:
    html = demo._repr_html_()
    assert html.startswith("<pre")
    assert "demo" in html


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        (42, {}, "launch needs a TrainingJob or the path of a job file: got int"),
        ("job.yaml", {"stps": 3}, "job.yaml: stps: unknown key; did you mean steps?"),
        ("job.yaml", {"steps": -1}, r"job.yaml: steps: .*: got -1 \(not in the file\)"),
        ("job.yaml", {"budget": {"max_usd": "5 USD"}}, "budget.max_usd: must be a number"),
        ("job.yaml", {"env": {1: "x"}}, "env.: keys must be text: got 1"),
        ("nothing.yaml", {}, "nothing.yaml: no such job file"),
        ("job.yaml", {}, "name: a job demo can be resumed"),
    ],
)
def test_a_launch_that_cannot_be_meant_is_refused(
    demo: spottrain.Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: Any,
    settings: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        spottrain.launch(given, **settings)


def test_an_object_is_for_jobs_that_were_launched_from_one(demo: spottrain.Job) -> None:
    with pytest.raises(ConfigError, match=r"was launched from a job file; .*update_code=True"):
        demo.resume(object())  # type: ignore[arg-type]


def test_a_state_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTTRAIN_HOME", "/proc/nowhere")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    file = tmp_path / "job.yaml"
    data = {"name": "demo", "entrypoint": "train:job", "workdir": "code"}
    file.write_text(json.dumps(data | {"minibatch_size": 8, "steps": 5}))
    with pytest.raises(api.MachineError, match=r"/proc/nowhere.*SPOTTRAIN_HOME"):
        spottrain.launch(file)
