from __future__ import annotations

import os
from pathlib import Path

import pytest

from spottrain.files import PRIVATE, make_folder, write_whole


@pytest.mark.parametrize("content", ["text, naïve", b"\x00bytes"])
def test_what_is_written_replaces_what_was_there(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "file"
    for durable in (False, True):
        path.write_text("before")
        write_whole(path, content, durable=durable)
        expected = content.encode() if isinstance(content, str) else content
        assert path.read_bytes() == expected
    assert os.listdir(tmp_path) == ["file"]


def test_a_private_file_is_so_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_whole(tmp_path / "key", "secret", mode=PRIVATE)
        write_whole(tmp_path / "page", "for all")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o666


def test_a_disk_that_refuses_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "after", durable=True)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_is_made_within_one_that_is_there_and_nowhere_else(tmp_path: Path) -> None:
    job = tmp_path / "job"
    logs = job / "cloud" / "vms"
    with pytest.raises(FileNotFoundError):
        make_folder(logs, within=job)
    assert not job.exists(), "what somebody has removed is not made anew"
    job.mkdir()
    for _ in range(2):
        make_folder(logs, within=job)
    assert logs.is_dir()
    assert (job / "cloud").stat().st_mode & 0o077 == 0
