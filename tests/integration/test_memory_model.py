"""The planner's memory model against the tensor bytes that real workers track."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.test_hooks import job_spec

from spottrain import wire
from spottrain.morphing.memory import plan_bytes
from spottrain.pipeline.entrypoint import load_job
from spottrain.pipeline.inspect import model_facts
from spottrain.pipeline.tracer import trace
from spottrain.wire import Reduction

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_no_worker_tracks_more_than_the_planner_allows_for_nor_much_less(
    zygote: Zygote, tmp_path: Path, reduction: Reduction
) -> None:
    spec = replace(
        job_spec(tmp_path, reduction, steps=2),
        entrypoint="byte_gpt:training_job",
        minibatch_size=16,
        microbatch_size=4,
    )
    job = load_job(spec.entrypoint, EXAMPLES)
    facts = model_facts(job, trace(job))
    with Fleet(spec, "abcd", tmp_path / "log", zygote, workdir=EXAMPLES) as fleet:
        fleet.ready()
        fleet.machines["a"].send(wire.Calibrate())
        profile = fleet.wait_for(
            "profile",
            lambda _, r: r.profile if isinstance(r, wire.Calibrated) else None,
        )
        plan = make_plan(spec, 2, 2, "abcd", len(facts.sections))
        fleet.train(lambda _: plan, fleet.initialise())

    tracked = {
        name: r.peak_bytes
        for name, r in fleet.history
        if isinstance(r, wire.MinibatchCommitted)
    }
    allowed = [
        stage.total_bytes for stage in plan_bytes(facts, profile, plan, reduction)
    ]
    for rank, slot in enumerate(plan.slots):
        share = tracked[slot.vm_id] / allowed[rank % plan.pipeline_depth]
        assert 0.75 <= share <= 1.0, (rank, share)
