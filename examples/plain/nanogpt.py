"""nanoGPT's training loop on one device, without spottrain: python plain/nanogpt.py."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

sys.path.append(str(Path(__file__).parents[1]))
from byte_gpt import SEQUENCE, ByteGPT, corpus

MAX_STEPS, WARM_UP_STEPS, ACCUMULATION, BATCH = 200, 20, 4, 4
data = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in corpus()]


def get_batch(split: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random crops of the training text (0) or the held-out one (1)."""
    starts = torch.randint(len(data[split]) - SEQUENCE, (BATCH,)).tolist()
    crops = [data[split][start : start + SEQUENCE + 1].long() for start in starts]
    return torch.stack(crops)[:, :-1], torch.stack(crops)[:, 1:]


def get_lr(step: int) -> float:
    """Return the learning rate: warm-up, then a cosine down to a tenth."""
    if step < WARM_UP_STEPS:
        return 1e-3 * step / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / (MAX_STEPS - WARM_UP_STEPS)
    return 1e-4 + 0.5 * (1.0 + math.cos(math.pi * progress)) * 9e-4


def loss_of(split: int) -> torch.Tensor:
    """Return the mean loss of a batch."""
    tokens, targets = get_batch(split)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


model, best = ByteGPT(), math.inf
matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]
groups = [
    {"params": matrices, "weight_decay": 0.1},
    {"params": vectors, "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
for step in range(MAX_STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    optimizer.zero_grad(set_to_none=True)
    for _ in range(ACCUMULATION):
        loss = loss_of(0) / ACCUMULATION
        torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}: loss {loss.item() * ACCUMULATION:.4f}")  # noqa: T201
    if (step + 1) % 50 == 0:
        model.eval()
        with torch.no_grad():
            heldout = sum(loss_of(1).item() for _ in range(20)) / 20
        model.train()
        print(f"step {step + 1}: held-out loss {heldout:.4f}")  # noqa: T201
        if heldout < best:
            best = heldout
            torch.save(model.state_dict(), "model.pt")
