"""TensorBoard, W&B and MLflow by their real packages, read back as their users do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.varuna_manager.measured_jobs import evaluated, store, trained

from spottrain.varuna_manager.jobs.measurements import (
    Cursor,
    GenerationBegan,
    Measurements,
)
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
    tell_a_fall_back(lambda: Mlflow(options, "job", UID, tmp_path / "note.json"))
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("job", "FINISHED")

    def history(name: str) -> list[tuple[int, float]]:
        found = client.get_metric_history(run.info.run_id, name)
        return sorted((metric.step, metric.value) for metric in found)

    first = [(step, 1000.0 + step) for step in range(1, 6)]
    assert history("train/loss") == [*first, (6, 2006.0), (7, 2007.0)]
    assert history("dev/loss") == [(5, 1000.0), (7, 2000.0)]
    assert history(AGAIN) == [(6, 3.0)]


@pytest.mark.rotated
def test_wandb_keeps_the_first_values_and_marks_what_was_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"project": "tests", "entity": None, "mode": "offline"}
    tell_a_fall_back(lambda: Wandb(options, "job", UID, tmp_path, tmp_path / "note.json"))
    logged = [row for file in runs(tmp_path) for row in history(file)]
    losses = [(row["step"], row["train/loss"]) for row in logged if "train/loss" in row]
    first = [(step, 1000.0 + step) for step in range(1, 6)]
    assert losses == [*first, (6, 2006.0), (7, 2007.0)]
    judged = [(row["step"], row["dev/loss"]) for row in logged if "dev/loss" in row]
    assert judged == [(5, 1000.0), (7, 2000.0)]
    assert [(row["step"], row[AGAIN]) for row in logged if AGAIN in row] == [(6, 3)]


def runs(folder: Path) -> list[Path]:
    """Return the files of offline runs, in the order in which they were begun."""
    found = (folder / "wandb").glob(f"offline-run-*/run-{UID}.wandb")
    return sorted(found, key=lambda file: file.stat().st_mtime_ns)


def history(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what a run has logged: W&B's records in a log as LevelDB has it
    (leveldb/doc/log_format.md), after a header of seven bytes."""
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
            record = Record.FromString(whole)
            whole = b""
            items = record.history.item
            if items:
                yield {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
