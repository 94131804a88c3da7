from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from spottrain.logs import JsonLines, rotate


def test_a_log_is_rotated_while_it_is_written(tmp_path: Path) -> None:
    path, older = tmp_path / "supervisor.log", tmp_path / "supervisor.1.log"
    rotate(path, 10)
    with path.open("ab", buffering=0) as log:
        log.write(b"0123456789")
        rotate(path, 10)
        assert not older.exists()
        log.write(b"\n")
        rotate(path, 10)
        log.write(b"next")
        assert (older.read_bytes(), path.read_bytes()) == (b"0123456789\n", b"next")
        log.write(b" and more\n")
        rotate(path, 10)
    assert (older.read_bytes(), path.read_bytes()) == (b"next and more\n", b"")


def test_no_part_of_a_log_is_kept_beyond_its_bound(tmp_path: Path) -> None:
    path, older = tmp_path / "supervisor.log", tmp_path / "supervisor.1.log"
    path.write_bytes(b"." * 1000 + b"end")
    rotate(path, 10)
    assert older.read_bytes() == b"." * 17 + b"end"


def test_a_log_is_bounded_where_it_cannot_be_copied(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.log"
    (tmp_path / "supervisor.1.log").mkdir()
    path.write_bytes(b"0123456789\n")
    rotate(path, 10)
    assert path.read_bytes() == b""


HTTP = """
import logging, os, sys
from spottrain.logs import JsonLines, log_to_stderr
from spottrain.redaction import hide
log_to_stderr()
lines = logging.StreamHandler(sys.stdout)
lines.setFormatter(JsonLines())
logging.getLogger().addHandler(lines)
hide(["HOOK"])
logging.getLogger("httpx").info("HTTP Request: POST %s", os.environ["HOOK"])
logging.getLogger("library").warning("cannot reach %s", os.environ["HOOK"])
try:
    raise ValueError("Authorization: Bearer abcdef")
except ValueError:
    logging.getLogger("spottrain.manager").exception("told")
"""


def test_logs_show_neither_secrets_nor_what_libraries_send() -> None:
    hook = "https://hooks.example.com/services/T0/B0/xyz"
    done = subprocess.run(
        [sys.executable, "-c", HTTP],
        env={**os.environ, "HOOK": hook},
        capture_output=True,
        text=True,
        check=True,
    )
    for text in (done.stdout, done.stderr):
        assert "HTTP Request" not in text
        assert "services" not in text
        assert "abcdef" not in text
        assert "cannot reach ***" in text
        assert "told" in text


def test_a_line_of_json_has_what_programs_ask_for() -> None:
    record = logging.LogRecord("a.b", logging.INFO, "", 1, "vm-1: %s", ("gone\n",), None)
    record.event, record.generation = "VmLost", 3
    line = JsonLines(job="mine").format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "info",
        "logger": "a.b",
        "message": "vm-1: gone\n",
        "job": "mine",
        "event": "VmLost",
        "generation": 3,
    }
