"""What a user would write without spottrain: torch's pipelining, and a loop by hand.

A process for each stage, in a network namespace of its own, all forked from this one. Each
runs a few steps of the emulated job (``emulated_job``) under a schedule when it is told to.
They do what trains and nothing else: no commit, no undo, no checkpoints.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from tests.bench.network import Network
from tests.integration.zygote import enter_network
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.utils.checkpoint import checkpoint

RIVALS = ("torch 1f1b", "torch gpipe", "torch interleaved", "loop by hand")
PORT = 29_400


@dataclass(frozen=True)
class Task:
    """Steps to run."""

    rival: str
    recompute: bool
    microbatches: int
    steps: int


class RivalRanks:
    """All ranks of the rivals.

    Args:
        network: Has a namespace for each rank.
        depth: Number of ranks.
    """

    def __init__(self, network: Network, depth: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(depth):
            mine, theirs = fork.Pipe()
            place = network.namespace(rank), network.address(0)
            process = fork.Process(target=_run, args=(rank, depth, *place, theirs))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._ranks.append(process)

    def run(self, task: Task) -> list[float]:
        """Return how long each step took on the first stage, which ends it."""
        for pipe in self._pipes:
            pipe.send(task)
        times: list[list[float]] = [pipe.recv() for pipe in self._pipes]
        return times[0]

    def close(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._ranks:
            process.join()


def _run(rank: int, depth: int, namespace: str, address: str, orders: Connection) -> None:
    enter_network(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=depth
    )
    steps: dict[tuple[str, bool, int], Callable[[], None]] = {}
    while (task := orders.recv()) is not None:
        key = task.rival, task.recompute, task.microbatches
        if key not in steps:
            steps[key] = _make_step(rank, depth, task)
        dist.barrier()
        ends_s = [time.monotonic()]
        for _ in range(task.steps):
            steps[key]()
            ends_s.append(time.monotonic())
        orders.send([later - sooner for sooner, later in itertools.pairwise(ends_s)])
    dist.destroy_process_group()


def _job() -> Any:
    """Return the emulated job; not imported above, as it reads the environment."""
    return importlib.import_module("tests.bench.emulated_job")


def _width() -> int:
    """Return the elements of an activation."""
    width: int = _job().ACTIVATION_BYTES // _job().FLOAT_BYTES
    return width


class _Recomputed(nn.Module):
    """Keeps its input and computes the rest again before the backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(self.module, x, use_reentrant=False)
        return again


class _Widened(nn.Module):
    """An example as the first block takes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(-1, _width()).requires_grad_()


def _make_stage(first: bool, blocks: int, recompute: bool) -> nn.Module:
    module: nn.Module = nn.Sequential(*(_job().Block() for _ in range(blocks)))
    if recompute:
        module = _Recomputed(module)
    return nn.Sequential(_Widened(), module) if first else module


def _make_step(rank: int, depth: int, task: Task) -> Callable[[], None]:
    chunks = 2 if task.rival == "torch interleaved" else 1
    indices = [rank + depth * chunk for chunk in range(chunks)]
    modules = [
        _make_stage(index == 0, _job().BLOCKS // depth // chunks, task.recompute)
        for index in indices
    ]
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    if task.rival == "loop by hand":
        train: Callable[[], None] = partial(_by_hand, rank, depth, modules[0], task.microbatches)
    else:
        train = _by_torch(depth, indices, modules, task)

    def step() -> None:
        train()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def _mean(output: torch.Tensor, target: Any = None) -> torch.Tensor:
    return output.mean()


def _by_torch(
    depth: int, indices: Sequence[int], modules: Sequence[nn.Module], task: Task
) -> Callable[[], None]:
    wide, last = _activation().requires_grad_(), depth * len(indices) - 1
    stages = [
        PipelineStage(
            module,
            index,
            depth * len(indices),
            torch.device("cpu"),
            input_args=(wide if index else torch.ones(1, 1),),
            output_args=(wide,),
        )
        for index, module in zip(indices, modules, strict=True)
    ]
    count = task.microbatches
    schedule: Any
    if len(stages) > 1:
        schedule = ScheduleInterleaved1F1B(list(stages), count, _mean)
    elif task.rival == "torch gpipe":
        schedule = ScheduleGPipe(stages[0], count, _mean)
    else:
        schedule = Schedule1F1B(stages[0], count, _mean)
    inputs = (torch.ones(count, 1),) if 0 in indices else ()
    target = {"target": torch.zeros(count)} if last in indices else {}

    def train() -> None:
        schedule.step(*inputs, **target, return_outputs=False)

    return train


def _activation() -> torch.Tensor:
    return torch.empty(1, _width())


def _by_hand(rank: int, depth: int, stage: nn.Module, count: int) -> None:
    """1F1B whose receives are all posted before the step begins."""
    activations = _receive(rank - 1, count) if rank else deque()
    gradients = _receive(rank + 1, count) if rank < depth - 1 else deque()
    sends: list[dist.Work] = []
    kept = deque[tuple[torch.Tensor, torch.Tensor]]()

    def send(tensor: torch.Tensor, target: int) -> None:
        work = dist.isend(tensor.contiguous(), target)
        assert work is not None
        sends.append(work)

    def forward() -> None:
        x = torch.ones(1, 1)
        if rank:
            work, x = activations.popleft()
            work.wait()
            x.requires_grad_()
        out = stage(x)
        kept.append((x, out))
        if rank < depth - 1:
            send(out.detach(), rank + 1)

    def backward() -> None:
        x, out = kept.popleft()
        gradient = None
        if rank < depth - 1:
            work, gradient = gradients.popleft()
            work.wait()
        else:
            out = _mean(out)
        torch.autograd.backward(out, gradient)
        if rank:
            assert x.grad is not None
            send(x.grad, rank - 1)

    lead = min(depth - rank, count)
    for _ in range(lead):
        forward()
    for _ in range(count - lead):
        backward()
        forward()
    for _ in range(lead):
        backward()
    for work in sends:
        work.wait()


def _receive(source: int, count: int) -> deque[tuple[dist.Work, torch.Tensor]]:
    pending = deque[tuple[dist.Work, torch.Tensor]]()
    for _ in range(count):
        buffer = _activation()
        work = dist.irecv(buffer, source)
        assert work is not None
        pending.append((work, buffer))
    return pending
