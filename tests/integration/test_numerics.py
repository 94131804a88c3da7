"""Workers go on only from checkpoints that were computed as they would, in exact mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.fleet import Fleet, Zygote, make_plan, read_weights
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.manifest import read_manifest
from spottrain.storage.open import open_store
from spottrain.wire import messages
from spottrain.wire.numerics import numerics_of

pytestmark = pytest.mark.rotated


def test_a_checkpoint_of_another_micro_batch_size_whose_bits_differ_is_refused(
    zygote: Zygote, tmp_path: Path
) -> None:
    weights = []
    for size in (2, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        spec = job_spec(folder, steps=2)
        plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS, microbatch_size=size)
        with Fleet(spec, "a", folder / "log", zygote) as fleet:
            fleet.ready()
            fleet.run(plan, fleet.initialise(), numerics=numerics_of(plan, "here"))
            fleet.wait_for_end({"a"})
            last = fleet.newest_checkpoint()
        weights.append(read_weights(Path(spec.checkpoint_path)))
        settled = read_manifest(open_store(spec.checkpoint_path), last).numerics
        assert settled == numerics_of(plan, "here")
    assert weights[0] != weights[1]

    spec = replace(spec, steps=4)
    plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS, microbatch_size=2)
    with Fleet(spec, "a", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        fleet.run(plan, last, numerics=numerics_of(plan, "here"))
        told = fleet.wait_for(
            "the refusal",
            lambda _, one: one.message if isinstance(one, messages.UserCodeFailed) else None,
        )
    assert (
        f"checkpoint {last} in {spec.checkpoint_path} is of a job with microbatch_size: 4" in told
    )
