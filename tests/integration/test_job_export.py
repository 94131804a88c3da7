"""Weights of a finished job, by the command; and what the command refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.integration import forks
from tests.integration.jobs import DEADLINE_S, STEPS, Answer
from tests.integration.tiny_job import Tiny
from tests.integration.undisturbed import Undisturbed

from spottrain.manifest import list_checkpoints
from spottrain.storage.open import open_store


def export(reference: Undisturbed, *arguments: str) -> Answer:
    home = reference.checkpoints.parents[2]
    environment = {
        **os.environ,
        "SPOTTRAIN_HOME": str(home),
        "OMP_NUM_THREADS": "1",
    }
    return Answer(*forks.run(("export", *arguments), environment, DEADLINE_S))


@pytest.mark.rotated(parts=[7])
def test_the_newest_and_a_named_checkpoint(reference: Undisturbed, tmp_path: Path) -> None:
    newest, before = list_checkpoints(open_store(reference.checkpoints))
    done = export(reference, "undisturbed", "--to", str(tmp_path / "a"), "-o", "json")
    assert done.code == 0, done.err
    assert done.report["checkpoint"] == newest.name
    assert done.report["step"] == STEPS
    assert done.report["files"] == ["model.safetensors"]
    by_step = ("--step", str(before.step), "--format", "torch")
    done = export(reference, "undisturbed", "--to", str(tmp_path / "b"), *by_step)
    assert done.code == 0, done.err
    assert f"step {before.step} of undisturbed: model.pt" in done.out
    assert "model.load_state_dict(torch.load(" in done.out
    first = load_file(tmp_path / "a" / "model.safetensors")
    second = torch.load(tmp_path / "b" / "model.pt", weights_only=True)
    for state in (first, second):
        Tiny().load_state_dict(state)
    assert not torch.equal(first["embedding.weight"], second["embedding.weight"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_refusals_are_one_line_and_leave_nothing(reference: Undisturbed, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    to = ("--to", str(tmp_path / "new"))
    cases: tuple[tuple[tuple[str, ...], int, str], ...] = (
        (("nobody", *to), 2, "no job nobody on this machine"),
        (("undisturbed", "--to", str(full)), 2, "is not empty"),
        (("undisturbed", *to, "--step", "1"), 2, "--step 1: "),
        (("undisturbed", *to, "--checkpoint", "x"), 2, "give the name of its folder"),
        (("undisturbed", *to, "--format", "hf"), 3, "Tiny is not, and does not hold"),
        (("undisturbed", *to, "--format", "onnx"), 2, "onnx"),
        ((f"file://{tmp_path}/none", *to), 2, "no job found"),
    )
    for arguments, code, reason in cases:
        done = export(reference, *arguments)
        assert done.code == code, done.err
        assert reason in done.error
    assert [p.name for p in tmp_path.iterdir()] == ["full"]
