"""What a job computes on, in one line."""

from __future__ import annotations

from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.gpus import facts
from tests.unit.varuna_manager.story import PROFILE, Story
from tests.view import changed

from spottrain.varuna_manager.core.model.events import VmsLaunched
from spottrain.varuna_manager.reporting import documents
from spottrain.varuna_manager.reporting.devices import (
    UNKNOWN,
    Computing,
    computes_on,
    describe,
)
from spottrain.varuna_manager.reporting.history import JobHistory
from spottrain.wire import messages

CPU = "AMD EPYC 9R14, 1 thread"
GPU = "NVIDIA A10G"


def test_a_job_without_vms_computes_on_nothing_yet() -> None:
    story = Story()
    assert computes_on(story.state) == UNKNOWN


def test_gpus_are_counted_once_however_many_workers_share_them() -> None:
    story = Story(max_vms=3)
    story.start()
    (intent,) = story.intents
    vms = tuple(story.listed(vm_id, intent) for vm_id in "abc")
    story.tell(VmsLaunched, intent=intent, vms=vms)
    for vm_id, gpus in (
        ("a", (facts(0), facts(1))),
        ("b", (facts(1),)),
        ("c", ()),
    ):
        ready = messages.SupervisorReady(
            num_slots=2,
            torch_version="2",
            device=GPU if gpus else CPU,
            gpus=gpus,
        )
        story.report(vm_id, ready)
    line = f"4 workers on 2 x {GPU} (GPU) and CPUs: AMD EPYC 9R14, 1 thread each, fp32"
    assert computes_on(story.state) == line
    status = documents.status(story.state, True, story.now_s)
    assert status["computes_on"] == line
    assert status["fleet"][0]["gpus"] == [asdict(facts(0)), asdict(facts(1))]
    report = documents.report(story.state, JobHistory(), True, story.now_s)
    assert report["computes_on"] == line


def test_once_all_vms_are_gone_the_profile_tells() -> None:
    story = Story()
    profile = replace(PROFILE, device=CPU)
    story.state = changed(story.state, profile=profile)
    assert computes_on(story.state) == "CPUs: AMD EPYC 9R14, 1 thread each, fp32"
    story.state = changed(story.state, profile=replace(profile, device=GPU))
    assert computes_on(story.state) == f"{GPU} (GPU), fp32"


@given(st.integers(1, 64), st.integers(0, 64))
def test_gpus_and_cpus_are_never_confused(workers: int, gpus: int) -> None:
    name = GPU if gpus else CPU
    line = describe({name: Computing(workers=workers, gpus=gpus)}, "bf16")
    assert ("(GPU)" in line) == bool(gpus)
    assert ("CPUs" in line) == (not gpus)
    assert line.endswith(", bf16")
    assert ("workers on" in line) == (0 < gpus < workers)
