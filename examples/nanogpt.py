"""nanoGPT's training loop as a job; plain/nanogpt.py is the same without spottrain."""

from __future__ import annotations

import torch
from byte_gpt import SEQUENCE, ByteGPT, corpus, loss

from spottrain import TrainingJob, optim, schedules

Example = tuple[torch.Tensor, torch.Tensor]


class Crops:
    """Random crops of a text: each example draws its own, the same on any machine."""

    def __init__(self, text: bytes, number: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Example:
        start = int(torch.randint(len(self.data) - SEQUENCE, ()))
        crop = self.data[start : start + SEQUENCE + 1].long()
        return crop[:-1], crop[1:]


def training_job() -> TrainingJob:
    """Describe the job; steps, batch sizes and evaluations are in nanogpt.yaml."""
    training_text, heldout_text = corpus()
    return TrainingJob(
        model=ByteGPT,
        dataset=Crops(training_text, 1_000_000),
        heldout=Crops(heldout_text, 80),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(
            optim.decay_groups(named, 0.1), lr=1e-3, betas=(0.9, 0.95)
        ),
        lr_schedule=schedules.cosine(warmup_steps=20, final=0.1),
        clip_grad_norm=1.0,
    )
