"""How long does NCCL take to start and to be aborted, as far as one GPU can show?

A communicator starts, sums, and is aborted with nothing under way; then once more with a
sum queued behind a kernel that hangs. It has one rank, or several that share the GPU, which
NCCL allows only where ``NCCL_MULTI_RANK_GPU_ENABLE`` is known to it.

    python -m tests.gpu.nccl_alone --mb 500 --hang-s 8 --ranks 2
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.devices import device_name, is_gpu, print_result
from tests.gpu.evacuation import CYCLES_PER_S
from tests.gpu.forked import Child, Say, start_store

from spottrain.pipeline.comm.device_group import TrialGroups
from spottrain.pipeline.comm.groups import connect_rendezvous, join
from spottrain.pipeline.devices.open import open_device

_TIMEOUT_S = 60.0
_REPEATS = 5


def run(
    say: Say, port: int, round_: int, num_bytes: int, hang_s: float, rank: int, ranks: int
) -> None:
    """Start, sum, hang if that is asked for, abort; say how long each took."""
    device = open_device(device_name())
    device.identity += f", rank {rank}"  # type: ignore[misc]  # several may share it here
    store = connect_rendezvous("127.0.0.1", port, _TIMEOUT_S)
    join(store, str(round_), rank, ranks, _TIMEOUT_S)
    used = device.context_bytes()
    began = time.monotonic()
    trial = TrialGroups(device)
    members = tuple(range(ranks))
    found: dict[str, Any] = {"formed": trial.form([members], rank, _TIMEOUT_S)}
    found["start_s"] = time.monotonic() - began
    found["failure"] = trial.failure
    found["taken_bytes"] = device.context_bytes() - used
    if not found["formed"]:
        say(found)
        os._exit(0)
    with device.using():
        gradient = torch.ones(num_bytes // 4, device=device.torch_device)
        group = trial.groups[members]
        dist.all_reduce(gradient, group=group)
        device.synchronise()
        began = time.monotonic()
        for _ in range(_REPEATS):
            dist.all_reduce(gradient, group=group)
        device.synchronise()
        found["sum_s"] = (time.monotonic() - began) / _REPEATS
        if hang_s and is_gpu(device_name()):
            torch.cuda._sleep(int(hang_s * CYCLES_PER_S))  # type: ignore[no-untyped-call]
            dist.all_reduce(gradient, group=group)
    began = time.monotonic()
    found["aborted"] = trial.close()
    found["abort_s"] = time.monotonic() - began
    say(found)
    os._exit(0)  # as a worker whose communicator cannot be aborted


def measure(num_bytes: int, hang_s: float, ranks: int) -> dict[str, Any]:
    """Return what came out without and with a kernel that hangs."""
    store, port = start_store()
    result: dict[str, Any] = {}
    if dist.is_nccl_available():
        result["nccl"] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    try:
        for round_, (name, hangs_s) in enumerate({"idle": 0.0, "hung": hang_s}.items()):
            children = [
                Child(
                    lambda say, rank=rank, round_=round_, hangs_s=hangs_s: run(  # type: ignore[misc]
                        say, port, round_, num_bytes, hangs_s, rank, ranks
                    )
                )
                for rank in range(ranks)
            ]
            try:
                result[name] = children[0].hear(_TIMEOUT_S)
                said = time.monotonic()
                ended = children[0].has_ended(hang_s + _TIMEOUT_S)
                result[name]["ended_s"] = time.monotonic() - said if ended else None
            except RuntimeError as error:
                result[name] = {"error": str(error)}
            finally:
                for child in children:
                    child.close()
    finally:
        store.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=500.0)
    parser.add_argument("--hang-s", type=float, default=8.0)
    parser.add_argument("--ranks", type=int, default=1)
    chosen = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if chosen.ranks > 1:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    print_result(measure(int(chosen.mb * 1e6), chosen.hang_s, chosen.ranks))


if __name__ == "__main__":
    main()
