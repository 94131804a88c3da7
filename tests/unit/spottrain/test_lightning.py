"""A job made of a LightningModule and its data trains as Lightning's own Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import first_always
from tests.unit.spottrain.test_from_trainer import trained
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spottrain.errors import UserCodeError
from spottrain.lightning import job
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.tracer import trace
from spottrain.schedules import STEPS_VARIABLE

L = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

STEPS, MINIBATCH, WIDTH = 6, 4, 8


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEPS_VARIABLE, str(STEPS))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Regression(L.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("mse", loss)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Warmed(Regression):
    """Two groups and a warm-up by step."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.blocks.parameters(), "weight_decay": 0.1},
            {"params": self.head.parameters(), "lr": 0.05},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 3))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class ByEpoch(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)]


class Numbers(L.LightningDataModule):  # type: ignore[misc,name-defined]
    """Three mini-batches an epoch, in order."""

    def setup(self, stage: str) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.x = torch.randn(3 * MINIBATCH, WIDTH, generator=drawn)
        self.y = self.x.sum(1, keepdim=True)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=MINIBATCH)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=MINIBATCH)


class Curve(L.Callback):  # type: ignore[misc,name-defined]
    """Keeps the loss of every mini-batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


class Repeated:
    """Examples of one epoch after the other."""

    def __init__(self, job: TrainingJob) -> None:
        self.dataset = job.dataset

    def __len__(self) -> int:
        return STEPS * MINIBATCH

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


@pytest.mark.filterwarnings("default")  # Lightning's own: loaders without workers
@pytest.mark.parametrize("module", first_always([Warmed, Regression, ByEpoch]))
def test_losses_and_weights_are_those_of_the_trainer(
    module: Callable[[], Any], tmp_path: Path
) -> None:
    clip = 0.5 if module is Warmed else None
    curve, theirs = Curve(), module()
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        gradient_clip_val=clip,
        callbacks=[curve],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(theirs, datamodule=Numbers())
    made = job(module, Numbers(), clip_grad_norm=clip)
    losses: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        total, number, metrics = made.loss(model, batch)  # type: ignore[misc]
        losses.append(float(total.detach()) / float(number))
        assert list(metrics) == ["mse"]
        return total, number

    schedule = made.lr_schedule or (lambda step: 1.0)
    found = trained(
        dataclasses.replace(made, dataset=Repeated(made), loss=loss, lr_schedule=schedule)
    )
    assert losses == pytest.approx(curve.losses, rel=1e-5)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(found.state_dict()[f"module.{name}"], tensor, msg=name)


def test_its_model_can_be_cut_and_evaluated() -> None:
    made = job(Regression, Numbers())
    assert trace(made).num_sections > 1
    model: Any = made.model().eval()
    batch = made.collate([made.heldout_sets["heldout"][i] for i in range(MINIBATCH)])
    total, number, _ = made.loss(model, batch)  # type: ignore[misc]
    wanted = nn.functional.mse_loss(model.module(batch[0]), batch[1])
    assert float(total.detach()) / float(number) == pytest.approx(float(wanted.detach()))


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Regression):
    def on_train_epoch_end(self) -> None:
        self.losses.clear()


class Two(Regression):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.blocks, self.head)]


class Plateau(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class Asking(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Manual, "automatic_optimization"),
        (Hooked, "on_train_epoch_end"),
        (Two, "one optimizer: got 2"),
        (Plateau, "ReduceLROnPlateau"),
        (Asking, "configure_optimizers raised"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(module: Callable[[], Any], named: str) -> None:
    with pytest.raises(UserCodeError, match=named) as caught:
        job(module, Numbers())
    assert "\n" not in str(caught.value)


def test_a_module_that_is_built_already_is_refused() -> None:
    with pytest.raises(UserCodeError, match="lambda: Regression"):
        job(Regression(), Numbers())
