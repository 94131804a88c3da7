"""Without second copies of what is trained: VMs are lost, and others have copies."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest
from tests.integration.fleet import Fleet, Heard, Zygote, make_plan, read_weights
from tests.integration.jobs import HERE, Job, trains
from tests.integration.struck_runs import NUM_SECTIONS, job_spec
from tests.view import View

from spottrain.wire import messages
from spottrain.wire.messages import MinibatchCommitted

STEPS = 90
SLOWLY = {"TINY_SLEEP_S": "0.02"}


def lose(fleet: Fleet, victim: str) -> int:
    """Kill a VM once copies are not those of the beginning; return their mini-batch."""
    running = set(fleet.machines)
    began = min(starts_of(fleet))

    def copied(_: str, report: Heard) -> int | None:
        if not isinstance(report, messages.MinibatchCommitted):
            return None
        step = report.copied_step
        later = report.generation == fleet.generation and step and step > began
        return step if later else None

    step = fleet.wait_for("copies of a later mini-batch", copied)
    fleet.machines[victim].signal(signal.SIGKILL)
    assert not fleet.wait_for_end(running)
    assert victim not in fleet.machines
    return step


def starts_of(fleet: Fleet) -> list[int]:
    """Return from which mini-batch the ranks of the newest generation go on."""
    ranks = len(fleet.machines)
    starts: list[int] = []

    def collect(_: str, report: Heard) -> bool | None:
        if isinstance(report, messages.GenerationStarted):
            assert report.sections_loaded == 0 or fleet.generation == 1
            starts.append(report.step)
        return True if len(starts) == ranks else None

    fleet.wait_for("all ranks start", collect)
    return starts


@pytest.mark.rotated
def test_losses_go_back_to_copies_on_other_vms(zygote: Zygote, tmp_path: Path) -> None:
    """One VM after the other is lost; no checkpoint is read, and the bits are the same."""
    (plain := tmp_path / "plain").mkdir()
    spec = dataclasses.replace(job_spec(plain, steps=STEPS), checkpoint_every_steps=500)
    with Fleet(spec, "a", plain / "log", zygote) as fleet:
        fleet.ready()
        alone = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        expected = fleet.train(lambda _: alone, fleet.initialise())

    path = str(tmp_path / "checkpoints")
    spec = dataclasses.replace(spec, checkpoint_path=path)
    with Fleet(spec, "abc", tmp_path / "log", zygote, SLOWLY) as fleet:
        fleet.ready()
        first = fleet.initialise()
        for victim in "ba":
            names = list(fleet.machines)
            plan = make_plan(spec, len(names), 1, names, NUM_SECTIONS, peer_copies=1)
            fleet.run(plan, first)
            copied = lose(fleet, victim)
            assert copied > 0
        fleet.run(make_plan(spec, 1, 1, "c", NUM_SECTIONS), first)
        (start,) = starts_of(fleet)
        # Newer copies may have been made before the second loss.
        committed = (r for _, r in fleet.history if isinstance(r, MinibatchCommitted))
        assert copied <= start <= max(report.step for report in committed)
        assert fleet.wait_for_end({"c"})
        weights = read_weights(tmp_path / "checkpoints")

    assert weights == expected


@pytest.mark.rotated
def test_a_job_that_two_vms_hold_goes_on_from_copies(tmp_path: Path) -> None:
    """Its activations fit on no single VM, and its mini-batch is one micro-batch: 2x1."""
    profile = json.loads((HERE / "tiny_profile.json").read_text())
    for section in profile["microbatches"][0]["sections"]:
        section["saved_bytes"] = 40_000_000
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    settings = {
        "minibatch_size": 2,
        "profile": str(tmp_path / "profile.json"),
        "checkpoint": {"every_steps": 10**6},
        "morphing": {"debounce_s": 0.5, "recompute": False, "peer_copies": 1},
        "resources": {"min_vms": 2, "max_vms": 2},
        "local": {"zones": [{"name": "a", "slot_memory_bytes": 120_000_000}]},
    }
    with Job(tmp_path, "copied", steps=10**6, **settings) as job:
        job.pace(0.01)
        assert job.launch("--detach").code == 0
        before = job.until("copies", lambda s: s if View(s).copied_step else None)
        safety = job.run("status", job.name, "-o", "json").report["safety"]
        assert safety["copied_step"] >= View(before).copied_step
        assert safety["checkpoint_step"] == 0
        job.market("kill", machine=0)
        after = job.until(
            "the next plan",
            lambda s: s if trains(s) and View(s).tally.recoveries else None,
        )
        generation = View(after).generation
        assert generation.plan.shape == "2x1"
        assert (generation.from_step or 0) >= safety["copied_step"]
