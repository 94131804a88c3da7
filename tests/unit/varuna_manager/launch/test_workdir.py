"""The files of a workdir that are sent."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from spottrain.errors import ConfigError
from spottrain.varuna_manager.launch.workdir import (
    IGNORE_FILE,
    differing,
    fingerprint,
    pack,
    packed_files,
)


def workdir(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def sent(folder: Path) -> list[str]:
    return [path.as_posix() for path in packed_files(folder)]


def test_everything_is_sent_but_caches_and_repositories(tmp_path: Path) -> None:
    workdir(tmp_path, "train.py", "pkg/a.py", ".git/x", "pkg/__pycache__/a.pyc")
    assert sent(tmp_path) == ["pkg/a.py", "train.py"]


def test_neither_state_nor_checkpoints_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "state"))
    workdir(
        tmp_path, "train.py", "state/jobs/a/identity.pem", "kept/step-1/x", "b/kept"
    )
    for place in (tmp_path / "kept", (tmp_path / "kept").as_uri()):
        files = packed_files(tmp_path, str(place))
        assert [path.as_posix() for path in files] == ["b/kept", "train.py"]


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    workdir(tmp_path, "train.py", "gone.py")
    files = packed_files(tmp_path)
    (tmp_path / "gone.py").unlink()
    with pytest.raises(ConfigError, match=r"gone\.py cannot be read: No such file"):
        fingerprint(tmp_path, files)
    with pytest.raises(ConfigError, match=r"gone\.py"):
        pack(tmp_path, files, tmp_path / "package")
    with pytest.raises(FileNotFoundError):  # no error of the workdir
        pack(tmp_path, [Path("train.py")], tmp_path / "nowhere" / "package")


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [
        ("data", {"data/a.bin", "pkg/data/b.bin"}),
        ("data/", {"data/a.bin", "pkg/data/b.bin"}),
        ("/data", {"data/a.bin"}),
        ("pkg/data", {"pkg/data/b.bin"}),
        ("*.bin", {"data/a.bin", "pkg/data/b.bin"}),
        ("pkg/*.py", {"pkg/a.py"}),
        ("train.p?", {"train.py"}),
        ("# data", set()),
        ("", set()),
        ("nothing", set()),
    ],
)
def test_the_ignore_file_says_what_stays_here(
    tmp_path: Path, pattern: str, left_out: set[str]
) -> None:
    names = ["data/a.bin", "pkg/a.py", "pkg/data/b.bin", "train.py"]
    workdir(tmp_path, *names)
    (tmp_path / IGNORE_FILE).write_text(f"{pattern}\n")
    assert sent(tmp_path) == [
        IGNORE_FILE,
        *(name for name in names if name not in left_out),
    ]


def test_an_ignore_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / IGNORE_FILE).write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"\.spottrainignore: cannot be read"):
        packed_files(tmp_path)


def test_what_is_ignored_may_be_a_link_that_leads_out(tmp_path: Path) -> None:
    workdir(tmp_path, "train.py")
    (tmp_path / "data").symlink_to("/")
    with pytest.raises(ConfigError, match="workdir: link "):
        packed_files(tmp_path)
    (tmp_path / IGNORE_FILE).write_text("data\n")
    assert sent(tmp_path) == [IGNORE_FILE, "train.py"]


def test_the_same_files_are_packed_to_the_same_bytes(tmp_path: Path) -> None:
    folder = workdir(tmp_path / "workdir", "b.py", "a/c.py")
    files = packed_files(folder)
    size = pack(folder, files, tmp_path / "one")
    (folder / "b.py").touch()
    assert pack(folder, files, tmp_path / "two") == size
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with tarfile.open(tmp_path / "one") as archive:
        assert archive.getnames() == ["a/c.py", "b.py"]


def test_packages_tell_their_differences(tmp_path: Path) -> None:
    code = workdir(tmp_path / "code", "changed", "kept", "removed")
    old, new = tmp_path / "old", tmp_path / "new"
    pack(code, packed_files(code), old)
    (code / "changed").write_text("otherwise")
    (code / "removed").unlink()
    workdir(code, "added")
    pack(code, packed_files(code), new)
    assert differing(old, new) == ["added added", "changed changed", "removed removed"]
    assert differing(new, new) == []
