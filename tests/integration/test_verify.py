"""``spottrain verify`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.integration.jobs import DEADLINE_S, SPOTTRAIN


@pytest.mark.rotated(parts=[7])
def test_a_small_gpt_comes_through_losses_with_the_same_bits_and_bills(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SPOTTRAIN, "verify", "--steps", "20"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "SPOTTRAIN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "spottrain-verify.json").read_text())
    assert told["passed"] is True
    assert told["strikes"] == 3
    assert {check["name"] for check in told["checks"]} >= {"weights", "losses"}
    assert "| result | passed |" in (tmp_path / "spottrain-verify.md").read_text()
    assert str(tmp_path) not in json.dumps(told["machine"])
