"""How long a killed worker is missed, and what the time goes into.

A fleet trains; its worker is killed from outside, and the next generation begins at once,
as a manager would have it. What a new worker does before it trains is timed on its own:
the fork, the device, mapping and locking the memory that its predecessor left.

    python -m tests.gpu.recovery --job gpt2_124m --kills 3
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.gpu import runs
from tests.gpu.devices import names, print_result
from tests.gpu.forked import Child, Say
from tests.gpu.jobs import SIZES
from tests.integration.fleet import Fleet, Heard, Zygote
from tests.unit.pipeline.memory import LocalHolder

from spottrain.pipeline.devices.open import open_device
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.wire import messages

_STEPS_BEFORE = 3
_MICROBATCHES = 4


def parts(loaded: LoadedJob, holder: LocalHolder, say: Say) -> None:
    """Do what a new worker does first; say when each part was done."""
    times = {"forked": time.monotonic()}
    device = open_device(names(1)[0])
    device.synchronise()
    times["device"] = time.monotonic()
    memory = SlotMemory(holder, loaded.job, loaded.specs, device)
    memory.hold(range(len(loaded.specs)))
    times["locked"] = time.monotonic()
    copies = [
        device.upload(source)
        for arena in memory.arenas.values()
        for source in arena.parameters.values()
    ]
    for copy in copies:
        device.wait(copy)
    device.synchronise()
    times["uploaded"] = time.monotonic()
    say({**times, "num_bytes": memory.num_bytes})


def time_parts(job: str, folder: Path) -> dict[str, Any]:
    """Time a worker's start over memory that a predecessor has left."""
    torch.set_num_threads(1)  # as the supervisor: it may fork only without threads
    loaded = load(runs.job_spec(folder, job), runs.WORKDIR)
    holder = LocalHolder()
    predecessor = SlotMemory(holder, loaded.job, loaded.specs, open_device("cpu"))
    predecessor.hold(range(len(loaded.specs)))
    for arena in predecessor.arenas.values():
        arena.payload.fill_(1)  # takes real pages
    began = time.monotonic()
    child = Child(lambda say: parts(loaded, holder, say))
    try:
        found = child.hear()
    finally:
        child.close()
    del predecessor, arena
    holder.close()
    return {
        "num_bytes": found["num_bytes"],
        "fork_s": found["forked"] - began,
        "device_s": found["device"] - found["forked"],
        "map_and_lock_s": found["locked"] - found["device"],
        "upload_s": found["uploaded"] - found["locked"],
    }


class Times:
    """When the newest reports of each kind came in from a fleet of one worker."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.pid = 0
        self.last: dict[type, float] = {}

    def wait_for(self, *kinds: type) -> None:
        """Wait until reports of these kinds have come in, whatever came before."""
        missing = set(kinds)

        def take(_: str, report: Heard) -> bool | None:
            self.last[type(report)] = time.monotonic()
            if isinstance(report, messages.GenerationStarted):
                self.pid = report.pid
            missing.discard(type(report))
            return None if missing else True

        self._fleet.wait_for(f"reports of {kinds}", take)


def time_kills(job: str, kills: int, folder: Path) -> Iterator[dict[str, float]]:
    """Kill the worker of a fleet again and again; yield what each time took.

    The first time does not count.
    """
    spec = runs.job_spec(
        folder,
        job,
        steps=1_000_000,
        minibatch_size=_MICROBATCHES * 4,
        microbatch_size=4,
        checkpoint_every_steps=1_000_000,
        precision="bf16",
    )
    started, committed = messages.GenerationStarted, messages.MinibatchCommitted
    zygote = Zygote()
    try:
        threads = max(1, len(os.sched_getaffinity(0)) - 4)
        with runs.start(spec, "a", folder, zygote, threads=threads) as fleet:
            checkpoint, times = fleet.initialise(), Times(fleet)
            plan = runs.plan_for(spec, (1, 1), "a", SIZES[job].blocks)
            fleet.run(plan, checkpoint)
            times.wait_for(started, committed)
            for number in range(kills + 1):
                for _ in range(_STEPS_BEFORE):
                    times.wait_for(committed)
                killed = time.monotonic()
                os.kill(times.pid, signal.SIGKILL)
                times.wait_for(messages.WorkerDied)
                asked = time.monotonic()
                fleet.run(plan, checkpoint)
                times.wait_for(started, committed)
                if number:
                    yield {
                        "death_seen_s": times.last[messages.WorkerDied] - killed,
                        "start_s": times.last[started] - asked,
                        "first_minibatch_s": times.last[committed] - times.last[started],
                        "all_s": times.last[committed] - killed,
                    }
    finally:
        zygote.close()


def measure(job: str, kills: int) -> dict[str, Any]:
    """Return the parts, and medians over kills."""
    result: dict[str, Any] = {"job": job, "kills": (every := [])}
    with tempfile.TemporaryDirectory() as folder:
        result["parts"] = time_parts(job, Path(folder))
        for one in time_kills(job, kills, Path(folder)):
            every.append(one)
            result["median"] = {key: statistics.median(one[key] for one in every) for key in one}
            print_result(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=SIZES, default="gpt2_124m")
    parser.add_argument("--kills", type=int, default=3)
    chosen = parser.parse_args()
    measure(chosen.job, chosen.kills)


if __name__ == "__main__":
    main()
