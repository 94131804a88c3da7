"""Checkpoints of real workers, where the disk does not do as it is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.integration.fleet import (
    Fleet,
    FleetError,
    Zygote,
    make_plan,
    read_weights,
)
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.manifest import (
    Manifest,
    list_checkpoints,
    read_manifest,
    verified,
)
from spottrain.storage.open import open_store
from spottrain.storage.store import Store
from spottrain.wire import messages
from spottrain.wire.plan import Slot

FROZEN = ("embedding.", "blocks.1.")


def test_a_checkpoint_is_saved_though_an_old_one_cannot_be_deleted(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec = job_spec(tmp_path)
    stuck = tmp_path / "checkpoints" / "step-0-g0-00000001" / "manifest.json"
    stuck.mkdir(parents=True)  # where a file should be: it cannot be unlinked
    with Fleet(spec, "a", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        fleet.train(lambda _: plan, fleet.initialise())

    reports = [r for _, r in fleet.history]
    saved = [r.step for r in reports if isinstance(r, messages.CheckpointSaved)]
    failed = [r.reason for r in reports if isinstance(r, messages.CheckpointFailed)]
    assert (saved[0], saved[-1]) == (0, spec.steps)
    assert len(failed) == len(saved) - 1
    assert "cannot delete" in failed[0]


def test_a_plan_without_second_copies_begins_with_a_checkpoint(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Else the next loss of a VM would go back to the checkpoint before."""
    spec = job_spec(tmp_path, steps=16)
    spec = dataclasses.replace(spec, checkpoint_every_steps=100)
    slowly = {"TINY_SLEEP_S": "0.1"}
    with Fleet(spec, "ab", tmp_path / "log", zygote, slowly) as fleet:
        fleet.ready()
        first = fleet.initialise()
        fleet.run(make_plan(spec, 1, 2, "ab", NUM_SECTIONS), first)
        fleet.wait_for_step(1)
        fleet.stop()
        assert not fleet.wait_for_end({"a", "b"})
        assert fleet.newest_checkpoint() == first
        donor = Slot(vm_id="b", index=0)
        fleet.run(make_plan(spec, 1, 1, "a", NUM_SECTIONS), first, [donor])
        saved = fleet.wait_for(
            "a checkpoint",
            lambda _, r: r.step if isinstance(r, messages.CheckpointSaved) else None,
        )
        starts = [r.step for _, r in fleet.history if isinstance(r, messages.GenerationStarted)]
        assert saved == starts[-1] > 0


def test_an_update_that_raises_is_undone_and_what_was_committed_is_saved(
    zygote: Zygote, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    spec = job_spec(tmp_path / "whole", steps=3, entrypoint="optimizer_jobs:Nested")
    with Fleet(spec, "c", tmp_path / "whole" / "log", zygote) as fleet:
        fleet.ready()
        alone = make_plan(spec, 1, 1, "c", NUM_SECTIONS)
        undisturbed = fleet.train(lambda _: alone, fleet.initialise())

    spec = job_spec(tmp_path, entrypoint="optimizer_jobs:RaisesInFourth")
    with Fleet(spec, "ab", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS)
        first = fleet.initialise()
        fleet.run(plan, first)
        with pytest.raises(FleetError, match="optimizer in mini-batch 3 raised"):
            fleet.wait_for_end({"a", "b"})
        fleet.run(plan, first, save_only=True)
        fleet.wait_for(
            "CheckpointSaved",
            lambda _, r: isinstance(r, messages.CheckpointSaved) or None,
        )
    assert read_weights(Path(spec.checkpoint_path)) == {
        name: tensor for name, tensor in undisturbed.items() if not name.endswith("///evaluation")
    }


def saved_names(store: Store, manifest: Manifest) -> set[str]:
    """Return the frozen parameters in the files of a checkpoint's own folder."""
    names: set[str] = set()
    for file in manifest.files:
        with verified(store, manifest.name, file) as path, safe_open(path, "pt") as tensors:
            names.update(tensors.keys())
    return {name for name in names if name.startswith(FROZEN)}


def test_frozen_parameters_are_saved_once(zygote: Zygote, tmp_path: Path) -> None:
    spec = job_spec(tmp_path, entrypoint="tiny_job:frozen_job")
    # All: which steps are saved depends on how fast the disk is.
    spec = dataclasses.replace(spec, checkpoint_keep=20)
    store = open_store(spec.checkpoint_path)
    with Fleet(spec, "ab", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS)
        undisturbed = fleet.train(lambda _: plan, fleet.initialise())
    newest, before, *_ = list_checkpoints(store)
    manifests = [read_manifest(store, entry.name) for entry in (newest, before)]
    assert [saved_names(store, manifest) for manifest in manifests] == [set(), set()]
    assert manifests[0].frozen == manifests[1].frozen
    assert [file.section for file in manifests[0].frozen] == [0, 1, 3]
    assert len(store.list("frozen")) == 3
    # VMs need not write anywhere else: docs/checkpoints.md, Credentials.
    top = {path.name for path in Path(spec.checkpoint_path).iterdir()}
    assert {name for name in top if not name.startswith("step-")} == {"frozen"}

    store.delete_folder(newest.name)
    alone = make_plan(spec, 1, 1, "c", NUM_SECTIONS)
    with Fleet(spec, "c", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        assert fleet.train(lambda _: alone, before.name) == undisturbed
    newest = list_checkpoints(store)[0]
    assert newest.step == spec.steps
    assert not saved_names(store, read_manifest(store, newest.name))

    manifest = dataclasses.replace(read_manifest(store, before.name), base="gpt2")
    text = json.dumps(dataclasses.asdict(manifest))
    store.put(f"{before.name}/manifest.json", text.encode())
    with Fleet(spec, "c", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        fleet.run(alone, before.name)
        refused = fleet.wait_for(
            "UserCodeFailed",
            lambda _, r: r.message if isinstance(r, messages.UserCodeFailed) else None,
        )
    assert "are those of gpt2, but model() now begins with others" in refused


def test_a_job_that_ends_on_nan_saves_its_newest_good_state(zygote: Zygote, tmp_path: Path) -> None:
    """Mini-batches that are not finite change nothing: it is that of the step before."""
    good = 4
    (tmp_path / "whole").mkdir()
    nan_from = {"TINY_NAN_FROM": str(good)}
    entrypoint = "measured_jobs:late_nan_job"
    spec = job_spec(tmp_path / "whole", steps=good, entrypoint=entrypoint)
    with Fleet(spec, "c", tmp_path / "log", zygote, nan_from) as fleet:
        fleet.ready()
        alone = make_plan(spec, 1, 1, "c", NUM_SECTIONS)
        undisturbed = fleet.train(lambda _: alone, fleet.initialise())

    spec = job_spec(tmp_path, steps=1000, entrypoint=entrypoint)
    spec = dataclasses.replace(spec, checkpoint_every_steps=500)
    with Fleet(spec, "ab", tmp_path / "log", zygote, nan_from) as fleet:
        fleet.ready()
        fleet.run(make_plan(spec, 2, 1, "ab", NUM_SECTIONS), fleet.initialise())
        fleet.wait_for_step(good + 3)
        fleet.stop(checkpoint=True)
        fleet.wait_for_end({"a", "b"})
        saved = [r for _, r in fleet.history if isinstance(r, messages.CheckpointSaved)]
    assert saved[-1].step == good
    ends = "///evaluation"  # which an end of training adds
    found = read_weights(Path(spec.checkpoint_path))
    assert {k: v for k, v in found.items() if not k.endswith(ends)} == {
        k: v for k, v in undisturbed.items() if not k.endswith(ends)
    }
