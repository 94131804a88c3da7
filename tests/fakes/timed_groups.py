"""Collectives of stand-ins in one VM: they take declared time, and ranks wait for each other.

A collective begins when the last of its ranks has come to it: before it, ranks exchange their
virtual times, over gloo or a ``Board``, and hosts go on together. What it moves between devices
takes what it does in rings, as NCCL's do it (Patarasuk and Yuan 2009), or on the link of its
root, queued behind what each device computes; between hosts it takes no time.
Messages from one rank to another are no collectives: ``timed_links`` times those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from spottrain.pipeline.base.tracking import tensors_in

if TYPE_CHECKING:
    from tests.fakes.timed import TimedDevice

_Rounds = Callable[[int, int], tuple[int, float]]
ROUNDS: dict[str, tuple[str, _Rounds]] = {
    "c10d::allreduce_": ("tensors", lambda n, size: (2 * (n - 1), 2 * (n - 1) / n * size)),
    "c10d::reduce_": ("tensors", lambda n, size: (n - 1, size)),
    "c10d::broadcast_": ("tensors", lambda n, size: (n - 1, size)),
    "c10d::allgather_": ("input_tensors", lambda n, size: (n - 1, (n - 1) * size)),
    "c10d::gather_": ("input_tensors", lambda n, size: (1, (n - 1) * size)),
    "c10d::scatter_": ("output_tensors", lambda n, size: (1, (n - 1) * size)),
}
"""The argument that each of ``n`` ranks has one tensor of ``size`` bytes in; messages that go one
after the other, and the bytes that a rank sends or receives, the one that does most of it."""


def run(
    device: TimedDevice,
    operation: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    on_device: bool,
    skips: bool,
) -> Any:
    """Run an operation of torch's process groups once its ranks have met.

    Args:
        device: Of this rank.
        operation: Of c10d.
        args: Its arguments.
        kwargs: More of them.
        on_device: Whether its tensors are the device's.
        skips: Whether a collective sends a single element in place of each tensor.
    """
    rounds = ROUNDS.get(operation._schema.name)
    if rounds is not None and device.time.is_virtual:
        given = dict(zip((one.name for one in operation._schema.arguments), args, strict=False))
        group = dist.ProcessGroup.unbox(given["process_group"])
        own_s = device.clock(), device.mark()
        now_s, ready_s = device.meet(*own_s) if device.meet else _latest(group, own_s)
        device.time.hold(now_s)
        if not on_device:
            device.met()
        else:
            argument, rounds_of = rounds
            (own,) = tensors_in(given[argument])
            messages, sent = rounds_of(group.size(), own.nbytes)
            figures = device.figures
            takes_s = messages * figures.peer_latency_s + sent / figures.peer_bytes_per_s
            device.spent_s["peers"] += takes_s
            device.queue(ready_s + takes_s)
    if rounds is None or not skips:
        return operation(*args, **kwargs)
    few, more = tree_map_only(torch.Tensor, lambda x: x.new_zeros(1), (args, kwargs))
    found = operation(*few, **more)
    return (args[0], found[1]) if isinstance(found, tuple) else found


def _latest(group: dist.ProcessGroup, own_s: tuple[float, float]) -> list[float]:
    """Return the latest of all ranks' times, of either kind."""
    latest = torch.tensor(own_s, dtype=torch.float64)
    with _disable_current_modes():
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
    return latest.tolist()
