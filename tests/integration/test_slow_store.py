"""Losses, notices and stops of real workers while their store does not answer.

What is held is let go by the test alone: whatever waited for it would never end.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
from tests.fakes.held_s3 import CREDENTIALS, HeldS3
from tests.integration.fleet import Fleet, Host, Zygote, make_plan
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import StateHome
from spottrain.wire.plan import Slot

ENVIRONMENT = {**CREDENTIALS, "TINY_SLEEP_S": "0.05"}
STATES = pytest.mark.parametrize(
    ("device", "state"), [("tests.fakes.deferred:3", "device"), ("cpu", "host")]
)


def slow_spec(
    folder: Path, s3: HeldS3, entrypoint: str = "tiny_job:job", every: int = 10
) -> JobSpec:
    return dataclasses.replace(
        job_spec(folder, steps=1000, entrypoint=entrypoint),
        checkpoint_path=s3.url("job"),
        checkpoint_every_steps=every,
    )


def committed(fleet: Fleet) -> int:
    """Return the newest mini-batch that anybody has reported."""
    reports = [r for _, r in fleet.history]
    commits = [r for r in reports if isinstance(r, messages.MinibatchCommitted)]
    return max(r.step for r in commits)


def began(fleet: Fleet) -> messages.GenerationStarted:
    """Return how the newest generation begins."""
    return fleet.wait_for(
        "the next generation",
        lambda _, r: (
            r
            if isinstance(r, messages.GenerationStarted) and r.generation == fleet.generation
            else None
        ),
    )


def begin(fleet: Fleet, spec: JobSpec, state: StateHome) -> str:
    """Train two replicas, and save a first checkpoint; return its name."""
    fleet.ready()
    first = fleet.initialise()
    plan = make_plan(spec, 1, 2, "ab", NUM_SECTIONS, state=state)
    fleet.run(plan, first)
    return first


@pytest.mark.rotated
@STATES
@pytest.mark.parametrize("part", ["section-", "manifest.json"])
def test_a_loss_while_a_checkpoint_is_on_its_way_costs_nothing_more(
    zygote: Zygote,
    tmp_path: Path,
    s3: HeldS3,
    device: str,
    state: StateHome,
    part: str,
) -> None:
    spec = slow_spec(tmp_path, s3)
    hosts = {name: Host(device=device) for name in "ab"}
    with Fleet(spec, "ab", tmp_path / "log", zygote, ENVIRONMENT, hosts=hosts) as fleet:
        first = begin(fleet, spec, state)
        s3.hold(lambda method, key: method == "PUT" and part in key)
        s3.until_held(part)
        fleet.wait_for_step(14)
        pid = next(
            r.pid
            for name, r in fleet.history
            if name == "a" and isinstance(r, messages.GenerationStarted)
        )
        before = len(fleet.history)
        os.kill(pid, signal.SIGKILL)
        fleet.wait_for_end({"a", "b"})
        died = [name for name, r in fleet.history[before:] if isinstance(r, messages.WorkerDied)]
        assert died == ["a"], "who survives is not killed for its upload"
        step = committed(fleet)
        plan = make_plan(spec, 1, 2, "ab", NUM_SECTIONS, state=state)
        fleet.run(plan, first)
        start = began(fleet)
        assert start.outcome != "restored"
        assert start.step >= step
        assert s3.waiting, "nothing was let go"


@pytest.mark.rotated
@STATES
def test_a_notice_is_followed_while_a_checkpoint_is_on_its_way(
    zygote: Zygote, tmp_path: Path, s3: HeldS3, device: str, state: StateHome
) -> None:
    spec = slow_spec(tmp_path, s3)
    hosts = {name: Host(device=device) for name in "abc"}
    with Fleet(spec, "abc", tmp_path / "log", zygote, ENVIRONMENT, hosts=hosts) as fleet:
        fleet.ready()
        first = fleet.initialise()
        plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS, state=state)
        fleet.run(plan, first)
        s3.hold(lambda method, key: method == "PUT" and "section-" in key)
        s3.until_held("section-")
        fleet.wait_for_step(3)
        fleet.stop()
        assert not fleet.wait_for_end({"a", "b"})
        step = committed(fleet)
        plan = make_plan(spec, 2, 1, "cb", NUM_SECTIONS, state=state)
        fleet.run(plan, first, [Slot(vm_id="a", index=0)])
        start = began(fleet)
        assert (start.step, start.outcome) == (step, "same")
        assert s3.waiting, "nothing was let go"


def test_a_store_that_takes_the_manifest_late_holds_no_training_up(
    zygote: Zygote, tmp_path: Path, s3: HeldS3
) -> None:
    spec = slow_spec(tmp_path, s3)
    with Fleet(spec, "ab", tmp_path / "log", zygote, ENVIRONMENT) as fleet:
        first = begin(fleet, spec, "host")
        s3.hold(lambda method, key: method == "PUT" and "manifest.json" in key)
        s3.until_held("manifest.json")
        fleet.wait_for_step(10)
        fleet.wait_for_step(committed(fleet) + 5)
        assert fleet.newest_checkpoint() == first
        s3.let_go()
        saved = fleet.wait_for(
            "the checkpoint",
            lambda _, r: r.step if isinstance(r, messages.CheckpointSaved) else None,
        )
        assert saved == 10


@pytest.mark.rotated
def test_deletions_that_take_long_hold_no_training_up(
    zygote: Zygote, tmp_path: Path, s3: HeldS3
) -> None:
    spec = dataclasses.replace(slow_spec(tmp_path, s3), checkpoint_keep=1)
    with Fleet(spec, "ab", tmp_path / "log", zygote, ENVIRONMENT) as fleet:
        begin(fleet, spec, "host")
        s3.hold(lambda method, key: method in ("DELETE", "POST"))
        s3.until_held("")
        fleet.wait_for_step(10)
        fleet.wait_for_step(committed(fleet) + 5)
        fleet.stop()
        assert not fleet.wait_for_end({"a", "b"})
        assert s3.waiting, "nothing was let go"


@pytest.mark.rotated
def test_a_job_with_frozen_parameters_recovers_without_asking_the_store(
    zygote: Zygote, tmp_path: Path, s3: HeldS3
) -> None:
    spec = slow_spec(tmp_path, s3, "tiny_job:frozen_job", every=500)
    with Fleet(spec, "ab", tmp_path / "log", zygote, ENVIRONMENT) as fleet:
        first = begin(fleet, spec, "host")
        fleet.wait_for_step(3)
        s3.hold(lambda method, key: True)
        fleet.machines["a"].signal(signal.SIGKILL)
        fleet.wait_for_end({"a", "b"})
        step = committed(fleet)
        plan = make_plan(spec, 1, 1, "b", NUM_SECTIONS)
        fleet.run(plan, first)
        assert began(fleet).step >= step
        fleet.wait_for_step(step + 3)
