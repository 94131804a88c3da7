"""A script, whose ``__main__`` defines a job, and which stops it and goes on with another."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import spottrain


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.up(x))


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    time.sleep(0.02)  # so that there is something left to train when it is stopped
    return model(batch).square().sum(), float(len(batch))


def training_job(rate: float, blocks: int = 4) -> spottrain.TrainingJob:
    return spottrain.TrainingJob(
        model=lambda: nn.Sequential(*(Block() for _ in range(blocks))),
        dataset=[torch.full((8,), float(i)) for i in range(16)],
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=rate),
    )


def refusal(resume: Callable[[], object]) -> str:
    try:
        resume()
    except spottrain.SpottrainError as error:
        return str(error)
    return ""


def main() -> None:
    job = spottrain.launch(
        training_job(1e-3),
        name="scripted",
        steps=1_000_000,
        minibatch_size=4,
        microbatch_size=2,
        resources={"max_vms": 1, "device": "cpu"},
    )
    while not (rows := list(job.metrics(last=1)["step"])):
        time.sleep(0.05)
    stopped = job.stop()
    refused = [
        refusal(lambda: job.resume(training_job(1e-3, blocks=5))),
        refusal(lambda: job.resume(update_code=True)),
    ]
    job.resume(training_job(2e-3), steps=stopped["step"] + 5)
    ended = job.wait()
    rates = job.metrics()["learning_rate"]
    answer = {
        "first": int(rows[0]),
        "stopped": [stopped["state"], stopped["step"]],
        "reason": stopped["reason"],
        "refused": refused,
        "ended": [ended["state"], ended["step"]],
        "rates": [float(rate) for rate in rates][-6:],
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
