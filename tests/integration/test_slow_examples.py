"""Losses and notices while examples do not come: what is committed is not lost for it.

Nobody ever lets them come: whatever waited for them would never end.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.fleet import Fleet, Host, Zygote, make_plan
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.wire import messages
from spottrain.wire.model import LoaderSpec, StateHome

BEFORE = 3
"""Mini-batches that are committed before one waits for its examples."""


@pytest.mark.parametrize(
    ("device", "state", "loaders"),
    [
        ("tests.fakes.deferred:3", "device", 0),
        pytest.param("tests.fakes.deferred:3", "device", 1, marks=pytest.mark.rotated),
        pytest.param("cpu", "host", 0, marks=pytest.mark.rotated),
    ],
)
def test_a_loss_while_examples_do_not_come_costs_nothing_more(
    zygote: Zygote, tmp_path: Path, device: str, state: StateHome, loaders: int
) -> None:
    pipe = tmp_path / "stuck"
    os.mkfifo(pipe)
    spec = replace(
        job_spec(tmp_path),
        entrypoint="odd_jobs:stuck_job",
        network="gloo",
        loader=LoaderSpec(workers=loaders, ahead=1),
        checkpoint_every_steps=100,
    )
    hosts = {name: Host(device=device) for name in "ab"}
    environment = {"STUCK": str(pipe)}
    with Fleet(spec, "ab", tmp_path / "log", zygote, environment, hosts=hosts) as fleet:
        fleet.ready()
        first = fleet.initialise()
        fleet.run(make_plan(spec, 1, 2, "ab", NUM_SECTIONS, state=state), first)
        fleet.wait_for_step(BEFORE)
        pid = next(
            r.pid
            for name, r in fleet.history
            if name == "a" and isinstance(r, messages.GenerationStarted)
        )
        os.kill(pid, signal.SIGKILL)
        fleet.wait_for_end({"a", "b"})
        pipe.unlink()
        fleet.run(make_plan(spec, 1, 1, "b", NUM_SECTIONS, state=state), first)

        start = fleet.wait_for(
            "the next generation",
            lambda _, r: (
                r
                if isinstance(r, messages.GenerationStarted) and r.generation == fleet.generation
                else None
            ),
        )

    assert (start.step, start.outcome) == (BEFORE, "same")
