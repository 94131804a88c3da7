"""Ranks of one VM that share the work of a Llama: spottrain's ways beside torch's.

Matrices are divided (``runtime.tensor_parallel``, with ``sequence_parallel`` or without; torch's
``parallelize_module``), or examples (replicas, torch's FSDP2). All train the same mini-batches over
gloo on CPUs, by turns; printed are the least median of the time of a mini-batch, the least CPU time
that all ranks took for one, and the most memory of tensors at a rank of ours. The loops by hand do
what trains and nothing else: no commit, no undo.

    python -m tests.bench.bench_tensor [--ranks 2] [--turns 3]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.bench import llama_job
from tests.bench.processes import cpu_s
from tests.builders import a_plan, a_spec
from tests.integration.fleet import Fleet, Host, Zygote
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.tracer import trace
from spottrain.wire import messages
from spottrain.wire.plan import Slot

HERE = Path(__file__).parent
STEPS, WARM_UP = 10, 2
EXAMPLES, MICROBATCH = 16, 4
Figures = tuple[float, float, int]
"""Of a mini-batch: median, CPU time of all ranks, and the most bytes of tensors at one; 0: not
counted."""


def ours(zygote: Zygote, size: int, divided: bool, sequence: bool = False) -> Figures:
    """Train as workers do.

    Args:
        zygote: Starts them.
        size: How many.
        divided: Whether they divide matrices; else examples.
        sequence: Whether they divide the sequence between these, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        spec = a_spec(
            name="tensor",
            entrypoint="llama_job:job",
            steps=STEPS,
            minibatch_size=EXAMPLES,
            microbatch_size=MICROBATCH,
            reduction="fast",
            checkpoint_path=f"{folder}/checkpoints",
            checkpoint_every_steps=1000,
            checkpoint_keep=1,
            lease_s=100.0,
            sequence_parallel=sequence,
        )
        plan = a_plan(
            1,
            1 if divided else size,
            num_sections=trace(load_job(spec.entrypoint, HERE)).num_sections,
            virtual_nodes=EXAMPLES // MICROBATCH,
            microbatch_size=MICROBATCH,
            slots=tuple(Slot(vm_id="a", index=index) for index in range(size)),
            tensor_parallel=size if divided else 1,
            recompute=False,
        )
        hosts = {"a": Host(num_slots=size)}
        with Fleet(spec, "a", Path(folder) / "log", zygote, workdir=HERE, hosts=hosts) as fleet:
            fleet.ready()
            fleet.run(plan, fleet.initialise())
            fleet.wait_for_step(WARM_UP)
            pids = {pid for some in fleet.pids().values() for pid in some}
            began_s = cpu_s(pids)
            fleet.wait_for_step(STEPS)
            spent_s = cpu_s(pids) - began_s
            steps = (r for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted))
            measured = [r for r in steps if r.step > WARM_UP]
    step_s = statistics.median(r.step_s for r in measured)
    return step_s, spent_s / (STEPS - WARM_UP), max(r.peak_bytes for r in measured)


def by_hand(size: int, divided: bool) -> Figures:
    """Train in a loop of ``size`` processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(size)]
        ranks = [
            context.Process(
                target=_rank, args=(rank, size, divided, f"{folder}/store", pipes[rank][1])
            )
            for rank in range(size)
        ]
        for process, (_, theirs) in zip(ranks, pipes, strict=True):
            process.start()
            theirs.close()
        found: list[Figures] = [pipe.recv() for pipe, _ in pipes]
        for process in ranks:
            process.join()
    return found[0][0], sum(spent_s for _, spent_s, _ in found), 0


def _divide(model: Any, mesh: DeviceMesh) -> None:
    colwise, rowwise = (
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        ("o_proj", "down_proj"),
    )
    for block in model.model.layers:
        names = [name for name, _ in block.named_modules()]
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel() for name in names if name.endswith(colwise)
        }
        plan |= {name: RowwiseParallel() for name in names if name.endswith(rowwise)}
        parallelize_module(block, mesh, plan)


def _shard(model: Any, mesh: DeviceMesh) -> None:
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _rank(rank: int, size: int, divided: bool, store: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = llama_job.model()
    (_divide if divided else _shard)(model, mesh)
    own, each = (0, EXAMPLES) if divided else (rank * EXAMPLES // size, EXAMPLES // size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    data = llama_job.Tokens()
    times_s, began_cpu_s = [], 0.0
    for step in range(STEPS):
        if step == WARM_UP:
            began_cpu_s = time.process_time()
        began_s = time.monotonic()
        weight = 0.0
        for first in range(0, each, MICROBATCH):
            at = step * EXAMPLES + own + first
            if not divided:
                model.set_requires_gradient_sync(first + MICROBATCH >= each)
            batch = torch.stack([data[i] for i in range(at, at + MICROBATCH)])
            total, count = llama_job.loss(model, batch)
            total.backward()  # type: ignore[no-untyped-call]
            weight += count
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(weight)
        optimizer.step()
        optimizer.zero_grad()
        times_s.append(time.monotonic() - began_s)
    spent_s = (time.process_time() - began_cpu_s) / (STEPS - WARM_UP)
    answer.send((statistics.median(times_s[WARM_UP:]), spent_s, 0))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with closing(Zygote()) as zygote:
        ways: dict[str, Callable[[], Figures]] = {
            "tensor_parallel": lambda: ours(zygote, chosen.ranks, True),
            "sequence_parallel": lambda: ours(zygote, chosen.ranks, True, True),
            "parallelize_module": lambda: by_hand(chosen.ranks, True),
            "replicas": lambda: ours(zygote, chosen.ranks, False),
            "FSDP2": lambda: by_hand(chosen.ranks, False),
        }
        turns = [[way() for way in ways.values()] for _ in range(chosen.turns)]
    for name, rows in zip(ways, zip(*turns, strict=True), strict=True):
        step_s, spent_s, peak = (min(column) for column in zip(*rows, strict=True))
        memory = f"  {peak / 1e6:7.1f} MB" if peak else ""
        print(
            f"{name:18}  {step_s * 1e3:7.0f} ms a mini-batch  {spent_s * 1e3:7.0f} ms of CPU{memory}"
        )


if __name__ == "__main__":
    main()
