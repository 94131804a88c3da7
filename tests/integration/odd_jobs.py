"""The tiny job with what is uncommon but allowed, each where a stage could stumble."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

import spottrain
from spottrain import TrainingJob
from spottrain.pipeline.model.job import LossResult, NamedParameters

if TYPE_CHECKING:
    from tests.integration import tiny_job as tiny
else:
    tiny = importlib.import_module(f"{__package__}.tiny_job" if __package__ else "tiny_job")

HURRY = 20


def _with_model(model: Callable[[], nn.Module]) -> TrainingJob:
    return dataclasses.replace(tiny.job(), model=model)


def plain_job() -> TrainingJob:
    """The tiny job as it is."""
    return tiny.job()


def frozen_job() -> TrainingJob:
    """The embedding and the first two blocks are not trained."""

    def model() -> nn.Module:
        model = tiny.Tiny()
        for module in (model.embedding, *model.blocks[:2]):
            module.requires_grad_(False)
        return model

    return _with_model(model)


def bfloat16_job() -> TrainingJob:
    """Parameters and activations take two bytes."""
    return _with_model(lambda: tiny.Tiny().bfloat16())


def float16_job() -> TrainingJob:
    """Parameters and activations take two bytes."""
    return _with_model(lambda: tiny.Tiny().half())


def shared_job() -> TrainingJob:
    """All blocks share one weight, the last two another one."""

    def model() -> nn.Module:
        model = tiny.Tiny()
        blocks = [block for block in model.blocks if isinstance(block, tiny.Block)]
        for block in blocks[1:]:
            block.up.weight = blocks[0].up.weight
        blocks[3].down.weight = blocks[2].down.weight
        return model

    return _with_model(model)


def deep_job() -> TrainingJob:
    """Eight blocks, two of which share a weight; more held-out examples."""

    def model() -> nn.Module:
        model = tiny.Tiny()
        blocks = [tiny.Block() for _ in range(2 * tiny.BLOCKS)]
        blocks[4].up.weight = blocks[1].up.weight
        model.blocks = nn.ModuleList(blocks)
        return model

    return dataclasses.replace(_with_model(model), heldout=tiny.Tokens(100))


def detached_job() -> TrainingJob:
    """No gradient reaches what comes before the third block."""

    class Detaching(tiny.Block):
        detaches = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach() if self.detaches else x)

    def model() -> nn.Module:
        model = tiny.Tiny()
        blocks = [Detaching() for _ in range(tiny.BLOCKS)]
        blocks[2].detaches = True
        model.blocks = nn.ModuleList(blocks)
        return model

    return _with_model(model)


def unused_job() -> TrainingJob:
    """One parameter is used in no section."""

    def model() -> nn.Module:
        model = tiny.Tiny()
        model.spare = nn.Parameter(torch.ones(3))
        return model

    return _with_model(model)


def conditional_job() -> TrainingJob:
    """Scales of blocks: never used, used where a token comes first, used at first."""

    class Scaling(tiny.Block):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Parameter(torch.ones(tiny.WIDTH))
            self.rare = nn.Parameter(torch.ones(tiny.WIDTH))
            self.early = nn.Parameter(torch.ones(tiny.WIDTH))

        def forward(self, x: torch.Tensor, rare: torch.Tensor | None = None) -> torch.Tensor:
            x = super().forward(x)
            if rare is not None and rare.any():
                x = x * self.rare
            return x * self.early if spottrain.step() == 0 else x

    class Model(tiny.Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaling() for _ in range(tiny.BLOCKS))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.dropout(self.embedding(tokens))
            for block in self.blocks:
                x = block(x, tokens[:, 0] == 3)
            logits: torch.Tensor = F.linear(self.norm(x), self.embedding.weight)
            return logits

    return _with_model(Model)


def attached_job() -> TrainingJob:
    """A hook lets half of a tied embedding be; what is marked does not decay."""

    def model() -> Any:
        model: Any = tiny.Tiny()
        rows = torch.arange(32)[:, None] >= 16
        model.embedding.weight.register_hook(lambda gradient: gradient * rows)
        for parameter in (model.embedding.weight, model.blocks[2].up.bias):
            parameter.decays = False
        return model

    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for _, parameter in named:
            groups[getattr(parameter, "decays", True)].append(parameter)
        return torch.optim.AdamW(
            [
                {"params": parameters, "weight_decay": 0.5 * decays}
                for decays, parameters in groups.items()
                if parameters
            ],
            lr=1e-2,
        )

    return dataclasses.replace(_with_model(model), optimizer=optimizer)


def distributed_job() -> TrainingJob:
    """The loss sums weights over the processes that torch.distributed knows of."""

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = tiny.loss(model, batch)
        count = torch.tensor(weight)
        if dist.is_initialized():
            dist.all_reduce(count)
        return total, count

    return dataclasses.replace(tiny.job(), loss=loss)


def initialising_job() -> TrainingJob:
    """The same; in each process it first sees to it that torch.distributed knows one."""
    asking = distributed_job()

    def loss(model: nn.Module, batch: torch.Tensor) -> LossResult:
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.barrier()
        return asking.loss(model, batch)

    return dataclasses.replace(asking, loss=loss)


def stateless_job() -> TrainingJob:
    """The optimizer keeps no state."""
    return dataclasses.replace(tiny.job(), optimizer=lambda named: torch.optim.SGD(named, lr=0.1))


def weightless_job() -> TrainingJob:
    """Held-out examples weigh nothing."""

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        total, weight = tiny.loss(model, batch)
        return total, weight * model.training

    return dataclasses.replace(tiny.job(), loss=loss)


def hurried_job() -> TrainingJob:
    """Notes every evaluation; the last stage dawdles over its first one.

    It waits, a second at most, for somebody to be ``HURRY`` evaluations ahead, and
    then makes the file ``<NOTES>.hurried``.
    """
    dawdled = False

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        nonlocal dawdled
        if model.training:
            return tiny.loss(model, batch)
        notes = Path(os.environ["NOTES"])
        with notes.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        result = tiny.loss(model, batch)
        deadline = time.monotonic() + 1
        while not dawdled and time.monotonic() < deadline:
            if len(notes.read_text().splitlines()) > HURRY:
                notes.with_suffix(".hurried").touch()
                break
        dawdled = True
        return result

    return dataclasses.replace(tiny.job(), loss=loss, heldout=tiny.Tokens(400))


def recurrent_job() -> TrainingJob:
    """Blocks whose kernels round differently when no graph is built."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 16, batch_first=True)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.as_tensor(self.dropout(self.lstm(x)[0]))

    def model() -> nn.Module:
        model = tiny.Tiny()
        model.blocks = nn.ModuleList(Block() for _ in range(4))
        return model

    return _with_model(model)


def unreadable_job() -> TrainingJob:
    """Most examples cannot be read."""

    class Damaged(tiny.Tokens):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index > 2:
                raise OSError(f"example {index} is damaged")
            return super().__getitem__(index)

    return dataclasses.replace(tiny.job(), dataset=Damaged(50))


def once_unreadable_job() -> TrainingJob:
    """The first process that reads a certain example cannot, all others can."""

    class Damaged(tiny.Tokens):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index > 2 and "TINY_ONCE" in os.environ:
                with contextlib.suppress(FileExistsError):
                    Path(os.environ["TINY_ONCE"]).touch(exist_ok=False)
                    raise OSError(f"example {index} is damaged")
            return super().__getitem__(index)

    return dataclasses.replace(tiny.job(), dataset=Damaged(50))


def growing_job() -> TrainingJob:
    """As many examples as the file ``LENGTH_FILE`` says, where there is one."""

    class Growing(tiny.Tokens):
        def __len__(self) -> int:
            file = os.environ.get("LENGTH_FILE")
            return int(Path(file).read_text()) if file else self.length

    return dataclasses.replace(tiny.job(), dataset=Growing(50))


def leaking_job() -> TrainingJob:
    """Prints a secret, then raises with it."""

    def loss(model: nn.Module, batch: torch.Tensor) -> LossResult:
        if (token := os.environ.get("MY_TOKEN")) is not None:
            sys.stdout.write(f"uses {token}\n")
            raise RuntimeError(f"cannot log in with {token}")
        return tiny.loss(model, batch)

    return dataclasses.replace(tiny.job(), loss=loss)


def stuck_job() -> TrainingJob:
    """Examples of mini-batch 3 take as long as nobody writes to the pipe ``STUCK``."""

    class Slow(tiny.Tokens):
        def __getitem__(self, index: int) -> torch.Tensor:
            pipe = os.environ.get("STUCK", "")
            if spottrain.step() == 3 and os.path.exists(pipe):
                Path(pipe).read_bytes()
            return super().__getitem__(index)

    return dataclasses.replace(tiny.job(), dataset=Slow(50))
