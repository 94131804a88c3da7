"""Model facts are printed as JSON, whatever the user's code prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import first_always
from torch import nn

from spottrain.codec import decode, encode
from spottrain.pipeline.model.inspect import code_details, model_facts
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.tracer import trace
from spottrain.wire.model import CodeDetails, ModelFacts, TiedParameter

WIDTH = 8


class Model(nn.Module):
    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight


def facts(**changes: Any) -> ModelFacts:
    parts: dict[str, Any] = {
        "model": Model,
        "dataset": [torch.ones(WIDTH)] * 5,
        "heldout": [torch.ones(WIDTH)] * 2,
        "loss": lambda model, batch: (model(batch).sum(), len(batch)),
        "optimizer": lambda named: torch.optim.AdamW(p for _, p in named),
    }
    job = TrainingJob(**(parts | changes))
    return model_facts(job, trace(job))


def test_facts_are_those_of_the_model() -> None:
    got = facts()
    matrix, vector = 4 * WIDTH * WIDTH, 4 * WIDTH
    assert got.num_parameters == 4 * WIDTH * WIDTH + 3 * WIDTH
    assert got.blocks == "blocks"
    assert (got.dataset_len, got.heldout_len) == (5, 2)
    assert got.tied == (TiedParameter(name="embed.weight", sections=(0, 2), param_bytes=matrix),)
    assert [s.param_bytes for s in got.sections] == [
        2 * matrix + vector,
        matrix + vector,
        2 * matrix + vector,
    ]
    assert [s.optimizer_bytes for s in got.sections] == [
        2 * s.param_bytes + 4 * tensors for s, tensors in zip(got.sections, (3, 2, 3), strict=True)
    ]
    assert [s.activation_bytes_per_example for s in got.sections] == [
        vector,
        vector,
        0,
    ]
    assert facts(heldout=None).heldout_len == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model": lambda: Model(blocks=4)},
        {"model": lambda: Model().to(torch.bfloat16), "dataset": [torch.ones(WIDTH).bfloat16()] * 5},
        {"model": lambda: Model(width=16), "dataset": [torch.ones(16)] * 5},
        {"dataset": [torch.ones(2, WIDTH)] * 5},
        {"optimizer": lambda named: torch.optim.Adam(p for _, p in named)},
        {"optimizer": lambda named: torch.optim.SGD(p for _, p in named)},
    ],
)  # fmt: skip
def test_the_fingerprint_changes_with_model_optimizer_and_shapes(
    changes: dict[str, Any],
) -> None:
    assert facts(**changes).fingerprint != facts().fingerprint


def test_the_fingerprint_does_not_change_with_values() -> None:
    same = facts(
        dataset=[torch.zeros(WIDTH)] * 9,
        optimizer=lambda named: torch.optim.AdamW((p for _, p in named), lr=1.0),
    )
    assert same.fingerprint == facts().fingerprint


SOURCE = """
import os, torch, spottrain
print("hello from the user")
os.system("echo hello from a child")

def job():
    return spottrain.TrainingJob(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
        dataset=[torch.ones(2)] * 3,
        loss=lambda model, batch: (model(batch).sum(), len(batch)),
        optimizer=lambda named: torch.optim.SGD(p for _, p in named),
    )

def fails():
    raise RuntimeError("the user's own")
"""


def inspect(folder: Path, function: str) -> subprocess.CompletedProcess[str]:
    (folder / "user_code.py").write_text(SOURCE)
    command = [
        "-m",
        "spottrain.pipeline.model.inspect",
        f"user_code:{function}",
        str(folder),
    ]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


@pytest.mark.rotated
def test_the_tool_prints_the_facts_and_nothing_else(tmp_path: Path) -> None:
    done = inspect(tmp_path, "job")
    assert done.returncode == 0, done.stderr
    got = decode(ModelFacts, done.stdout)
    assert got.num_parameters == 12
    assert "hello from the user" in done.stderr
    assert "hello from a child" in done.stderr


@pytest.mark.rotated
def test_the_tool_prints_the_users_error_and_exits_with_3(tmp_path: Path) -> None:
    done = inspect(tmp_path, "fails")
    assert done.returncode == 3
    answer = json.loads(done.stdout)
    assert answer["error"] == ("entrypoint user_code:fails raised RuntimeError: the user's own")
    assert "in fails" in answer["traceback"]


def test_details_name_what_a_checkpoint_depends_on() -> None:
    job = TrainingJob(
        model=Model,
        dataset=[torch.ones(WIDTH)] * 5,
        loss=lambda model, batch: (model(batch).sum(), len(batch)),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5, momentum=0.9),
        lr_schedule=lambda step: 0.1 * step,
    )
    layout = trace(job)
    details = code_details(job, layout, 4)
    assert details.fingerprint == model_facts(job, layout).fingerprint
    assert details.sections == layout.parameters
    assert details.learning_rate == pytest.approx(0.2)
    parameters = {one.name: one.text for one in details.parameters}
    state = {one.name: one.text for one in details.optimizer_state}
    settings = {one.name: one.text for one in details.optimizer_settings}
    assert parameters["embed.weight"] == "(8, 8) float32 trained"
    assert state["embed.weight/momentum_buffer"] == "(8, 8) float32"
    assert settings["momentum"] == "0.9"
    assert decode(CodeDetails, encode(details)) == details


@pytest.mark.rotated
@pytest.mark.parametrize("seed", first_always(["", "7"]))
def test_a_data_set_drawn_anew_in_every_process_is_refused(tmp_path: Path, seed: str) -> None:
    (tmp_path / "drawing.py").write_text(f"""
import random
import torch
import spottrain

offset = random.Random({seed}).random()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def job():
    return spottrain.TrainingJob(
        model=Model,
        dataset=[torch.full((2,), offset)] * 3,
        loss=lambda model, batch: (model(batch).sum(), 1.0),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
""")
    inspect = [sys.executable, "-P", "-m", "spottrain.pipeline.model.inspect"]
    done = subprocess.run(
        [*inspect, "drawing:job", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert done.returncode == (0 if seed else 3), done.stderr
    assert ("example 0 of dataset" in done.stdout) == (not seed)
