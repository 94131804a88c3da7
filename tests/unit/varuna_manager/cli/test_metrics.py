"""``spottrain metrics`` and what ``status`` shows of it."""

from __future__ import annotations

import csv
import io
import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.varuna_manager.measured_jobs import evaluated, trained
from tests.unit.varuna_manager.stored_jobs import submit

from spottrain.varuna_manager.cli import show, status
from spottrain.varuna_manager.cli.console import Output
from spottrain.varuna_manager.cli.show import MetricsOutput
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.measurements import Measurements


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    """Thirty steps, the last of them skipped, and two evaluations."""
    job = submit(tmp_path, f"file://{tmp_path}/store")
    more = {"learning_rate": 1 / 3, "weight": 1024.0, "metrics": {"accuracy": 0.1}}
    rows = [trained(1, step, **more) for step in range(1, 30)]
    rows.append(trained(1, 30, loss=math.nan, skipped="loss"))
    best = replace(evaluated(1, 20, "dev"), is_best=True, metrics={"f1": 0.75})
    with closing(Measurements(job.measurements)) as measured:
        measured.write([*rows, evaluated(1, 10, "dev"), best])
    return job


def test_the_table_has_the_newest_rows(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    show.metrics(job.name, every=10)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:6] == ["STEP", "LOSS", "GRAD", "NORM", "LR", "ACCURACY"]
    assert lines[1][:7] == ["10", "1010", "1", "0.33333", "0.1", "16", "2048"]
    assert lines[1][7:] == ["500", "ms", "1x1", "$0.2500"]
    assert lines[3][:2] == ["30", "nan"]
    assert " ".join(lines[3]).endswith("skipped: its loss was not finite")
    assert lines[-1] == ["20", "dev", "1000", "0.75", "best", "so", "far"]


def test_json_has_every_row_unrounded_and_valid(
    job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    show.metrics(job.name, output=MetricsOutput.JSON)
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert (document["schema_version"], document["name"]) == (1, "demo")
    rows = document["rows"]
    assert [row["step"] for row in rows] == [*range(1, 31), 10, 20]
    assert rows[0]["learning_rate"] == 1 / 3
    assert rows[29]["loss"] is None
    assert (rows[31]["set"], rows[31]["metrics"]) == ("dev", {"f1": 0.75})
    show.metrics(job.name, output=MetricsOutput.JSON, last=2, every=7)
    document = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in document["rows"]] == [21, 28, 10, 20]


def test_csv_has_a_column_for_each_metric(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    show.metrics(job.name, output=MetricsOutput.CSV)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 32
    assert rows[0]["learning_rate"] == str(1 / 3)
    assert (rows[0]["metrics.accuracy"], rows[0]["metrics.f1"]) == ("0.1", "")
    assert (rows[31]["kind"], rows[31]["metrics.f1"]) == ("evaluation", "0.75")
    assert rows[29]["loss"] == "nan"


def test_status_shows_the_newest_measurements(
    job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    job.tracking_status.write_text('{"wandb": "no such host (exit 1)"}')
    with closing(Measurements(job.measurements)) as measured:
        more = {"learning_rate": 3e-4, "metrics": {"accuracy": 0.25}}
        measured.write([trained(1, 31, loss=0.5, weight=1024.0, **more)])
    status.status(job.name)
    shown = capsys.readouterr().out
    assert "lr 0.0003 · accuracy 0.25 · dev 1000  " in shown
    assert "2,048 tokens/s" in shown
    assert "wandb: no such host (exit 1)" in shown
    status.status(job.name, output=Output.JSON)
    document = json.loads(capsys.readouterr().out)
    assert document["newest"]["learning_rate"] == 3e-4
    assert document["newest"]["evaluations"] == {"dev": 1000.0}
    assert document["loss_curve"][-1] == 0.5
    assert document["tracking"] == {"wandb": "no such host (exit 1)"}
