"""The loop that a user would write by hand, for comparison.

Reads lines of ``<steps> [deterministic]`` and answers each with a line of JSON.

    python -m tests.gpu.plain_loop gpt2_124m 16 512
"""

from __future__ import annotations

import sys
import time

import torch
from tests.gpu import jobs
from tests.gpu.devices import device_name, is_gpu, print_result
from torch import nn

from spottrain.pipeline.devices.open import open_device

CLIP = 1.0


class Loop:
    """A model, a fused optimizer, micro-batches whose gradients add up, clipping."""

    def __init__(self, job: str, microbatch: int, minibatch: int) -> None:
        self._device = open_device(device_name())
        where = self._device.torch_device
        made = getattr(jobs, job)()
        with torch.device(where):
            self._model = made.model()
        parameters = list(self._model.named_parameters())
        self._optimizer: torch.optim.Optimizer = made.optimizer(parameters)
        self._job, self._microbatch, self._minibatch = made, microbatch, minibatch
        self._next = 0

    def step(self) -> float:
        """Train a mini-batch; return its loss."""
        tokens: int = self._minibatch * self._job.dataset.size.sequence
        losses = []
        for _ in range(self._minibatch // self._microbatch):
            batch = self._batch()
            with torch.autocast(batch.device.type, torch.bfloat16):
                total, _ = self._job.loss(self._model, batch)
            (total / tokens).backward()
            losses.append(total.detach())
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum()) / tokens

    def _batch(self) -> torch.Tensor:
        first, self._next = self._next, self._next + self._microbatch
        dataset = self._job.dataset
        examples = [dataset[n % len(dataset)] for n in range(first, first + self._microbatch)]
        batch: torch.Tensor = self._job.collate(examples)
        if is_gpu(device_name()):
            batch = batch.pin_memory()
        return batch.to(self._device.torch_device, non_blocking=True)

    def run(self, steps: int) -> dict[str, object]:
        """Train; return the time of each mini-batch, in seconds."""
        times_s, loss = [], 0.0
        for _ in range(steps):
            began = time.perf_counter()
            loss = self.step()
            self._device.synchronise()
            times_s.append(time.perf_counter() - began)
        peak = self._device.peak_bytes()
        return {"step_s": times_s, "loss": loss, "peak_bytes": peak}


def main() -> None:
    torch.manual_seed(1)
    job, microbatch, minibatch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    loop = Loop(job, microbatch, minibatch)
    for line in sys.stdin:
        steps, *how = line.split()
        torch.use_deterministic_algorithms(bool(how))
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        print_result(loop.run(int(steps)))


if __name__ == "__main__":
    main()
