"""What ``spottrain verify`` refuses before it trains or rents anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import Run, runs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return runs(monkeypatch, capsys, "verify")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--cloud", "aws"), "name --max-usd, and --checkpoints"),
        (("--cloud", "aws", "--max-usd", "5"), "name --max-usd, and --checkpoints"),
        (("--max-usd", "5"), "are for --cloud; leave them out"),
        (
            ("--gpu", "--cloud", "aws", "--max-usd", "5", "--checkpoints", "s3://a/b"),
            "--gpu is for this machine",
        ),
        (("--to", "missing/folder/x"), "missing/folder: no such folder"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], line: str
) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert line in err
    assert not (tmp_path / "home").exists()
