"""Data on a machine: fetched once, whole, within the disk."""

from __future__ import annotations

import os
import shutil
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.cloud.data.cache import Cache, missing_files, num_bytes
from spottrain.cloud.data.request import DataError, DataRequest, DataUnavailableError
from spottrain.cloud.data.sources import SourceFile

WISH = DataRequest(name="corpus", url="s3://bucket/corpus/")


@dataclass
class Shelf:
    """A source in memory that notes what is fetched."""

    content: dict[str, bytes]
    is_folder: bool = True
    version: str = "1"
    away: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(
            SourceFile(name, len(data), self.version) for name, data in self.content.items()
        )

    def fetch(self, file: SourceFile, target: Path) -> None:
        if file.name in self.away:
            raise DataUnavailableError(f"{file.name} is away")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.content[file.name])
        self.fetched.append(file.name)


def ensure(cache: Cache, shelf: Shelf, request: DataRequest = WISH) -> Path:
    return cache.ensure(request, shelf, lambda line: None)


def read(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_cached_data_is_not_fetched_again(tmp_path: Path) -> None:
    shelf = Shelf({"a": b"1", "below/b": b"22"})
    first = ensure(Cache(tmp_path), shelf)
    assert read(first) == shelf.content
    assert ensure(Cache(tmp_path), shelf) == first
    assert sorted(shelf.fetched) == ["a", "below/b"]


def test_one_object_is_a_file(tmp_path: Path) -> None:
    shelf = Shelf({"words.bin": b"123"}, is_folder=False)
    path = ensure(Cache(tmp_path), shelf)
    assert (path.name, path.read_bytes()) == ("words.bin", b"123")


def test_another_version_is_cached_separately(tmp_path: Path) -> None:
    old = ensure(Cache(tmp_path), Shelf({"a": b"1"}))
    new = ensure(Cache(tmp_path), Shelf({"a": b"2"}, version="2"))
    assert (read(old), read(new)) == ({"a": b"1"}, {"a": b"2"})


def test_received_files_are_kept_after_a_failure(tmp_path: Path) -> None:
    shelf = Shelf({"a": b"1", "b": b"2"}, away={"b"})
    with pytest.raises(DataUnavailableError, match="b is away"):
        ensure(Cache(tmp_path), shelf)
    assert not [p for p in tmp_path.iterdir() if p.is_dir() and p.suffix != ".part"]
    shelf.away.clear()
    shelf.fetched.clear()
    assert read(ensure(Cache(tmp_path), shelf)) == shelf.content
    assert shelf.fetched == ["b"]


def test_a_removed_file_is_fetched_again(tmp_path: Path) -> None:
    shelf = Shelf({"a": b"1", "b": b"22"})
    path = ensure(Cache(tmp_path), shelf)
    (path / "b").write_bytes(b"2")
    shelf.fetched.clear()
    assert read(ensure(Cache(tmp_path), shelf)) == shelf.content
    assert shelf.fetched == ["b"]


def test_two_at_the_same_time_fetch_once(tmp_path: Path) -> None:
    shelf = Shelf({f"{n}": b"x" * n for n in range(20)})
    with ThreadPoolExecutor() as pool:
        paths = set(pool.map(lambda _: ensure(Cache(tmp_path), shelf), range(4)))
    assert len(paths) == 1
    assert len(shelf.fetched) == 20


def test_a_small_disk_is_reported_with_both_sizes(tmp_path: Path) -> None:
    @dataclass
    class Huge(Shelf):
        @property
        def files(self) -> tuple[SourceFile, ...]:
            return (SourceFile("a", 10**18, "1"),)

    with pytest.raises(DataError, match=r"needs 1,000,000\.0 TB, [\d,.]+ [GMT]B are free in"):
        ensure(Cache(tmp_path), Huge({}))


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    @dataclass
    class Full(Shelf):
        def fetch(self, file: SourceFile, target: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"s3://bucket/corpus/.*is full; free space"):
        ensure(Cache(tmp_path), Full({"a": b"1"}))


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("x" * 300,), ("x" * 300 + "/a",)])
def test_invalid_file_names_are_reported(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"a name cannot be used here: .*rename it"):
        ensure(Cache(tmp_path), Shelf(dict.fromkeys(names, b"1")))


class Usage(NamedTuple):
    free: int


@pytest.mark.parametrize("may_evict", [True, False])
def test_the_least_recently_used_data_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_evict: bool
) -> None:
    def free(_: Path) -> Usage:
        used = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
        return Usage(100 - used)

    monkeypatch.setattr(shutil, "disk_usage", free)
    (tmp_path / "not-ours").mkdir()
    paths = []
    for n, name in enumerate(("first", "second")):
        request = DataRequest(name=name, url=f"s3://bucket/{name}/")
        paths.append(ensure(Cache(tmp_path), Shelf({name: b"x" * 40}), request))
        os.utime(paths[-1], (n, n))
    cache = Cache(tmp_path, may_evict=may_evict)
    if may_evict:
        third = ensure(cache, Shelf({"third": b"x" * 50}))
        assert [p.exists() for p in (*paths, third)] == [False, True, True]
        assert (tmp_path / "not-ours").exists()
    else:
        with pytest.raises(DataError, match="free space"):
            ensure(cache, Shelf({"third": b"x" * 50}))
        assert all(p.exists() for p in paths)


def test_data_of_the_job_itself_is_not_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path, may_evict=True)
    ensure(cache, Shelf({"a": b"1"}), DataRequest(name="a", url="s3://bucket/a/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0))
    with pytest.raises(DataError, match="free space"):
        ensure(cache, Shelf({"b": b"1"}))
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 2


def archive(path: Path, kind: str) -> bytes:
    inside = path / "inside"
    (inside / "folder").mkdir(parents=True)
    (inside / "folder" / "a.txt").write_text("one")
    if kind == "zip":
        with zipfile.ZipFile(path / "made", "w") as zipped:
            zipped.write(inside / "folder" / "a.txt", "folder/a.txt")
    else:
        with tarfile.open(path / "made", "w:gz" if kind == "gz" else "w") as tar:
            tar.add(inside / "folder", "folder")
    shutil.rmtree(inside)
    return (path / "made").read_bytes()


UNPACKED = DataRequest(name="images", url="s3://bucket/images.tar", unpack=True)


@pytest.mark.parametrize("kind", ["", "gz", "zip"])
def test_an_archive_is_found_unpacked(tmp_path: Path, kind: str) -> None:
    shelf = Shelf({"images.tar": archive(tmp_path, kind)}, is_folder=False)
    cache = Cache(tmp_path / "cache")
    path = ensure(cache, shelf, UNPACKED)
    assert read(path) == {"folder/a.txt": b"one"}
    assert ensure(cache, shelf, UNPACKED) == path
    assert shelf.fetched == ["images.tar"]
    assert not list((tmp_path / "cache").glob("*.archive"))


def test_a_file_that_is_no_archive_is_reported(tmp_path: Path) -> None:
    shelf = Shelf({"images.tar": b"hello"}, is_folder=False)
    with pytest.raises(DataError, match=r"^data images .*: is not a tar or zip archive.*; remove"):
        ensure(Cache(tmp_path), shelf, UNPACKED)


def test_a_damaged_archive_is_reported(tmp_path: Path) -> None:
    data = archive(tmp_path, "gz")
    shelf = Shelf({"images.tar": data[: len(data) // 2]}, is_folder=False)
    with pytest.raises(DataError, match="archive"):
        ensure(Cache(tmp_path), shelf, UNPACKED)


def test_an_archive_cannot_leave_its_folder(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "made", "w") as tar:
        tar.addfile(tarfile.TarInfo("../../outside"))
    shelf = Shelf({"images.tar": (tmp_path / "made").read_bytes()}, is_folder=False)
    with pytest.raises(DataError, match="archive"):
        ensure(Cache(tmp_path / "cache"), shelf, UNPACKED)
    assert not list(tmp_path.rglob("outside"))


def test_a_process_that_waited_for_the_lock_uses_the_fetched_data(
    tmp_path: Path,
) -> None:
    reached, may_go = threading.Event(), threading.Event()

    @dataclass
    class Slow(Shelf):
        def fetch(self, file: SourceFile, target: Path) -> None:
            reached.set()
            assert may_go.wait(600)
            super().fetch(file, target)

    slow, other = Slow({"a": b"1"}), Shelf({"a": b"1"})
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ensure, Cache(tmp_path), slow)
        assert reached.wait(600)
        second = pool.submit(ensure, Cache(tmp_path), other)
        may_go.set()
        assert first.result(60) == second.result(60)
    assert other.fetched == []


@given(
    st.dictionaries(
        st.text("abc/", min_size=1).filter(
            lambda x: x[0] != "/" and x[-1] != "/" and "//" not in x
        ),
        st.tuples(st.binary(max_size=5), st.booleans()),
    )
)
def test_missing_files_are_absent_or_incomplete(
    tmp_path_factory: pytest.TempPathFactory, wanted: dict[str, tuple[bytes, bool]]
) -> None:
    wanted = {
        name: what
        for name, what in wanted.items()
        if not any(other.startswith(f"{name}/") for other in wanted)
    }
    folder = tmp_path_factory.mktemp("folder")
    files = [SourceFile(name, len(data), "") for name, (data, _) in wanted.items()]
    for name, (data, is_there) in wanted.items():
        if is_there:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    expected = {name for name, (_, is_there) in wanted.items() if not is_there}
    assert {file.name for file in missing_files(folder, files)} == expected
    assert num_bytes(files) == sum(len(data) for data, _ in wanted.values())
