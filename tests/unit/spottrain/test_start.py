"""Processes that run user code, and what keeps them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spottrain.children import WHERE_SIGNAL
from spottrain.varuna_manager.launch.inspect import _FRAME, INSPECTOR

START = [sys.executable, "-P", "-m", "spottrain.start", INSPECTOR, "train:job"]


@pytest.mark.rotated
def test_a_process_says_where_it_is_when_it_is_asked(tmp_path: Path) -> None:
    ready, told = os.pipe()
    (tmp_path / "train.py").write_text(
        f"import os, signal\ndef slow():\n    os.write({told}, b'x')\n"
        "    while True:\n        signal.pause()\nslow()\n"
    )
    with subprocess.Popen(
        [*START, str(tmp_path)], stderr=subprocess.PIPE, pass_fds=(told,)
    ) as process:
        try:
            os.close(told)
            assert os.read(ready, 1) == b"x"
            process.send_signal(WHERE_SIGNAL)
            assert process.stderr is not None
            lines = (line.decode() for line in process.stderr)
            found = next(filter(None, map(_FRAME.search, lines)))
            assert found[3] == "slow"
        finally:
            process.kill()
            os.close(ready)
