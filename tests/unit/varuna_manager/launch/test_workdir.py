"""The files of a workdir that are sent."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.ignore import IGNORE_FILE
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.launch.workdir import (
    differing,
    fingerprint,
    pack,
    packed_files,
    survey,
    unpack,
)

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


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


def test_neither_state_nor_checkpoints_are_sent(tmp_path: Path) -> None:
    workdir(tmp_path, "train.py", "home/jobs/a/identity.pem", "kept/step-1/x", "b/kept")
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
        ("**/data/*.bin", {"data/a.bin", "pkg/data/b.bin"}),
        ("pkg/**", {"pkg/a.py", "pkg/data/b.bin"}),
        ("pkg/**/b.bin", {"pkg/data/b.bin"}),
        ("*.bin\n!a.bin", {"pkg/data/b.bin"}),
        ("data/   ", {"data/a.bin", "pkg/data/b.bin"}),
        ("data/\r", {"data/a.bin", "pkg/data/b.bin"}),
        ("\ufeffdata/", {"data/a.bin", "pkg/data/b.bin"}),
        ("pkg/*.py", {"pkg/a.py"}),
        ("train.p?", {"train.py"}),
        ("# data", set()),
        ("", set()),
        ("nothing", set()),
        ("data/ # big", set()),
    ],
)
def test_the_ignore_file_says_what_stays_here(
    tmp_path: Path, pattern: str, left_out: set[str]
) -> None:
    names = ["data/a.bin", "pkg/a.py", "pkg/data/b.bin", "train.py"]
    workdir(tmp_path, *names)
    (tmp_path / IGNORE_FILE).write_bytes(f"{pattern}\n".encode())
    assert sent(tmp_path) == [
        IGNORE_FILE,
        *(name for name in names if name not in left_out),
    ]


def test_patterns_of_the_ignore_file_that_match_nothing_are_told(
    tmp_path: Path,
) -> None:
    workdir(tmp_path, "train.py", "data/a", "pkg/b")
    (tmp_path / IGNORE_FILE).write_text("dta/\ndata/ # big\ndata/\n!*.pt\n")
    (tmp_path / "pkg" / IGNORE_FILE).write_text("b\nc\n")
    found = survey(tmp_path)
    assert [(str(path), text) for path, text in found.unused] == [
        (IGNORE_FILE, "dta/"),
        (IGNORE_FILE, "data/ # big"),
        (IGNORE_FILE, "!*.pt"),
        (f"pkg/{IGNORE_FILE}", "c"),
    ]
    assert any("dta/" in line and "data/ # big" in line for line in found.lines())


def test_keys_and_tokens_are_sent_only_if_the_ignore_file_lists_them(
    tmp_path: Path,
) -> None:
    code = ["keys.py", "pkg/tokens.txt", "pkg/.env.example", "id_rsa.pub", "train.py"]
    secrets = [".env", ".ENV.local", "id_ed25519", "pkg/server.pem", "AWS_credentials"]
    secrets += ["pkg/.netrc", "service-account-x.json", "hf_token", "secrets.yaml"]
    workdir(tmp_path, *code, *secrets, ".aws/config")
    found = survey(tmp_path)
    assert sorted(map(str, found.sizes)) == sorted(code)
    assert sorted(map(str, found.withheld)) == sorted([*secrets, ".aws"])
    assert any(".env" in line and "server.pem" in line for line in found.lines())

    (tmp_path / ".gitignore").write_text("!.env\n")
    assert ".env" not in sent(tmp_path)
    (tmp_path / IGNORE_FILE).write_text("!.env\nid_ed25519\n")
    found = survey(tmp_path)
    assert Path(".env") in found.sizes
    assert Path("id_ed25519") not in {*found.sizes, *found.withheld}


def test_what_git_ignores_is_not_sent_unless_the_ignore_file_lists_it(
    tmp_path: Path,
) -> None:
    workdir(tmp_path, "train.py", "data/a.bin", "data/b.bin", "pkg/c.bin")
    (tmp_path / ".gitignore").write_text("data/\n*.bin\n")
    assert sent(tmp_path) == [".gitignore", "train.py"]
    (tmp_path / IGNORE_FILE).write_text("!data/\n!a.bin\n")
    assert sent(tmp_path) == [".gitignore", IGNORE_FILE, "data/a.bin", "train.py"]


def test_what_is_sent_is_told_with_its_size(tmp_path: Path) -> None:
    workdir(tmp_path, "train.py")
    (tmp_path / "big.bin").write_bytes(bytes(12_300))
    (line,) = survey(tmp_path).lines()
    assert "2 files, 12.3 kB" in line
    assert "big.bin (12.3 kB)" in line


def git(folder: Path, *arguments: str, text: str = "") -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=False, input=text, capture_output=True, text=True)
    assert done.returncode == 0 or arguments[0] == "check-ignore", done.stderr
    return done.stdout


NAMES = st.sampled_from(["a", "b", "ab", "a.x", "b.x", "c d", "é"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
PARTS = st.sampled_from(
    [
        "a",
        "b",
        "*",
        "**",
        "***",
        "a*",
        "*.x",
        "?",
        "??",
        "a.?",
        "a\\b",
        "c d",
        "é",
        "[ab]",
        "[!a]",
        "[^b]*",
        "[a-b]",
        "[z-a]",
        "[]a]",
        "[[:alpha:]]",
    ]
)
PATTERNS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "", "!", "/", "!/"]),
    st.lists(PARTS, min_size=1, max_size=3).map("/".join),
    st.sampled_from(["", "", "/"]),
    st.sampled_from(["", "", " ", "\\ ", " # c", "\r", "\t"]),
)
ODD = st.sampled_from(["#a", "\\#a", "\\!a", "!", "/", "", "**/", "a//b", "\ufeffa"])
FILES = st.lists(PATTERNS | ODD, max_size=4).map("\n".join)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Git repository, without what the user and the machine have configured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        patch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
        patch.setenv("XDG_CONFIG_HOME", os.devnull)
        top = tmp_path_factory.mktemp("repository")
        git(top, "init", "-q")
        yield top


@needs_git
@given(
    paths=st.lists(PATHS, min_size=1, max_size=12),
    rules=st.dictionaries(st.just("w") | PATHS.map("w/{}".format), FILES, max_size=3),
    outer=FILES,
    exclude=FILES,
    tracked=st.integers(0, 2),
)
def test_what_is_sent_is_what_git_does_not_ignore(
    repository: Path,
    paths: list[str],
    rules: dict[str, str],
    outer: str,
    exclude: str,
    tracked: int,
) -> None:
    """The workdir is a folder of the repository."""
    top, root = repository, repository / "w"
    shutil.rmtree(root, ignore_errors=True)
    (top / ".git" / "index").unlink(missing_ok=True)
    root.mkdir()
    for path in paths:
        with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
            workdir(root, path)
    files = [x.relative_to(root).as_posix() for x in root.rglob("*") if x.is_file()]
    if tracked:
        git(root, "add", "-f", "--", *files[:tracked])
    for folder, text in {**rules, "": outer, ".git/info/exclude": exclude}.items():
        place = top / folder
        if place.is_dir():
            place /= ".gitignore"
        if place.parent.is_dir():
            place.write_text(text, encoding="utf-8", newline="")
    if git(top, "check-ignore", "--no-index", "w"):
        return  # a workdir is sent although Git ignores it
    ignored = git(root, "check-ignore", "-z", "--stdin", text="\0".join(files))
    left = {name for name in files if name not in ignored.split("\0")}
    assert {name for name in sent(root) if name in files} == left


@needs_git
def test_gits_own_lists_count(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = workdir(tmp_path / "top", "train.py", "a.log", "b.tmp", "c.bin", "d.bin")
    git(top, "init", "-q")
    (top / ".git" / "info" / "exclude").write_text("*.log\n")
    (tmp_path / "everywhere").write_text("*.tmp\n")
    git(top, "config", "core.excludesFile", str(tmp_path / "everywhere"))
    (top / ".gitignore").write_text("*.bin\n")
    git(top, "add", "-f", ".gitignore", "d.bin")
    assert sent(top) == [".gitignore", "d.bin", "train.py"]
    git(top, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "all")
    other = tmp_path / "other"
    git(top, "worktree", "add", "-q", str(other))
    workdir(other, "a.log", "b.tmp", "new.py")
    assert sent(other) == [".gitignore", "d.bin", "new.py"]
    monkeypatch.setenv("PATH", "")  # without the command
    assert sent(other) == [".gitignore", "b.tmp", "new.py"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    workdir(tmp_path, "train.py", "locked/a")
    (tmp_path / "locked").chmod(0)
    if os.access(tmp_path / "locked", os.R_OK):
        pytest.skip("this user may read everything")
    try:
        with pytest.raises(ConfigError, match="locked cannot be read: Permission"):
            packed_files(tmp_path)
    finally:
        (tmp_path / "locked").chmod(0o700)


def test_names_and_contents_need_not_be_text(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    name = os.fsdecode(b"caf\xe9.bin")
    (code / name).write_bytes(b"\xff\x00")
    (code / "link").symlink_to(name)
    (code / os.fsdecode(b"\xe8.log")).touch()
    (code / IGNORE_FILE).write_bytes(b"\xe8.log\n")
    files = packed_files(code)
    assert set(files) == {Path(name), Path("link"), Path(IGNORE_FILE)}
    assert len(fingerprint(code, files)) == 64
    pack(code, files, tmp_path / "package")
    unpack(tmp_path / "package", tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == b"\xff\x00"
    assert os.readlink(tmp_path / "out" / "link") == name


@pytest.mark.parametrize("change", [b"", b"x" * 5_000_000])
def test_a_log_that_changes_while_it_is_packed_does_no_harm(tmp_path: Path, change: bytes) -> None:
    code = workdir(tmp_path / "code", "train.py")
    log = code / "log"
    log.write_bytes(b"y" * 3_000_000)
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            log.write_bytes(change)
            log.write_bytes(b"y" * 3_000_000)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(5):
            pack(code, packed_files(code), tmp_path / "package")
            unpack(tmp_path / "package", tmp_path / "out")
    finally:
        stop.set()
        writer.join()
    assert (tmp_path / "out" / "train.py").read_text() == "train.py"


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


def test_the_commit_of_the_code_is_packed_with_it(tmp_path: Path) -> None:
    folder = workdir(tmp_path / "workdir", "a.py")
    job = JobDir(tmp_path)
    pack(folder, packed_files(folder), job.workdir)
    assert job.commit() == ""
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    commit = git(folder, "rev-parse", "HEAD").strip()
    pack(folder, packed_files(folder), job.workdir)
    assert job.commit() == commit
    (folder / "a.py").write_text("changed")
    pack(folder, packed_files(folder), job.workdir)
    assert job.commit() == f"{commit}-dirty"


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
