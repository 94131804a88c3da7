"""The wheel cache: real pip against an index on loopback, and stores that are folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.package_index import PackageIndex

from spottrain.cloud.ssh.on_vm import wheels
from spottrain.storage.file import FileStore
from spottrain.storage.store import StorageError

NOW_S = 1e9


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
        assert wheels.publish(store, tmp_path / "cache", "vm-0", NOW_S)

        fetched = wheels.fetch(store, tmp_path / "there")
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


def test_nobody_publishes_twice_or_while_another_does(tmp_path: Path) -> None:
    store, cache = FileStore(tmp_path / "store"), file_in(tmp_path / "cache")
    store.put("claim-0", json.dumps({"owner": "gone", "at_s": NOW_S}).encode())
    assert not wheels.publish(store, cache, "b", NOW_S + wheels.CLAIM_S - 1)
    assert wheels.fetch(store, tmp_path / "none") is None
    assert wheels.publish(store, cache, "b", NOW_S + wheels.CLAIM_S + 1)
    assert not wheels.publish(store, cache, "c", NOW_S + 9 * wheels.CLAIM_S)


def test_a_damaged_file_is_not_used(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    wheels.publish(store, file_in(tmp_path / "cache"), "a", NOW_S)
    store.put("files/one", b"other")
    with pytest.raises(StorageError, match="is not what was published"):
        wheels.fetch(store, tmp_path / "got")
    assert not list((tmp_path / "got").iterdir())


@pytest.mark.parametrize("name", ["../one", "/one", "a/../../one"])
def test_nothing_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    store = FileStore(tmp_path / "store")
    store.put(wheels.INDEX, json.dumps({"files": {name: ""}}).encode())
    with pytest.raises(StorageError, match="which is no file"):
        wheels.fetch(store, tmp_path / "got")
