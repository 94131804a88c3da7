from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from spottrain.pipeline.base.output import LabelledStream, label_output
from spottrain.redaction import VARIABLE


def test_prints_are_whole_lines_with_the_rank() -> None:
    log = io.StringIO()
    stream = LabelledStream(log)
    print("before a generation", file=stream)
    stream.label = "rank 3"
    print("loss", 2.5, file=stream)
    print("half", end="", file=stream)
    assert log.getvalue() == "before a generation\n[rank 3] loss 2.5\n"
    print(" a line\n\nlast", file=stream)
    assert log.getvalue().splitlines()[2:] == [
        "[rank 3] half a line",
        "[rank 3] ",
        "[rank 3] last",
    ]


def test_a_line_without_end_is_cut() -> None:
    log = io.StringIO()
    stream = LabelledStream(log)
    for _ in range(100):
        print("\r" + 99 * "=", end="", file=stream)
    assert 9_000 > len(log.getvalue()) > 8_000


def test_output_without_line_ends_appears_once_a_second() -> None:
    log, clock = io.StringIO(), [0.0]
    stream = LabelledStream(log, lambda: clock[0])
    stream.label = "rank 1"
    print("Loading", end="", flush=True, file=stream)
    assert log.getvalue() == "[rank 1] Loading\n"
    print(".", end="", flush=True, file=stream)
    print(".", end="", flush=True, file=stream)
    assert log.getvalue() == "[rank 1] Loading\n"
    clock[0] = 1.5
    print(".", end="", file=stream)
    assert log.getvalue() == "[rank 1] Loading\n[rank 1] ...\n"
    print("done", end="", file=stream)
    stream.finish()
    assert log.getvalue().splitlines()[2:] == ["[rank 1] done"]


def test_what_is_printed_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "tok-1234")
    log = io.StringIO()
    stream = LabelledStream(log)
    print("with", "tok-1234", file=stream)
    stream.write("tok-")
    stream.write("1234")
    stream.finish()
    assert log.getvalue() == "with ***\n***\n"


def test_a_process_takes_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    out, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    label_output("rank 1")
    sys.stdout.write("one\n")
    label_output("rank 2")
    sys.stderr.write("two\n")
    label_output("")
    sys.stdout.write("three\n")
    assert out.getvalue() == "[rank 1] one\nthree\n"
    assert errors.getvalue() == "[rank 2] two\n"


def test_what_c_code_prints_without_a_line_end_is_there_when_its_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # which has the same effect
    program = (
        "import ctypes, os, signal\n"
        "from spottrain.pipeline.base.output import unbuffer_c_output\n"
        "unbuffer_c_output()\n"
        "if not os.fork():\n"
        "    ctypes.CDLL(None).printf(b'no end')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.wait()\n"
    )
    log = tmp_path / "supervisor.log"
    with log.open("ab") as output:
        subprocess.run([sys.executable, "-c", program], stdout=output, check=True)
    assert log.read_text() == "no end"
