"""Jobs on disk as an earlier spottrain left them, and what to compare them by."""

from __future__ import annotations

import gzip
import json
import sqlite3
import struct
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from spottrain.manifest import list_checkpoints
from spottrain.storage.open import open_store

STORED = Path(__file__).parent / "stored"
ROOT = Path("/tmp/spottrain-stored")
"""Where the stored jobs were made; paths in them begin with it."""
STEPS = 24
Tensors = dict[str, tuple[str, list[int], bytes]]
"""By section and name: type, shape and content."""


def unpacked(folder: Path) -> Path:
    """Unpack the stored jobs into a folder, as if they had been made there."""
    with tarfile.open(STORED / "jobs.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    for path in (*folder.rglob("*.json"), *folder.rglob("*.jsonl.gz")):
        is_packed = path.suffix == ".gz"
        data = gzip.decompress(path.read_bytes()) if is_packed else path.read_bytes()
        data = data.replace(bytes(ROOT), bytes(folder))
        path.write_bytes(gzip.compress(data) if is_packed else data)
    for path in folder.rglob("journal.sqlite"):
        with closing(sqlite3.connect(path)) as journal, journal:
            change = "UPDATE events SET body = replace(body, ?, ?)"
            journal.execute(change, (str(ROOT), str(folder)))
    return folder


def tensors(root: Path | str) -> Tensors:
    """Return all that the newest checkpoint holds."""
    store = open_store(root)
    newest = list_checkpoints(store)[0]
    assert newest.step == STEPS
    found: Tensors = {}
    for entry in store.list(newest.name):
        section = entry.name.rpartition("/")[2]
        if section.endswith(".safetensors"):
            data = store.get(entry.name)
            (size,) = struct.unpack("<Q", data[:8])
            head: dict[str, Any] = json.loads(data[8 : 8 + size])
            head.pop("__metadata__", None)
            for name, one in head.items():
                start, end = (8 + size + offset for offset in one["data_offsets"])
                key = f"{section}/{name}"
                found[key] = one["dtype"], one["shape"], data[start:end]
    return found


def check_same(ended: Tensors, undisturbed: Tensors) -> None:
    """Compare two ends of training.

    Today's software rounds otherwise, and keeps more that is of no single parameter.
    """
    assert {n for n in ended if "///" not in n} == undisturbed.keys()
    for name, (dtype, shape, content) in undisturbed.items():
        assert ended[name][:2] == (dtype, shape), name
        if dtype != "F32":
            assert ended[name][2] == content, name
        else:
            torch.testing.assert_close(
                torch.frombuffer(bytearray(ended[name][2]), dtype=torch.float32),
                torch.frombuffer(bytearray(content), dtype=torch.float32),
                rtol=1e-3,
                atol=1e-5,
                msg=name,
            )


def numbers(document: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number in a document, with its place there."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from numbers(value, f"{place}.{key}")
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from numbers(value, f"{place}[{index}]")
    elif isinstance(document, (int, float)):
        yield place, document
