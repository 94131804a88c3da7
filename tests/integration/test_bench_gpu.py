"""What is to be measured on a GPU runs on the stand-in: only its numbers are new there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PARTS = ("survival", "evacuation", "peers")


def test_the_bench_of_gpus_keeps_and_prints_results(tmp_path: Path) -> None:
    results = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "tests.bench.bench_gpu", "--json", str(results)]
    environment = {**os.environ, "SPOTTRAIN_TEST_DEVICE": "deferred:7"}

    run = subprocess.run(
        [*command, "--only", ",".join(PARTS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    found = json.loads(results.read_text())
    assert set(found) == {"machine", *PARTS}
    assert not [name for name in PARTS if "error" in found[name]], run.stderr
    assert found["survival"]["whole"] == found["survival"]["kills"]
    assert found["peers"]["hangs"] == 0
    assert all(f"### {name}" in run.stdout for name in PARTS)


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
