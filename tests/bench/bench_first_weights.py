"""First weights of a large model: memory of each process that writes them, seconds, bits.

Processes as workers are forked: they write the checkpoint of step 0 together, then one
writes it alone. Every file must have the same hash.

    python -m tests.bench.bench_first_weights [entrypoint [processes ...]]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.bench.processes import status_bytes
from tests.gpu import runs
from tests.gpu.forked import Child, Say, start_store

from spottrain.manifest import read_manifest
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.pipeline.process.tasks import initialise
from spottrain.storage.open import open_store
from spottrain.wire import messages
from spottrain.wire.plan import Slot

GB = 1e9
DEADLINE_S = 7200.0


@dataclass(frozen=True)
class Row:
    """What writing took."""

    processes: int
    seconds: float
    peak_bytes: int
    """Of the largest process."""
    began_bytes: int
    """Of it, before it wrote."""
    hashes: tuple[str, ...]


def _write(loaded: LoadedJob, command: messages.Initialise, rank: int, say: Say) -> None:
    torch.set_num_threads(1)
    began = status_bytes(os.getpid(), "VmRSS")
    saved = initialise(loaded, command, rank)
    name = saved.name if isinstance(saved, messages.CheckpointSaved) else ""
    say({"name": name, "began": began, "peak": status_bytes(os.getpid(), "VmHWM")})


def measure(loaded: LoadedJob, processes: int) -> Row:
    """Have ``processes`` write first weights, read their hashes, and delete them."""
    store, port = start_store()
    command = messages.Initialise(
        participants=tuple(Slot(vm_id=str(rank), index=0) for rank in range(processes)),
        store_host="127.0.0.1",
        store_port=port,
    )
    began_s = time.monotonic()
    writers = [
        Child(lambda say, rank=rank: _write(loaded, command, rank, say))  # type: ignore[misc]
        for rank in range(processes)
    ]
    told = [writer.hear(DEADLINE_S) for writer in writers]
    seconds = time.monotonic() - began_s
    for child in (*writers, store):
        child.close()
    checkpoints = open_store(loaded.spec.checkpoint_path)
    manifest = read_manifest(checkpoints, told[0]["name"])
    largest = max(told, key=lambda one: int(one["peak"]))
    shutil.rmtree(Path(loaded.spec.checkpoint_path, manifest.name))
    hashes = tuple(file.sha256 for file in manifest.files)
    return Row(processes, seconds, largest["peak"], largest["began"], hashes)


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each number of processes; return 1 if bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entrypoint", nargs="?", default="gpt2_1558m")
    parser.add_argument("processes", nargs="*", type=int, default=[4, 1])
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="first-weights-") as folder:
        loaded = load(runs.job_spec(Path(folder), chosen.entrypoint), runs.WORKDIR)
        layout = loaded.layout
        sizes = [layout.param_bytes(k) for k in range(layout.num_sections)]
        total = sum(spec.num_bytes for spec in layout.specs.values())
        print(
            f"{chosen.entrypoint}: {total / GB:.2f} GB of parameters, {len(sizes)} sections, "
            f"the largest {max(sizes) / GB:.2f} GB"
        )
        rows = []
        for processes in chosen.processes:
            rows.append(row := measure(loaded, processes))
            print(
                f"{row.processes} processes: {row.seconds:.0f} s; the largest grew from "
                f"{row.began_bytes / GB:.2f} to {row.peak_bytes / GB:.2f} GB at its peak"
            )
    same = len({row.hashes for row in rows}) == 1
    print("the same bits" if same else "other bits")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
