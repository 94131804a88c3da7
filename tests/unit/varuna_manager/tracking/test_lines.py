"""``metrics.jsonl``, whatever happens to the process that writes it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.varuna_manager.measured_jobs import (
    evaluated,
    simulated,
    store,
    trained,
)

from spottrain.varuna_manager.jobs.measurements import Cursor, Measurements
from spottrain.varuna_manager.tracking.lines import as_line, position_of, scalars
from spottrain.varuna_manager.tracking.sinks import LINES, JsonLines


def opened(folder: Path, place: str | None = None) -> tuple[JsonLines, Cursor]:
    sink = JsonLines(folder / "metrics.jsonl", folder / "note.json", place)
    return sink, sink.begin()


def expected(measurements: Measurements) -> str:
    page = measurements.changes(Cursor(), 1 << 60)
    return "".join(map(as_line, page.rows))


@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_the_file_holds_the_surviving_line_after_any_crash(
    tmp_path_factory: pytest.TempPathFactory, random: Random, generations: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    file, note = folder / "metrics.jsonl", folder / "note.json"
    measurements = store()
    sink, cursor = opened(folder)
    for sample in simulated(random, generations).samples():
        measurements.write([sample])
        if random.random() < 0.5:
            continue
        before = note.read_text() if note.exists() else ""
        page = measurements.changes(cursor, random.randint(1, 4))
        sink.take(page)
        cursor = page.cursor
        if random.random() < 0.3:
            # The process dies before its note is written, or in the middle of a line.
            sink.close()
            if before and random.random() < 0.5:
                note.write_text(before)
            if random.random() < 0.5:
                data = file.read_bytes()
                file.write_bytes(data[: len(data) - random.randint(0, 300)])
            sink, cursor = opened(folder)
    while (page := measurements.changes(cursor, 3)).cursor != cursor:
        sink.take(page)
        cursor = page.cursor
    sink.close()
    assert file.read_text() == expected(measurements)


def test_a_line_is_valid_json_whatever_the_numbers() -> None:
    row = trained(1, 7, loss=math.nan, grad_norm=math.inf, metrics={"m": -math.inf})
    line = as_line(row)
    data = json.loads(line)
    assert (data["loss"], data["grad_norm"], data["metrics"]) == (
        None,
        None,
        {"m": None},
    )
    assert position_of(line.encode()) == 14
    assert position_of(as_line(evaluated(1, 7)).encode()) == 15
    for text in (b"", b"[]", b"{}", b'{"step": 1}', b"\0\0"):
        with pytest.raises(ValueError):  # noqa: PT011 - json's own is one
            position_of(text)


def test_the_file_is_copied_to_the_store_now_and_then_and_at_the_end(
    tmp_path: Path,
) -> None:
    measurements, bucket = store(), tmp_path / "bucket"
    bucket.mkdir()
    sink, cursor = opened(tmp_path, str(bucket))
    for step in (1, 2):
        measurements.write([trained(1, step)])
        page = measurements.changes(cursor)
        sink.take(page)
        cursor = page.cursor
        assert sink.idle(ends=False) == ""
    copy = bucket / "metrics.jsonl"
    assert copy.read_text().count("\n") == 1  # the next one is due in a minute
    assert sink.idle(ends=True) == ""
    sink.close()
    assert copy.read_text() == expected(measurements)


def test_a_store_that_refuses_the_copy_is_told_and_the_file_written(
    tmp_path: Path,
) -> None:
    measurements = store()
    (tmp_path / "bucket").write_text("a file, not a folder")
    sink, cursor = opened(tmp_path, str(tmp_path / "bucket"))
    measurements.write([trained(1, 1)])
    sink.take(measurements.changes(cursor))
    assert "metrics.jsonl is not copied" in sink.idle(ends=False)
    sink.close()
    assert (tmp_path / "metrics.jsonl").read_text() == expected(measurements)


def test_numbers_have_the_names_that_trackers_group_by() -> None:
    row = trained(1, 1, weight=1024.0, learning_rate=0.1, metrics={"accuracy": 0.5})
    assert scalars(row) == {
        "train/loss": 1001.0,
        "train/grad_norm": 1.0,
        "train/learning_rate": 0.1,
        "train/accuracy": 0.5,
        "speed/examples_per_s": 16.0,
        "speed/tokens_per_s": 2048.0,
        "plan/pipeline_depth": 1.0,
        "plan/data_parallel_width": 1.0,
        "cost/usd_spent": 0.25,
    }
    assert scalars(evaluated(1, 1, "dev")) == {"dev/loss": 1000.0}


def test_nothing_is_copied_to_where_the_jobs_store_is_not(tmp_path: Path) -> None:
    place = tmp_path / "mount"
    place.mkdir()
    lines = JsonLines(tmp_path / LINES, tmp_path / "note.json", str(place), "a-job")
    (tmp_path / LINES).write_text("{}\n")
    assert "mount or restore it" in lines.idle(ends=True)
    assert list(place.iterdir()) == []
