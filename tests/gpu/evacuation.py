"""Can a watchdog copy a GPU's memory to the host while a kernel hangs?

A child fills memory, queues a kernel that spins, and lets a thread copy the memory out
on a stream of its own. In turns the host memory it goes to is page-locked before the
kernel hangs, page-locked afterwards, or not at all. Then the child ends itself.

    python -m tests.gpu.evacuation --mib 4096 --hang-s 15
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import Any

import torch
from tests.gpu.devices import device_name, is_gpu, print_result
from tests.gpu.forked import Child, Say

from spottrain.pipeline.devices.open import open_device

WAYS = ("locked before", "locked during", "pageable")
CYCLES_PER_S = 2e9
"""About; of an H100."""
_PATIENCE_S = 15.0
"""Beyond the time that the kernel spins."""


def evacuate(say: Say, way: str, mib: int, hang_s: float) -> None:
    """Hang, copy, say how long it took, and end."""
    name = device_name()
    device = open_device(name)
    where, on_gpu = device.torch_device, is_gpu(name)
    state = torch.arange(mib << 18, dtype=torch.int32, device=where)
    host = None
    if way == "locked before":
        host = device.allocate_host(state.shape, state.dtype)
    device.synchronise()
    if on_gpu:
        torch.cuda._sleep(int(hang_s * CYCLES_PER_S))  # type: ignore[no-untyped-call]
    began = time.monotonic()
    say({"began": began})

    def copy() -> None:
        target = host
        if way == "locked during":
            target = device.allocate_host(state.shape, state.dtype)
        elif target is None:
            target = torch.empty_like(state, device="cpu")
        locked = time.monotonic()
        if on_gpu:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(side):
                target.copy_(state, non_blocking=True)
            side.synchronize()
        else:
            target.copy_(state)
        copied = time.monotonic()
        expected = torch.arange(target.numel(), dtype=torch.int32)
        whole = torch.equal(target, expected)
        say({"lock_s": locked - began, "copy_s": copied - locked, "whole": whole})
        os._exit(0)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()


def measure(mib: int, hang_s: float) -> dict[str, Any]:
    """Try every way; one that hangs too has an error instead of times."""
    result: dict[str, Any] = {"device": device_name(), "mib": mib, "hang_s": hang_s}
    for way in WAYS:
        child = Child(lambda say, way=way: evacuate(say, way, mib, hang_s))  # type: ignore[misc]
        try:
            began = child.hear()["began"]
            found = child.hear(hang_s + _PATIENCE_S)
            said = time.monotonic()
            found["ended_s"] = None
            if child.has_ended(hang_s + _PATIENCE_S):
                found["ended_s"] = time.monotonic() - said
            took_s = found["lock_s"] + found["copy_s"]
            found["beside_the_kernel"] = took_s < hang_s - 1
            found["after_s"] = said - began
            result[way] = found
        except RuntimeError as error:
            result[way] = {"error": str(error)}
        finally:
            child.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--hang-s", type=float, default=15.0)
    chosen = parser.parse_args()
    print_result(measure(chosen.mib, chosen.hang_s))


if __name__ == "__main__":
    main()
