"""What a checkpoint of 100 MB costs, in a folder and in a bucket of a server that speaks S3.

``stall`` is how long the next update would wait for the copies, which a thread makes one by one
while another one writes them.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from tests.builders import a_manifest
from tests.fakes.object_store import bucket

from spottrain.manifest import new_name, read_manifest, write_manifest
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.state.checkpoint import (
    Background,
    SectionCopies,
    load_section,
    write_snapshot,
)
from spottrain.storage.open import open_store
from spottrain.storage.store import Store

SECTIONS, SECTION_BYTES, TRIALS = 4, 25_000_000, 3


def main() -> None:
    """Print a row for each kind of store, the best of three trials."""
    print(f"{'store':<8}{'stall s':>9}{'written s':>11}{'read s':>9}")
    with tempfile.TemporaryDirectory() as folder, bucket() as s3:
        for kind, place in (("folder", Path(folder)), ("S3", s3.url("bench"))):
            rows = zip(*(_trial(open_store(place)) for _ in range(TRIALS)), strict=True)
            stall_s, written_s, read_s = map(min, rows)
            print(f"{kind:<8}{stall_s:>9.3f}{written_s:>11.2f}{read_s:>9.2f}")


def _trial(store: Store) -> tuple[float, float, float]:
    weights = [torch.randn(SECTION_BYTES // 4) for _ in range(SECTIONS)]
    sections = {k: {"w": tensor} for k, tensor in enumerate(weights)}
    name, step, abandoned = new_name(1, 1), 1, threading.Event()
    writer, tracker = Background(), TensorTracker(0)
    with ThreadPoolExecutor(1) as copier, _timed() as written:
        with _timed() as stall:
            home = HostDevice()
            copies = SectionCopies(home, home, sections, copier, tracker, abandoned)
            written_files = writer.submit(write_snapshot, store, "", name, copies, abandoned)
            copies.finish()
        outcome = written_files.result()
        assert not outcome.error, outcome.error
        write_manifest(store, a_manifest(name, step, outcome.files))
    with _timed() as read:
        manifest = read_manifest(store, name)
        for k, tensor in enumerate(weights):
            tensor.copy_(load_section(store, manifest, k)["w"])
    return stall[0], written[0], read[0]


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Give a list that holds the seconds that the block took, once it is over."""
    taken: list[float] = []
    begin_s = time.monotonic()
    yield taken
    taken.append(time.monotonic() - begin_s)


if __name__ == "__main__":
    main()
