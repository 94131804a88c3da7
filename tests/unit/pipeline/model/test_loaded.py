"""What inspect has derived from a job spares others its dry runs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from tests.builders import a_spec

from spottrain.pipeline.model import loaded
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.loaded import LoadedJob, derive, keep, load
from spottrain.pipeline.model.tracer import trace
from spottrain.wire.model import LAYOUT_FILE

TRAIN = """
from typing import NamedTuple
import torch
from torch import nn
from spottrain import TrainingJob

class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight

def collate(examples):
    return Pair(torch.stack(examples), torch.stack(examples))

RUNS = []

def loss(model, batch):
    import colorsys
    RUNS.append(len(batch.x))
    return (model(batch.x) - batch.y).square().sum(), len(batch.x)

def job():
    return TrainingJob(
        model=Model, dataset=[torch.ones(4)] * 8, loss=loss, collate=collate,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1),
    )
"""

UNNAMED = """
def made():
    class Local(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor
    return Local

Pair = made()
"""
"""A class that pickle cannot name."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = "train_kept"
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / f"{name}.py").write_text(TRAIN)
    return tmp_path


def keep_in(folder: Path) -> None:
    """Do what inspect does, as a process that has not imported the job yet."""
    job = load_job("train_kept:job", folder)
    derived = derive(job, trace(job))
    keep(folder / LAYOUT_FILE, "train_kept:job", derived, sys.modules.keys())


def load_in(folder: Path) -> tuple[LoadedJob, list[int]]:
    """Return the job, and the micro-batches that loading it ran its loss on."""
    for name in ("train_kept", "colorsys"):
        sys.modules.pop(name, None)
    job = load(
        a_spec(
            name="kept",
            entrypoint="train_kept:job",
            steps=1,
            minibatch_size=4,
            reduction="exact",
            checkpoint_path="",
            checkpoint_every_steps=1,
            checkpoint_keep=1,
            lease_s=60,
        ),
        folder,
    )
    return job, [*sys.modules["train_kept"].RUNS]


def test_a_kept_layout_is_the_traced_one_and_runs_nothing(folder: Path) -> None:
    traced, runs = load_in(folder)
    assert runs == [1, 2]
    sys.modules.pop("colorsys")
    imported = frozenset(sys.modules)
    job = load_job("train_kept:job", folder)
    derived = derive(job, trace(job))
    keep(folder / LAYOUT_FILE, "train_kept:job", derived, imported)
    kept, runs = load_in(folder)
    assert runs == []
    assert "colorsys" in sys.modules  # imported by the dry run, once for all workers
    assert (kept.fingerprint, kept.specs) == (traced.fingerprint, traced.specs)
    for name in ("cuts", "parameters", "specs", "tied", "batch", "reads_batch"):
        assert getattr(kept.layout, name) == getattr(traced.layout, name)
    assert kept.layout.blank is not None


def test_a_layout_of_another_environment_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_in(folder)
    monkeypatch.setattr(loaded, "software_version", lambda: "0.0.1+000000000000")
    assert load_in(folder)[1] == [1, 2]


def test_what_cannot_be_written_is_traced_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "train_kept.py"
    path.write_text(TRAIN.replace("\ndef collate", f"{UNNAMED}\ndef collate"))
    with caplog.at_level(logging.INFO):
        keep_in(folder)
    assert "the layout is not kept" in caplog.text
    assert not (folder / LAYOUT_FILE).exists()
    assert load_in(folder)[1] == [1, 2]
