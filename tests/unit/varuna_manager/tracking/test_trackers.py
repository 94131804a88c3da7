"""TensorBoard, W&B and MLflow by their real packages, read back as their users do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_manifest, model_facts
from tests.unit.varuna_manager.measured_jobs import evaluated, store, trained

from spottrain import redaction
from spottrain.manifest import FileRecord, Owner, write_manifest, write_owner
from spottrain.storage.open import open_store
from spottrain.varuna_manager.config.job import parse_config
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.measurements import (
    Cursor,
    GenerationBegan,
    Measurements,
)
from spottrain.varuna_manager.launch.workdir import pack
from spottrain.varuna_manager.tracking.about import BestCheckpoint, Run, describe
from spottrain.varuna_manager.tracking.sinks import (
    AGAIN,
    Mlflow,
    Sink,
    TensorBoard,
    Wandb,
)

UID = "0123456789abcdef"
pytestmark = [
    # The packages' own.
    pytest.mark.filterwarnings("default"),
]


def tell(measurements: Measurements, sink: Sink, cursor: Cursor) -> Cursor:
    while (page := measurements.changes(cursor, 3)).cursor != cursor:
        sink.take(page)
        cursor = page.cursor
    return cursor


def tell_a_fall_back(make: Callable[[], Sink]) -> None:
    """Five steps and an evaluation, then back to step 2, and on to step 7; the process
    is replaced in between. Further values of steps that came before are a thousand more.
    """
    measurements = store()
    measurements.write([GenerationBegan(generation=1, step=0)])
    measurements.write(trained(1, step) for step in range(1, 6))
    measurements.write([evaluated(1, 5, "dev")])
    with closing(make()) as sink:
        cursor = tell(measurements, sink, sink.begin())
        measurements.write([GenerationBegan(generation=2, step=2), trained(2, 3)])
        tell(measurements, sink, cursor)
    measurements.write(trained(2, step, loss=math.nan) for step in (4,))
    measurements.write(trained(2, step) for step in (5, 6, 7))
    measurements.write([evaluated(2, 7, "dev")])
    with closing(make()) as sink:
        cursor = tell(measurements, sink, sink.begin())
    with closing(make()) as sink:
        assert tell(measurements, sink, sink.begin()) == cursor
        assert sink.idle(ends=True) == ""


def test_tensorboard_shows_the_surviving_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    tell_a_fall_back(lambda: TensorBoard(folder, tmp_path / "note.json"))
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    losses = {event.step: event.value for event in read.Scalars("train/loss")}
    assert len(read.Scalars("train/loss")) == 7
    assert math.isnan(losses.pop(4))
    assert losses == {1: 1001, 2: 1002, 3: 2003, 5: 2005, 6: 2006, 7: 2007}
    assert [(e.step, e.value) for e in read.Scalars("dev/loss")] == [(7, 2000.0)]


def test_mlflow_keeps_the_first_values_and_marks_what_was_trained_again(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    options = {"tracking_uri": uri, "experiment": "tests"}
    run = a_run(tmp_path)
    tell_a_fall_back(lambda: Mlflow(options, run, tmp_path / "note.json"))
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (found_run,) = client.search_runs([experiment.experiment_id])
    assert (found_run.info.run_name, found_run.info.status) == ("job", "FINISHED")

    def history(name: str) -> list[tuple[int, float]]:
        found = client.get_metric_history(found_run.info.run_id, name)
        return sorted((metric.step, metric.value) for metric in found)

    first = [(step, 1000.0 + step) for step in range(1, 6)]
    assert history("train/loss") == [*first, (6, 2006.0), (7, 2007.0)]
    assert history("dev/loss") == [(5, 1000.0), (7, 2000.0)]
    assert history(AGAIN) == [(6, 3.0)]
    assert found_run.data.params["job.minibatch_size"] == "8"
    assert found_run.data.params["model.optimizer"] == "SGD(lr=0.1)"
    tags = found_run.data.tags
    assert (tags["baseline"], tags["spottrain.plan"]) == ("true", "1x1")
    assert tags["spottrain.best_checkpoint"] == str(tmp_path / "weights" / NAME)
    named = client.download_artifacts(found_run.info.run_id, "best_checkpoint.json", str(tmp_path))
    assert json.loads(Path(named).read_text())["step"] == 5


@pytest.mark.rotated
def test_wandb_keeps_the_first_values_and_marks_what_was_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"project": "tests", "entity": None, "mode": "offline"}
    run = a_run(tmp_path)
    tell_a_fall_back(lambda: Wandb(options, run, tmp_path, tmp_path / "note.json"))
    wandb.teardown()  # as at the end of a process: then everything is in the files
    logged = [row for file in runs(tmp_path) for row in history(file)]
    losses = [(row["step"], row["train/loss"]) for row in logged if "train/loss" in row]
    first = [(step, 1000.0 + step) for step in range(1, 6)]
    assert losses == [*first, (6, 2006.0), (7, 2007.0)]
    judged = [(row["step"], row["dev/loss"]) for row in logged if "dev/loss" in row]
    assert judged == [(5, 1000.0), (7, 2000.0)]
    assert [(row["step"], row[AGAIN]) for row in logged if AGAIN in row] == [(6, 3)]
    written = [record for file in runs(tmp_path) for record in records(file)]
    settings = {
        update.key: json.loads(update.value_json)
        for record in written
        for update in (*record.run.config.update, *record.config.update)
    }
    assert settings["job"]["minibatch_size"] == 8
    assert settings["model"]["optimizer"] == "SGD(lr=0.1)"
    assert settings["plan"] == "1x1"
    assert "baseline" in {tag for record in written for tag in record.run.tags}
    files = [file.ref for record in written for file in record.artifact.manifest.contents]
    assert files == [(tmp_path / "weights" / NAME / "manifest.json").as_uri()]


def test_what_trackers_show_of_a_job_holds_no_secret_and_nothing_that_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(redaction.VARIABLE, "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_sekrit")
    shown = a_run(
        tmp_path,
        env={"A": "has hf_sekrit in it", "LR": 3},
        notify={"webhook": "https://example.org/sekrit"},
    )
    assert "sekrit" not in json.dumps(shown.config)
    assert shown.config["job"]["env"] == {"A": "has *** in it", "LR": "3"}
    assert shown.flat()["job.env.LR"] == "3"
    assert "job.microbatch_size" not in shown.flat()
    assert "code" not in shown.config


def test_the_best_checkpoint_is_told_once_and_again_when_it_is_another(tmp_path: Path) -> None:
    best = BestCheckpoint(a_run(tmp_path))
    assert best.found(ends=False) == (5, str(tmp_path / "weights" / NAME))
    assert best.found(ends=True) is None
    checkpoint(tmp_path / "weights", 6, best_step=6)
    assert best.found(ends=False) is None, "it was looked for a moment ago"
    found = best.found(ends=True)
    assert found is not None
    assert found.step == 6


NAME = "step-5-g1-00000000"


def checkpoint(folder: Path, step: int, best_step: int) -> None:
    record = FileRecord(section=0, file="section-0.safetensors", num_bytes=0, sha256="")
    manifest = a_manifest(f"step-{step}-g1-00000000", step, (record,), uid=UID)
    write_manifest(open_store(folder), replace(manifest, best_step=best_step))


def a_run(tmp_path: Path, **more: Any) -> Run:
    """A job whose best checkpoint is of step 5."""
    weights = tmp_path / "weights"
    write_owner(open_store(weights), Owner(uid=UID, name="job"))
    checkpoint(weights, 5, best_step=5)
    data = {
        "name": "job",
        "entrypoint": "a:b",
        "minibatch_size": 8,
        "steps": 5,
        "checkpoint": {"path": str(weights)},
        "track": {"tags": ["baseline"]},
        **more,
    }
    job = JobDir(tmp_path / "job")
    job.path.mkdir()
    config = parse_config(data, "job.yaml")
    job.write(config, replace(model_facts(), optimizer="SGD(lr=0.1)"))
    (tmp_path / "code").mkdir()
    pack(tmp_path / "code", [], job.workdir)
    return describe(job, UID, json.loads(config.model_dump_json()))


def runs(folder: Path) -> list[Path]:
    """Return the files of offline runs, in the order in which they were begun."""
    found = (folder / "wandb").glob(f"offline-run-*/run-{UID}.wandb")
    return sorted(found, key=lambda file: file.stat().st_mtime_ns)


def history(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that a run has logged."""
    for record in records(file):
        if items := record.history.item:
            yield {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items
            }


def records(file: Path) -> Iterator[Any]:
    """Yield W&B's records, from a log as LevelDB has it (leveldb/doc/log_format.md), after a
    header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind, part = data[at + 6], data[at + 7 : at + 7 + length]
        at += 7 + length
        whole += part
        if kind in (1, 4):  # full, last
            yield Record.FromString(whole)
            whole = b""
