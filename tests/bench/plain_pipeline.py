"""The rival: a 1F1B loop of two processes, written by hand for one model.

    python -m tests.bench.plain_pipeline RANK PORT SEED

Each number read from stdin is a number of steps to run; a line ``STEP LOSS`` goes out
after each of them. It does what the throughput benchmark asks for and nothing else: no
recovery, no undo, no commit, no checkpoints.
"""

from __future__ import annotations

import sys
from collections import deque

import torch
import torch.distributed as dist
from tests.bench.gpt_job import (
    BLOCKS,
    CLIP,
    GPT,
    LEARNING_RATE,
    MICROBATCH,
    MICROBATCHES,
    SEQUENCE,
    WIDTH,
    Tokens,
    token_loss,
)
from torch import nn

from spottrain.pipeline.model.order import example_index

DEPTH = 2


class FirstStage(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tied = model.embedding.weight
        self.embedding, self.positions = model.embedding, model.positions
        self.blocks = model.blocks[: BLOCKS // DEPTH]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(batch[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        return x


class LastStage(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tied = model.head.weight
        self.blocks = model.blocks[BLOCKS // DEPTH :]
        self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x)), batch)


def load_batches(seed: int, step: int) -> list[torch.Tensor]:
    """Return the micro-batches of a step: the very examples that spottrain takes."""
    data = Tokens()
    first = step * MICROBATCHES * MICROBATCH
    examples = [
        data[example_index(seed, data, first + i)] for i in range(MICROBATCHES * MICROBATCH)
    ]
    return list(torch.split(torch.stack(examples), MICROBATCH))


def receive_all(source: int) -> deque[tuple[dist.Work, torch.Tensor]]:
    """Begin to receive the tensors of all micro-batches of a step."""
    pending = deque[tuple[dist.Work, torch.Tensor]]()
    for _ in range(MICROBATCHES):
        buffer = torch.empty(MICROBATCH, SEQUENCE, WIDTH)
        work = dist.irecv(buffer, source)
        assert work is not None
        pending.append((work, buffer))
    return pending


def send(tensor: torch.Tensor, target: int, sends: list[dist.Work]) -> None:
    work = dist.isend(tensor, target)
    assert work is not None
    sends.append(work)


def run_first(stage: FirstStage, batches: list[torch.Tensor]) -> torch.Tensor:
    """One forward ahead, then a forward and a backward in turn."""
    gradients = receive_all(1)
    sends: list[dist.Work] = []
    outputs = deque[torch.Tensor]()

    def backward() -> None:
        work, gradient = gradients.popleft()
        work.wait()
        torch.autograd.backward(outputs.popleft(), gradient)

    for j, batch in enumerate(batches):
        outputs.append(stage(batch))
        send(outputs[-1].detach(), 1, sends)
        if j >= DEPTH - 1:
            backward()
    backward()
    for work in sends:
        work.wait()
    return torch.zeros(())


def run_last(stage: LastStage, batches: list[torch.Tensor]) -> torch.Tensor:
    activations = receive_all(0)
    sends: list[dist.Work] = []
    total = torch.zeros(())
    for batch in batches:
        work, activation = activations.popleft()
        work.wait()
        loss = stage(activation.requires_grad_(), batch)
        loss.backward()
        assert activation.grad is not None
        send(activation.grad, 0, sends)
        total += loss.detach()
    for work in sends:
        work.wait()
    return total


def apply(stage: FirstStage | LastStage, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Sync the tied weight's gradient, clip by the global norm, update."""
    gradients = [p.grad for p in stage.parameters() if p.grad is not None]
    assert stage.tied.grad is not None
    dist.all_reduce(stage.tied.grad)
    counted = [g for g in gradients if rank == 0 or g is not stage.tied.grad]
    square = torch.stack([torch.linalg.vector_norm(g) for g in counted]).square().sum()
    dist.all_reduce(square)
    weight = MICROBATCHES * MICROBATCH * SEQUENCE
    norm = float(square.sqrt()) / weight
    scale = min(1.0, CLIP / (norm + 1e-6)) / weight
    for gradient in gradients:
        gradient.mul_(scale)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def main(rank: int, port: int, seed: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=DEPTH
    )
    torch.manual_seed(seed)
    model = GPT()
    stage = FirstStage(model) if rank == 0 else LastStage(model)
    del model
    optimizer = torch.optim.AdamW(stage.parameters(), lr=LEARNING_RATE)
    step = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            batches = load_batches(seed, step)
            if isinstance(stage, FirstStage):
                loss = run_first(stage, batches)
            else:
                loss = run_last(stage, batches)
            apply(stage, optimizer, rank)
            step += 1
            mean = float(loss) / (MICROBATCHES * MICROBATCH * SEQUENCE)
            sys.stdout.write(f"{step} {mean}\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
