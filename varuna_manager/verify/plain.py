"""The loop that a user would write by hand, to compare with: ``… plain ENTRYPOINT WORKDIR``.

One device, micro-batches whose gradients add up, clipping, the job's own optimizer and
schedule; nothing of ours. Prints one line of JSON with the seconds of each mini-batch.
Started as a process: nothing else here imports torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def times(
    job: Any, steps: int, minibatch: int, microbatch: int, device: torch.device
) -> list[float]:
    """Train, and return the seconds that each mini-batch took.

    Args:
        job: The user's ``TrainingJob``.
        steps: Mini-batches.
        minibatch: Examples of each.
        microbatch: Examples that go through the model at a time.
        device: Where it trains, in the precision of the model's parameters.
    """

    def moved(batch: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)

    with torch.device(device):
        model = job.model()
    model.train()
    optimizer = job.optimizer(list(model.named_parameters()))
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    taken_s, example = list[float](), 0
    for step in range(steps):
        began_s = time.perf_counter()
        if job.lr_schedule is not None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * job.lr_schedule(step)
        weight = 0.0
        for _ in range(minibatch // microbatch):
            indices = range(example, example + microbatch)
            example += microbatch
            batch = job.collate([job.dataset[n % len(job.dataset)] for n in indices])
            loss, part, *_ = job.loss(model, moved(batch))
            torch.autograd.backward(loss)
            weight += float(part)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        if job.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken_s.append(time.perf_counter() - began_s)
    return taken_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Print ``{"step_s": […]}`` for a job; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spottrain.varuna_manager.verify.plain")
    parser.add_argument("entrypoint", help="module:function")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--minibatch", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True)
    parser.add_argument("--device", default="cpu", help="as torch names it")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cpu":
        torch.set_num_threads(1)  # as a worker has on CPUs
    sizes: dict[str, Any] = {
        name: getattr(chosen, name) for name in ("steps", "minibatch", "microbatch")
    }
    sys.path.insert(0, str(chosen.workdir))
    module, _, function = chosen.entrypoint.partition(":")
    job = getattr(importlib.import_module(module), function)()
    taken_s = times(job, device=torch.device(chosen.device), **sizes)
    sys.stdout.write(json.dumps({"step_s": taken_s}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
