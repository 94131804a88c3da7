"""Commands of ``spottrain``, run in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from spottrain.varuna_manager.cli.main import main


class Answer(NamedTuple):
    """What a command ended with and printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that begins with ``error:``."""
        (line,) = (x for x in self.err.splitlines() if x.startswith("error: "))
        return line


Run = Callable[..., Answer]


def runs(monkeypatch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str], *begin: str) -> Run:
    """Return a function that runs commands whose arguments begin with some."""

    def answer(*arguments: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["spottrain", *begin, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = captured.readouterr()
        return Answer(int(end.value.code or 0), out, err)

    return answer
