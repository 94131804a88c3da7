from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_messages_arrive_as_they_were_sent_and_gathers_reach_everybody() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.message_ranks"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
