"""Collectives of stand-ins, whose ranks are processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fakes.timed import Figures, TimedDevice
from tests.gpu.forked import Child, Say, start_store

from spottrain.pipeline.comm.groups import connect_rendezvous, join, leave, new_group

FIGURES = replace(Figures.of("H100"), peer_latency_s=1e-3, peer_bytes_per_s=1e9)
BYTES = 1 << 28
"""More than ranks could send in a test."""
TIMEOUT_S = 60.0


def ranks_say(size: int, act: Callable[[TimedDevice, int, dist.ProcessGroup], Any]) -> list[Any]:
    """Return what each of ``size`` ranks returns."""
    store, port = start_store()

    def body(rank: int, say: Say) -> None:
        connections = join(
            connect_rendezvous("127.0.0.1", port, TIMEOUT_S), "test", rank, size, TIMEOUT_S
        )
        device = TimedDevice(FIGURES, numbers=False)
        with device.using():
            group = new_group(range(size), TIMEOUT_S)
            connections.seal()
            found = act(device, rank, group)
            dist.barrier(group)  # who has said something may be killed
        say({"found": found})
        leave()

    children = [Child(partial(body, rank)) for rank in range(size)]
    try:
        return [child.hear(TIMEOUT_S)["found"] for child in children]
    finally:
        for child in (*children, store):
            child.close()


def test_a_sum_on_devices_begins_with_the_last_rank_and_takes_what_its_ring_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def act(device: TimedDevice, rank: int, group: dist.ProcessGroup) -> float:
        gradients = device.allocate(BYTES).view(torch.float32)
        device.time.hold(rank * 5.0)
        dist.all_reduce(gradients, group=group)
        device.synchronise()
        return device.clock()

    ring_s = 2 * 2 * FIGURES.peer_latency_s + 2 * 2 / 3 * BYTES / FIGURES.peer_bytes_per_s
    assert ranks_say(3, act) == pytest.approx([10.0 + ring_s] * 3)


def test_what_hosts_tell_each_other_is_true_and_holds_those_that_came_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def act(device: TimedDevice, rank: int, group: dist.ProcessGroup) -> list[float]:
        device.time.hold(rank * 5.0)
        told = torch.ones(2) * (rank + 1)
        dist.all_reduce(told, group=group)
        return [*told.tolist(), device.clock()]

    assert ranks_say(2, act) == [pytest.approx([3.0, 3.0, 5.0])] * 2
