"""Does exact mode give the same bits on every shape, with a model of real size?

python -m tests.gpu.exactness --job gpt2_124m
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu import runs
from tests.gpu.devices import device_name, is_gpu, print_result
from tests.gpu.jobs import SIZES
from tests.integration.fleet import Fleet, Zygote

from spottrain.wire import messages
from spottrain.wire.model import StateHome

STEPS = 3


def digest(weights: Mapping[str, bytes]) -> str:
    """Return a hash of all tensors."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name])
    return found.hexdigest()


def train(zygote: Zygote, job: str, shape: tuple[int, int], state: StateHome) -> dict[str, Any]:
    """Train a few mini-batches of 8 micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        spec = runs.job_spec(
            Path(folder),
            job,
            steps=STEPS,
            minibatch_size=16,
            checkpoint_every_steps=1000,
            precision="bf16",
        )
        vms = runs.VMS[: shape[0] * shape[1]]
        began = time.monotonic()
        # A stand-in computes on the CPU, where the number of threads changes the bits.
        cores = len(os.sched_getaffinity(0)) if is_gpu(device_name()) else 1
        threads = max(1, cores // len(vms))
        with runs.start(spec, vms, Path(folder), zygote, threads=threads) as fleet:
            weights = fleet.train(
                lambda names: runs.plan_for(spec, shape, names, SIZES[job].blocks, state=state),
                fleet.initialise(),
            )
            result = _reported(fleet)
        taken_s = time.monotonic() - began
        return {**result, "digest": digest(weights), "taken_s": taken_s}


def _reported(fleet: Fleet) -> dict[str, Any]:
    every = [r for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted)]
    return {
        "loss": max(every, key=lambda r: r.step).loss,
        "step_s": statistics.median(r.step_s for r in every if r.step > 1),
    }


def measure(
    job: str, seconds: float, homes: Sequence[StateHome], shapes: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Train with every shape and home until the time is over; compare."""
    end, zygote = time.monotonic() + seconds, Zygote()
    result: dict[str, Any] = {"job": job}
    try:
        for state in homes:
            runs_of_home: dict[str, Any] = {}
            result[state] = runs_of_home
            for shape in shapes:
                if time.monotonic() > end:
                    break
                name = f"{shape[0]}x{shape[1]}"
                try:
                    runs_of_home[name] = train(zygote, job, shape, state)
                except (AssertionError, RuntimeError) as error:
                    runs_of_home[name] = {"error": str(error)[-500:]}
                print_result(result)
            digests = {one.get("digest") for one in runs_of_home.values()}
            result[f"{state}_is_exact"] = len(digests) == 1 and None not in digests
    finally:
        zygote.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=SIZES, default="gpt2_124m")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--homes", default="device,host")
    parser.add_argument("--shapes", default="1x1,2x1,1x2,2x2")
    chosen = parser.parse_args()
    homes = chosen.homes.split(",")
    pairs = [shape.split("x") for shape in chosen.shapes.split(",")]
    shapes = [(int(depth), int(width)) for depth, width in pairs]
    print_result(measure(chosen.job, chosen.seconds, homes, shapes))


if __name__ == "__main__":
    main()
