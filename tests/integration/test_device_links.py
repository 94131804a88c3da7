"""Neighbours of one VM that send from device to device: the weights of one CPU, through kills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.builders import a_plan
from tests.faults import environment_of
from tests.integration.fleet import Fleet, Host, Zygote
from tests.integration.struck_runs import NUM_SECTIONS, job_spec
from tests.integration.test_hooks import SERIES, series_of_blows

from spottrain.pipeline.base.faults import Hook
from spottrain.wire.plan import Slot

pytestmark = pytest.mark.rotated


@pytest.mark.parametrize("hooks", SERIES[1:3], ids=lambda hooks: hooks[0])
@pytest.mark.parametrize(("depth", "width", "chunks"), [(2, 1, 1), (3, 2, 1), (2, 2, 2)])
def test_a_box_whose_neighbours_send_from_device_to_device_trains_the_same_bits_through_kills(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    depth: int,
    width: int,
    chunks: int,
    hooks: Sequence[Hook],
) -> None:
    spec = job_spec(tmp_path)
    ranks = depth * width
    plan = replace(
        a_plan(
            depth,
            width,
            num_sections=NUM_SECTIONS,
            virtual_nodes=spec.minibatch_size // spec.microbatch_size,
            microbatch_size=spec.microbatch_size,
            slots=tuple(Slot(vm_id="a", index=index) for index in range(ranks)),
            chunks=chunks,
        ),
        links_on_devices=True,
    )
    blows = series_of_blows(hooks, depth, ranks - 1)
    marks = [tmp_path / f"mark-{number}" for number in range(len(blows))]
    script = [{**asdict(blow), "mark": str(mark)} for blow, mark in zip(blows, marks, strict=True)]
    hosts = {"a": Host(num_slots=ranks, device="tests.fakes.deferred:3")}
    with Fleet(spec, "a", tmp_path / "log", zygote, environment_of(script), hosts=hosts) as fleet:
        fleet.ready()
        weights = fleet.train(lambda _: plan, fleet.initialise())

    assert weights == undisturbed
    assert all(mark.exists() for mark in marks)
    assert fleet.committed_twice() == []
