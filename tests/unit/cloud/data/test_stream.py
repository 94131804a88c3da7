"""Datasets of which a machine holds a part at a time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.hub import Hub, serve_hub

from spottrain.cloud.data.cache import Cache
from spottrain.cloud.data.prepare import fetch_data
from spottrain.cloud.data.request import DataError, DataRequest
from spottrain.cloud.data.shards import Shards
from spottrain.cloud.data.stream import Stream
from spottrain.datasets import variable

KIB = 1024
FILES = 20


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        contents = {f"part-{i:02}.bin": bytes([i]) * KIB for i in range(FILES)}
        hub.repository("org/corpus").commit(contents)
        yield hub


def made(folder: Path, kib: float, url: str = "hf://org/corpus") -> Path:
    """Prepare a stream of at most so many KiB; return its folder."""
    request = DataRequest(name="corpus", url=url, cache_bytes=int(kib * KIB))
    return Path(fetch_data([request], Cache(folder))["SPOTTRAIN_DATA_CORPUS"])


def fetched(hub: Hub) -> list[str]:
    return [path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path]


def test_a_file_is_fetched_when_it_is_needed_and_once(hub: Hub, tmp_path: Path) -> None:
    stream = Stream(made(tmp_path, 5))
    assert fetched(hub) == []
    for _ in range(2):
        assert stream.path("part-03.bin").read_bytes() == b"\3" * KIB
    assert fetched(hub) == ["part-03.bin"]
    assert Stream(stream.folder).path("part-03.bin").exists()
    assert fetched(hub) == ["part-03.bin"]


def test_what_was_used_least_recently_makes_room(hub: Hub, tmp_path: Path) -> None:
    stream = Stream(made(tmp_path, 3))
    for place, name in enumerate(["part-00.bin", "part-01.bin", "part-02.bin"]):
        os.utime(stream.path(name), (place, place))
    os.utime(stream.path("part-00.bin"), (9, 9))
    opened = stream.path("part-01.bin").open("rb")
    os.utime(stream.path("part-01.bin"), (1, 1))
    stream.path("part-03.bin")
    here = sorted(path.name for path in (stream.folder / "files").iterdir())
    assert here == ["part-00.bin", "part-02.bin", "part-03.bin"]
    with opened:  # and who reads it reads on
        assert opened.read() == b"\1" * KIB
    assert stream.usage == {"fetched": 4 * KIB, "files": 4, "most": 3 * KIB}


def test_files_in_use_that_do_not_fit_are_refused(hub: Hub, tmp_path: Path) -> None:
    stream = Stream(made(tmp_path, 2))
    used = ["part-00.bin", "part-01.bin"]
    for name in used:
        stream.path(name)
    with pytest.raises(DataError, match="3 files that are read together do not fit"):
        stream.path("part-02.bin", keep=used)


def test_a_file_larger_than_all_that_may_be_here_is_refused_at_once(
    hub: Hub, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"part-..\.bin alone has .* raise it, or make smaller"):
        made(tmp_path, 0.5)


def test_what_is_read_next_comes_before_it_is_needed(hub: Hub, tmp_path: Path) -> None:
    stream = Stream(made(tmp_path, 4))
    stream.path("part-00.bin")
    for _ in range(2):  # a second time nothing happens
        stream.expect([f"part-{i:02}.bin" for i in range(1, 9)], ["part-00.bin"])
    assert stream._thread is not None
    stream._thread.join()
    assert fetched(hub) == [f"part-{i:02}.bin" for i in range(4)]
    assert stream.usage["most"] == 4 * KIB


READER = f"""
import random, sys
from pathlib import Path
from spottrain.cloud.data.stream import Stream
stream, drawn = Stream(Path(sys.argv[1])), random.Random(sys.argv[2])
for _ in range(40):
    number = drawn.randrange({FILES})
    try:
        content = stream.path(f"part-{{number:02}}.bin").read_bytes()
    except FileNotFoundError:
        continue  # another one made room with it
    assert content == bytes([number]) * {KIB}
"""


READER_OF_ONE = """
import sys
from pathlib import Path
from spottrain.cloud.data.stream import Stream
Stream(Path(sys.argv[1])).path("a.bin")
"""


def process(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)])


def test_processes_share_files_and_never_hold_more_than_they_may(hub: Hub, tmp_path: Path) -> None:
    folder = made(tmp_path, 5)
    readers = [process(READER, folder, seed) for seed in range(4)]
    assert [reader.wait() for reader in readers] == [0] * 4
    assert Stream(folder).usage["most"] == 5 * KIB


def test_what_others_are_about_to_fetch_takes_room(hub: Hub, tmp_path: Path) -> None:
    stream = Stream(made(tmp_path, 3))
    claim = stream.folder / "claims" / "another"
    with claim.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(2 * KIB)
        stream.path("part-00.bin")
        stream.path("part-01.bin")
        assert [path.name for path in (stream.folder / "files").iterdir()] == ["part-01.bin"]
    stream.path("part-00.bin")  # they have ended
    assert len(list((stream.folder / "files").iterdir())) == 2
    assert claim.stat().st_size == 0


def test_what_a_killed_process_had_of_a_file_is_no_loss(hub: Hub, tmp_path: Path) -> None:
    large = bytes(range(256)) * 20_000
    hub.repository("org/large").commit({"a.bin": large, "b.bin": large[::-1]})
    folder = made(tmp_path, 6_000, "hf://org/large")
    hub.content.breaks_after, hub.content.stalled = 3_000_000, threading.Event()
    reader = process(READER_OF_ONE, folder)
    hub.content.stalled.wait()
    reader.kill()
    reader.wait()
    hub.content.stalled = None
    stream = Stream(folder)
    assert stream.path("b.bin").read_bytes() == large[::-1]
    assert list((folder / "coming").glob("*/a.bin*")) == []
    assert stream.path("a.bin").read_bytes() == large
    assert stream.usage["most"] <= 6_000 * KIB


def test_shards_read_what_lies_in_files(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable("corpus"), str(made(tmp_path, 5)))
    shards = Shards("corpus", Path.read_bytes, lambda num_bytes: num_bytes, window=2)
    assert len(shards) == FILES * KIB
    assert [shards[i * KIB] for i in range(FILES)] == list(range(FILES))
    assert shards.shard_lengths == (KIB,) * FILES
    with pytest.raises(IndexError):
        shards[FILES * KIB]


def test_an_index_counts_the_examples_of_all_files(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable("corpus"), str(made(tmp_path, 5)))
    lengths = {"part-07.bin": 3, "part-02.bin": 1, "part-09.bin": 0, "part-11.bin": 2}
    shards = Shards("corpus", Path.read_bytes, lengths, window=4)
    assert [shards[i] for i in range(6)] == [2, 7, 7, 7, 11, 11]
    assert [shards[-1], shards[-6]] == [11, 2]


def test_lengths_may_lie_beside_the_files(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"lengths.json": b'{"a/x.bin": 3, "b.bin": 2}', "a/x.bin": b"012", "b.bin": b"34"}
    hub.repository("org/small").commit(files)
    monkeypatch.setenv(variable("corpus"), str(made(tmp_path, 5, "hf://org/small")))
    shards = Shards("corpus", Path.read_bytes)
    assert bytes(shards[i] for i in range(len(shards))) == b"01234"
    with pytest.raises(DataError, match=r"has no c\.bin, which has a length"):
        Shards("corpus", Path.read_bytes, {"c.bin": 1})


def test_without_lengths_shards_say_what_to_write(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable("corpus"), str(made(tmp_path, 5)))
    with pytest.raises(DataError, match=r"has no lengths\.json; put one beside the files"):
        Shards("corpus", Path.read_bytes)


def test_data_that_is_whole_is_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("corpus"), str(tmp_path))
    with pytest.raises(DataError, match="give it a cache_gib under data"):
        Shards("corpus", Path.read_bytes)
