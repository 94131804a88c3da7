"""A job that begins with the weights of another one; weights that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integration.jobs import Job
from tests.integration.undisturbed import Undisturbed

from spottrain.manifest import list_checkpoints, read_manifest
from spottrain.pipeline.state.checkpoint import load_section
from spottrain.storage.open import open_store
from spottrain.wire.messages import CheckpointSaved


def parameters(root: Path | str, which: int) -> dict[str, torch.Tensor]:
    store = open_store(root)
    manifest = read_manifest(store, list_checkpoints(store)[which].name)
    sections = (load_section(store, manifest, k) for k in range(manifest.num_sections))
    found = {name: tensor for one in sections for name, tensor in one.items()}
    return {name: tensor for name, tensor in found.items() if "//" not in name}


@pytest.mark.rotated(parts=[2])
def test_a_job_begins_with_given_weights_and_a_fresh_optimizer(
    tmp_path: Path, reference: Undisturbed
) -> None:
    options = {"steps": 4, "resources": {"max_vms": 2}}
    source = str(reference.checkpoints)
    with Job(tmp_path, "warm", init_from=source, **options) as job:
        done = job.launch("-o", "json")
        assert done.code == 0, done.err
        assert "init_from: " in done.err
        given, begun = parameters(source, 0), parameters(job.checkpoint_root, 1)
        assert [entry.step for entry in job.checkpoints()] == [4, 0]
        assert all(torch.equal(begun[name], given[name]) for name in given)
        assert [r.step for _, r in job.reports(CheckpointSaved)] == [4]

        target = tmp_path / "export"
        assert job.run("export", "warm", "--to", str(target)).code == 0
    state = load_file(target / "model.safetensors")
    del state["norm.bias"]
    wrong = tmp_path / "wrong.safetensors"
    save_file({**state, "more": torch.ones(1)}, wrong)
    with Job(tmp_path, "cold", init_from=str(wrong), **options) as job:
        refused = job.launch()
        assert refused.code == 2
        assert "norm.bias" in refused.error
        assert "init_from.strict" in refused.error
        assert not job.dir.path.exists()

        job.settings["init_from"] = {"path": "warm", "strict": False}
        job.settings["checkpoint"] = {"path": source}
        job.save()
        refused = job.launch()
        assert refused.code == 2
        assert "checkpoint.path" in refused.error
        assert not job.dir.path.exists()
