"""The tiny job with each optimizer of the matrix, as ``optimizer_jobs:NAME``."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spottrain import TrainingJob
from spottrain.optim import keep_ema, keep_masters

if TYPE_CHECKING:
    from tests.integration import tiny_job as tiny

    from tests import optimizers
else:
    sys.path.append(str(Path(__file__).parents[2]))
    optimizers = importlib.import_module("tests.optimizers")
    tiny = importlib.import_module(f"{__package__}.tiny_job" if __package__ else "tiny_job")

Factory = Callable[[Any], torch.optim.Optimizer]


def _of_torch(kind: str, **options: Any) -> Factory:
    options = {"lr": 1e-2, **options}
    return lambda named: getattr(torch.optim, kind)([p for _, p in named], **options)


def _of_library(module: str, kind: str, **options: Any) -> Factory:
    """Return a factory that raises ImportError where the library is not installed."""

    def factory(named: Any) -> torch.optim.Optimizer:
        made = getattr(importlib.import_module(module), kind)
        return made([p for _, p in named], **options)  # type: ignore[no-any-return]

    return factory


def _with_masters(module: str, kind: str) -> Factory:
    factory = _of_library(module, kind)
    return lambda named: keep_masters(factory(named))


def _trained(factory: Factory) -> Factory:
    def train(named: Any) -> torch.optim.Optimizer:
        optimizer: Any = factory(named)
        optimizer.train()
        return optimizer  # type: ignore[no-any-return]

    return train


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest, with groups and state in common."""

    def __init__(self, named: Any) -> None:
        matrices = [p for name, p in named if p.ndim == 2 and "embedding" not in name]
        rest = [p for name, p in named if p.ndim != 2 or "embedding" in name]
        super().__init__([p for _, p in named], {"lr": 1e-2})
        self.inner: list[torch.optim.Optimizer] = []
        if matrices:
            self.inner.append(torch.optim.Muon(matrices, lr=1e-2))
        if rest:
            self.inner.append(torch.optim.AdamW(rest, lr=1e-2))
        self.param_groups = [g for one in self.inner for g in one.param_groups]
        for one in self.inner:
            one.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.inner:
            one.step()


_MADE: dict[str, Factory] = {
    "adamw": _of_torch("AdamW"),
    "adamw_fused": _of_torch("AdamW", fused=True),
    "adamw_foreach": _of_torch("AdamW", foreach=True),
    "adamw_ema": lambda named: keep_ema(_of_torch("AdamW")(named), 0.9),
    "adamw_amsgrad": _of_torch("AdamW", amsgrad=True),
    "adamw_tensor_lr": _of_torch("AdamW", lr=torch.tensor(1e-2)),
    "sgd": _of_torch("SGD"),
    "sgd_momentum": _of_torch("SGD", momentum=0.9, nesterov=True),
    "nadam": _of_torch("NAdam"),
    "radam": _of_torch("RAdam"),
    "adamax": _of_torch("Adamax"),
    "adadelta": _of_torch("Adadelta"),
    "adagrad": _of_torch("Adagrad"),
    "rmsprop": _of_torch("RMSprop", momentum=0.9, centered=True),
    "rprop": _of_torch("Rprop"),
    "asgd": _of_torch("ASGD"),
    "adafactor": _of_torch("Adafactor"),
    "muon_and_adamw": MuonAndAdamW,
    "muon": _of_torch("Muon"),
    "lbfgs": _of_torch("LBFGS"),
    "hf_adafactor": _of_library("transformers.optimization", "Adafactor"),
    "timm_lamb": _of_library("timm.optim", "Lamb"),
    "timm_lamb_unclipped": _of_library("timm.optim", "Lamb", max_grad_norm=None),
    "timm_adan": _of_library("timm.optim", "Adan"),
    "timm_muon": _of_library("timm.optim", "Muon"),
    "timm_kron": _of_library("timm.optim.kron", "Kron"),
    "po_lamb": _of_library("pytorch_optimizer", "Lamb"),
    "po_ademamix": _of_library("pytorch_optimizer", "AdEMAMix"),
    "po_ranger": _of_library("pytorch_optimizer", "Ranger"),
    "po_galore": _of_library("pytorch_optimizer", "GaLore"),
    "po_came": _of_library("pytorch_optimizer", "CAME"),
    "po_shampoo": _of_library("pytorch_optimizer", "Shampoo"),
    "po_soap": _of_library("pytorch_optimizer", "SOAP"),
    "po_avagrad": _of_library("pytorch_optimizer", "AvaGrad"),
    "po_asgd": _of_library("pytorch_optimizer", "ASGD"),
    "po_madgrad": _of_library("pytorch_optimizer", "MADGRAD"),
    "po_gravity": _of_library("pytorch_optimizer", "Gravity"),
    "po_stablespam": _of_library("pytorch_optimizer", "StableSPAM"),
    "schedule_free": _trained(_of_library("schedulefree", "AdamWScheduleFree")),
    "schedule_free_eval": _of_library("schedulefree", "AdamWScheduleFree"),
    "lion": _of_library("lion_pytorch", "Lion"),
    "prodigy": _of_library("prodigyopt", "Prodigy"),
    "adamw_masters": lambda named: keep_masters(_of_torch("AdamW")(named)),
    "bnb_adamw_8bit": _of_library("bitsandbytes.optim", "AdamW8bit"),
    "ao_adamw_8bit": _of_library("torchao.optim", "AdamW8bit"),
    "ao_adamw_4bit": _of_library("torchao.optim", "AdamW4bit"),
    "bnb_adamw_8bit_masters": _with_masters("bitsandbytes.optim", "AdamW8bit"),
    "ao_adamw_8bit_masters": _with_masters("torchao.optim", "AdamW8bit"),
    "ao_adamw_4bit_masters": _with_masters("torchao.optim", "AdamW4bit"),
}

ROWS: dict[str, Factory] = {**_MADE, **optimizers.ACCEPTED}
ROWS |= {kind.__name__: kind for kind in optimizers.REFUSED}
"""By name: of torch, of libraries, and small ones that show one habit each."""


def _model(name: str) -> nn.Module:
    """Return the model of a row: of bf16 for masters, with 4096 elements, below which libraries
    keep 32 bits, in a parameter for moments of fewer bits."""
    model = tiny.Tiny()
    if "bit" in name:
        model.embedding = nn.Embedding(256, tiny.WIDTH)
    return model.bfloat16() if "masters" in name else model


def __getattr__(name: str) -> Callable[[], TrainingJob]:
    rows = {**ROWS, "RaisesInFourth": optimizers.RaisesInFourth}
    if name not in rows:
        raise AttributeError(name)
    model = functools.partial(_model, name)
    return lambda: dataclasses.replace(tiny.job(), model=model, optimizer=rows[name])
