"""What the end of a mini-batch takes, piece by piece, with state in either home.

    python -m tests.gpu.commit_parts gpt2_1558m --sections 8

All is the product's: the arenas, the norm, the undo copy, the optimizer's step. A few of
the model's sections stand for all, since every piece is proportional to bytes.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.gpu import runs
from tests.gpu.devices import device_name, print_result
from tests.gpu.jobs import SIZES

from spottrain.pipeline.calibrate.sections import PrivateMemory
from spottrain.pipeline.devices.open import open_device
from spottrain.pipeline.model.loaded import load
from spottrain.pipeline.model.optimizer import SectionOptimizer
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.state.update import contributions
from spottrain.wire.model import StateHome

_TURNS = 3


def pieces_of(job: str, sections: int, state: StateHome, folder: Path) -> dict[str, float]:
    """Return the seconds of each piece per GB of parameters."""
    loaded = load(runs.job_spec(folder, job, reduction="fast", precision="bf16"), runs.WORKDIR)
    device = open_device(device_name())
    found = dict[str, float]()
    with device.using():
        memory = SlotMemory(PrivateMemory(), loaded.job, loaded.specs, device)
        memory.move_home(state)
        first = loaded.layout.num_sections // 2
        own = range(first, min(first + sections, loaded.layout.num_sections))
        began_s = time.perf_counter()
        memory.hold(own)  # on the host with pages locked
        device.synchronise()
        gigabytes = sum(map(loaded.layout.param_bytes, own)) / 1e9
        found["hold"] = (time.perf_counter() - began_s) / gigabytes
        arenas = [memory.arenas[k] for k in own]
        optimizers = {k: SectionOptimizer(loaded.job, memory.arenas[k]) for k in own}
        pieces: dict[str, Callable[[SectionArena], object]] = {
            "zero": lambda arena: [run.zero_() for run in arena.gradient_runs],
            "norm": lambda arena: contributions([arena], (), {}, {}),
            "undo": memory.undo.save,
            "scale": lambda arena: [run.mul_(0.5) for run in arena.gradient_runs],
            "step": lambda arena: optimizers[arena.section].step(0, arena.gradients),
        }
        for turn in range(1 + _TURNS):
            for name, act in pieces.items():
                began_s = time.perf_counter()
                for arena in arenas:
                    act(arena)
                device.synchronise()
                took_s = (time.perf_counter() - began_s) / gigabytes
                if turn:  # the first one loads kernels and makes the optimizer's state
                    found[name] = min(found.get(name, took_s), took_s)
        memory.keep_only(())
    return found


def transfers_of(gigabytes: float, advice: int) -> dict[str, float]:
    """Return seconds per GB of what the host's memory takes.

    Args:
        gigabytes: Of an anonymous file, as arenas are; it is touched when its pages are locked.
        advice: About the size of its pages.
    """
    device, num_bytes = open_device(device_name()), int(gigabytes * 1e9) >> 21 << 21
    fd = os.memfd_create("pages")
    os.ftruncate(fd, num_bytes)
    mapped = mmap.mmap(fd, num_bytes)
    os.close(fd)
    mapped.madvise(advice)
    here, found = torch.frombuffer(mapped, dtype=torch.uint8), dict[str, float]()
    with device.using():
        there = device.allocate(num_bytes)
        acts: dict[str, Callable[[], object]] = {
            "lock": lambda: device.lock_pages(here),
            "up": lambda: device.finish(device.upload(here, there)),
            "down": lambda: device.finish(device.download(there, here)),
            "unlock": lambda: device.unlock_pages(here),
        }
        for name, act in acts.items():
            began_s = time.perf_counter()
            act()
            found[name] = (time.perf_counter() - began_s) / (num_bytes / 1e9)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=SIZES)
    parser.add_argument("--sections", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="that are locked and moved")
    chosen = parser.parse_args()
    result: dict[str, Any] = {"unit": "seconds per GB of parameters"}
    homes: tuple[StateHome, ...] = ("device", "host")
    threads = {"device": [1], "host": [1, 4, len(os.sched_getaffinity(0))]}
    with tempfile.TemporaryDirectory() as folder:
        for home in homes:
            for number in threads[home]:
                torch.set_num_threads(number)
                try:
                    found = pieces_of(chosen.job, chosen.sections, home, Path(folder))
                except RuntimeError as error:
                    found = {"error": str(error)[-300:]}  # type: ignore[dict-item]
                result[f"{home}, {number} threads"] = found
                print_result(result)
    for pages, advice in {"4 KiB": mmap.MADV_NOHUGEPAGE, "huge": mmap.MADV_HUGEPAGE}.items():
        result[f"host memory, {pages} pages"] = transfers_of(chosen.gigabytes, advice)
        print_result(result)


if __name__ == "__main__":
    main()
