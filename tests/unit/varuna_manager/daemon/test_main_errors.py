"""How a manager that cannot start leaves its error in its log."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_a_manager_logs_what_caused_its_error(tmp_path: Path) -> None:
    module = "spottrain.varuna_manager.daemon.main"
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ended.returncode == 2
    error, cause = ended.stderr.splitlines()
    assert "config.json is missing, the launch was not completed" in error
    assert "caused by: FileNotFoundError: " in cause
