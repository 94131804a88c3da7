"""What is to be measured on a GPU runs on the stand-in: only its numbers are new there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.bench.bench_gpu import STEPS

ROOT = Path(__file__).parents[2]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [ROOT / "scripts" / "first-gpu", "--out", folder, "--seconds", "3600", *arguments],
        env={**os.environ, "SPOTTRAIN_TEST_DEVICE": "deferred:7"},
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(folder: Path, *arguments: str) -> str:
    with start(folder, *arguments) as run:
        assert run.stdout is not None
        said = run.stdout.read()
    assert run.returncode == 0
    return said


def rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "results.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def names(found: Sequence[dict[str, Any]]) -> list[str]:
    return [row["step"] for row in found]


@pytest.mark.rotated
def test_cut_off_it_goes_on_with_what_is_not_done(tmp_path: Path) -> None:
    steps = "smoke", "context", "commit"
    only = "--only", ",".join(steps)
    with start(tmp_path, *only) as run:
        while "context" not in names(rows(tmp_path)):
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
    before = rows(tmp_path)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"step": "com')  # cut off while it was written

    said = finished(tmp_path, *only)

    after = rows(tmp_path)
    assert after[: len(before)] == before
    assert sorted(names(after)) == sorted(steps)
    assert "needs a real GPU" in after[0]["skipped"]
    assert not [row for row in after if "error" in row]
    assert all(f"### {name}" in said for name in steps)
    assert all(f"### {name}" in (tmp_path / "log.txt").read_text() for name in steps)
    assert finished(tmp_path, *only) == said
    assert rows(tmp_path) == after


@pytest.mark.nightly
@pytest.mark.parametrize("step", [name for name, step in STEPS.items() if step.small])
def test_every_step_that_a_stand_in_can_show_runs_on_it(step: str, tmp_path: Path) -> None:
    finished(tmp_path, "--only", step)

    (row,) = rows(tmp_path)
    assert "error" not in row, row["error"]


def test_without_a_gpu_it_says_that_nothing_was_measured(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "SPOTTRAIN_TEST_DEVICE"}
    code = (
        "import sys; sys.modules['pynvml'] = None; from tests.bench.bench_gpu import main; main([])"
    )

    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stdout.startswith("nothing measured: nvidia-ml-py is not installed")
