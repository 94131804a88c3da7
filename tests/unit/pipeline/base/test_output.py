from __future__ import annotations

import io
import sys

import pytest

from spottrain.pipeline.base.output import LabelledStream, label_output


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
