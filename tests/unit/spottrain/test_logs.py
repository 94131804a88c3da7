from __future__ import annotations

import json
import logging
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


def test_a_log_is_bounded_where_it_cannot_be_copied(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.log"
    (tmp_path / "supervisor.1.log").mkdir()
    path.write_bytes(b"0123456789\n")
    rotate(path, 10)
    assert path.read_bytes() == b""


def test_a_line_of_json_has_what_programs_ask_for() -> None:
    record = logging.LogRecord(
        "a.b", logging.INFO, "", 1, "vm-1: %s", ("gone\n",), None
    )
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
