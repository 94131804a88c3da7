"""Two workers on one GPU exchange tensors through the host; then one of them is killed.

Links are those of a pipeline: page-locked memory, streams of their own, gloo. An
all-reduce goes down to the host, around, and up again.

    python -m tests.gpu.broken_peers --mb 1,4,16,64 --reduce-mb 500 --kills 10
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from tests.gpu.devices import names, print_result
from tests.gpu.forked import Child, Say, start_store

from spottrain.pipeline.comm.groups import (
    GenerationBrokenError,
    connect_rendezvous,
    join,
    leave,
    world,
)
from spottrain.pipeline.comm.p2p import Direction, PipelineLinks
from spottrain.pipeline.devices.open import open_device
from spottrain.pipeline.devices.port import Device

_TIMEOUT_S = 60.0
_HANG_S = 20.0
"""After a kill, until a survivor counts as hung."""
_SHARE = 0.4
_REPEATS = 6
_KILL_AFTER_S = 0.3


def cpu_s() -> float:
    """Return the CPU seconds that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def messages(device: Device, rank: int, num_bytes: int) -> dict[str, float]:
    """Send activations one way; return the rate, and CPU seconds per GB."""
    previous, following = (0, None) if rank else (None, 1)
    links = PipelineLinks(previous, following, device)
    shape = (num_bytes // 2,)
    sent = torch.ones(shape, dtype=torch.bfloat16, device=device.torch_device)
    times_s, used_s = [], 0.0
    for number in range(1 + _REPEATS):
        world().barrier()
        began, before_s = time.perf_counter(), cpu_s()
        links.expect(Direction.ACTIVATION, 2)
        for _ in range(2):  # as many as a sender is ahead
            if rank == 0:
                links.send(Direction.ACTIVATION, [sent])
            else:
                arrival = links.arrival(wait=True)
                assert arrival is not None
                arrival.on(device)
        links.flush()
        device.synchronise()
        world().barrier()
        if number:  # the first one takes shape and memory
            times_s.append(time.perf_counter() - began)
            used_s += cpu_s() - before_s
    links.close()
    return {
        "gb_per_s": 2 * num_bytes / statistics.median(times_s) / 1e9,
        "cpu_s_per_gb": used_s / (_REPEATS * 2 * num_bytes / 1e9),
    }


def all_reduce(device: Device, num_bytes: int) -> dict[str, float]:
    """Sum gradients of both through the host; return the time of each part."""
    run = torch.ones(num_bytes // 4, device=device.torch_device)
    parts: dict[str, list[float]] = {"down_s": [], "around_s": [], "up_s": []}
    used_s = 0.0
    for number in range(1 + 3):
        world().barrier()
        device.synchronise()
        before_s, times = cpu_s(), [time.perf_counter()]
        staged = device.finish(device.download(run))
        times.append(time.perf_counter())
        world().sum(staged)
        times.append(time.perf_counter())
        device.wait(device.upload(staged, run))
        device.synchronise()
        times.append(time.perf_counter())
        if number:
            used_s += cpu_s() - before_s
            for part, (a, b) in zip(parts.values(), itertools.pairwise(times), strict=True):
                part.append(b - a)
    found = {name: statistics.median(part) for name, part in parts.items()}
    found["gb_per_s"] = num_bytes / sum(found.values()) / 1e9
    found["cpu_s"] = used_s / 3
    return found


def run_rank(
    say: Say, rank: int, name: str, port: int, sizes: Sequence[int], reduce_bytes: int
) -> None:
    """Measure messages and an all-reduce."""
    device = open_device(name, _SHARE)
    store = connect_rendezvous("127.0.0.1", port, _TIMEOUT_S)
    join(store, "peers", rank, 2, _TIMEOUT_S)
    with device.using():
        found: dict[str, Any] = {
            f"{size / 1e6:g} MB": messages(device, rank, size) for size in sizes
        }
        found["all_reduce"] = all_reduce(device, reduce_bytes)
    world().barrier()
    leave()
    say(found)


def reduce_for_ever(
    say: Say, rank: int, name: str, port: int, reduce_bytes: int, round_: int
) -> None:
    """Sum through the host until a peer is gone; say when that was noticed."""
    device = open_device(name, _SHARE)
    store = connect_rendezvous("127.0.0.1", port, _TIMEOUT_S)
    connections = join(store, f"round {round_}", rank, 2, _TIMEOUT_S)
    run = torch.ones(reduce_bytes // 4, device=device.torch_device)
    say({"joined": True})
    try:
        while True:
            staged = device.finish(device.download(run))
            world().sum(staged)
            device.wait(device.upload(staged, run))
    except RuntimeError as error:
        noticed = time.monotonic()
        connections.cut()
        with suppress(GenerationBrokenError, RuntimeError):
            leave()
        left = time.monotonic()
        device.synchronise()
        where = device.torch_device
        usable = bool(torch.ones(2, device=where).sum().item() == 2)
        say(
            {
                "noticed": noticed,
                "leave_s": left - noticed,
                "usable": usable,
                "error": str(error).splitlines()[0][:120],
            }
        )


def kill_one(port: int, reduce_bytes: int, round_: int) -> dict[str, Any]:
    """Kill one of two in mid-collective; return what the other one noticed."""
    ranks = [
        Child(
            lambda say, rank=rank, name=name: reduce_for_ever(  # type: ignore[misc]
                say, rank, name, port, reduce_bytes, round_
            )
        )
        for rank, name in enumerate(names(2))
    ]
    try:
        for rank in ranks:
            rank.hear()
        time.sleep(_KILL_AFTER_S * (1 + round_ % 3 / 3))
        killed = time.monotonic()
        os.kill(ranks[round_ % 2].pid, signal.SIGKILL)
        try:
            found = ranks[1 - round_ % 2].hear(_HANG_S)
        except RuntimeError as error:
            return {"hung": True, "error": str(error)}
        found["to_error_s"] = found.pop("noticed") - killed
        return found | {"hung": False}
    finally:
        for rank in ranks:
            rank.close()


def measure(sizes: Sequence[int], reduce_bytes: int, kills: int, seconds: float) -> dict[str, Any]:
    """Measure everything until the time is over."""
    end = time.monotonic() + seconds
    store, port = start_store()
    result: dict[str, Any] = {"kills": []}
    try:
        ranks = [
            Child(
                lambda say, rank=rank, name=name: run_rank(  # type: ignore[misc]
                    say, rank, name, port, sizes, reduce_bytes
                )
            )
            for rank, name in enumerate(names(2))
        ]
        try:
            result["sender"], result["receiver"] = (rank.hear() for rank in ranks)
        finally:
            for rank in ranks:
                rank.close()
        for number in range(kills):
            if time.monotonic() > end:
                break
            result["kills"].append(kill_one(port, reduce_bytes, number))
    except RuntimeError as error:
        result["error"] = str(error)
    finally:
        store.close()
    noticed = [one["to_error_s"] for one in result["kills"] if not one["hung"]]
    result["hangs"] = sum(one["hung"] for one in result["kills"])
    result["longest_to_error_s"] = max(noticed, default=None)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", default="1,4,16,64", help="of messages")
    parser.add_argument("--reduce-mb", type=float, default=500.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=100.0)
    chosen = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sizes = [int(float(mb) * 1e6) for mb in chosen.mb.split(",")]
    reduce_bytes = int(chosen.reduce_mb * 1e6)
    print_result(measure(sizes, reduce_bytes, chosen.kills, chosen.seconds))


if __name__ == "__main__":
    main()
