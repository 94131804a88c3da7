"""The wheel cache: real pip against an index on loopback, and stores that are folders."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.package_index import PackageIndex

from spottrain.cloud.ssh.on_vm import wheels
from spottrain.cloud.ssh.transport.hosts import CLAIM_S, Published
from spottrain.storage.file import FileStore
from spottrain.storage.store import StorageError, Store


def publish(store: Store, cache: Path) -> str:
    wheels.publish(store, cache)
    return hashlib.sha256(wheels.index_of(cache)).hexdigest()


def pip_install(index: PackageIndex, home: Path, cache: Path) -> None:
    python = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*python, "install", "-q", "--target", str(home), "tiny-thing"]
    own = {"HOME": str(home), "PIP_CACHE_DIR": str(cache), **index.environment}
    subprocess.run(command, env=own, check=True)


@pytest.mark.rotated
def test_later_vms_download_nothing_that_the_first_one_has(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    with PackageIndex(tmp_path / "index") as index:
        index.add("tiny_thing", "1.0")
        pip_install(index, tmp_path / "first", tmp_path / "cache")
        assert index.downloads() == ["tiny_thing-1.0-py3-none-any.whl"]
        digest = publish(store, tmp_path / "cache")

        fetched = wheels.fetch(store, tmp_path / "there", digest)
        assert fetched is not None
        assert fetched > 0
        index.forget()
        pip_install(index, tmp_path / "later", tmp_path / "there")
        assert (tmp_path / "later/tiny_thing.py").is_file()
        assert index.downloads() == []


def file_in(folder: Path) -> Path:
    folder.mkdir()
    (folder / "one").write_bytes(b"one")
    return folder


def test_what_is_not_there_yet_is_none(tmp_path: Path) -> None:
    assert wheels.fetch(FileStore(tmp_path / "store"), tmp_path / "got", "a") is None


def test_a_damaged_file_is_not_used(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    digest = publish(store, file_in(tmp_path / "cache"))
    store.put("files/one", b"other")
    with pytest.raises(StorageError, match="is not what was published"):
        wheels.fetch(store, tmp_path / "got", digest)
    assert not list((tmp_path / "got").iterdir())


def test_what_another_has_published_is_not_used(tmp_path: Path) -> None:
    """All VMs may write there, and what is there runs on later ones."""
    store = FileStore(tmp_path / "store")
    digest = publish(store, file_in(tmp_path / "cache"))
    (tmp_path / "cache" / "one").write_bytes(b"evil")
    publish(store, tmp_path / "cache")
    with pytest.raises(StorageError, match="is not what a VM of this job published"):
        wheels.fetch(store, tmp_path / "got", digest)


@pytest.mark.parametrize("name", ["../one", "/one", "a/../../one"])
def test_nothing_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    store, index = FileStore(tmp_path / "store"), {"files": {name: ""}}
    data = json.dumps(index).encode()
    store.put(wheels.INDEX, data)
    with pytest.raises(StorageError, match="which is no file"):
        wheels.fetch(store, tmp_path / "got", hashlib.sha256(data).hexdigest())


def test_one_vm_publishes_and_the_manager_remembers_what(tmp_path: Path) -> None:
    folder, place = tmp_path / "known", "s3://bucket/wheels/1"
    published = Published(folder)
    assert published.digest(place) == ""
    assert published.claim(place)
    assert not published.claim(place)
    assert published.claim("s3://bucket/wheels/2")
    published.note(place, "abc")
    assert Published(folder).digest(place) == "abc"
    assert not Published(folder).claim(place)

    (file,) = (file for file in folder.iterdir() if file.read_text())
    os.utime(file, (0, file.stat().st_mtime - CLAIM_S - 1))
    assert published.claim(place)  # it died before all was there
    assert not published.claim(place)


def test_nothing_is_published_where_nothing_can_be_noted() -> None:
    published = Published(None)
    assert (published.digest("place"), published.claim("place")) == ("", False)
