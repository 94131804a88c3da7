"""A job that loses VMs in every way and gets others, and its manager, in one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.integration.jobs import HERE, STEPS, Answer, Job, trains, until, weights
from tests.integration.undisturbed import Undisturbed
from tests.view import View

from spottrain.cloud.port.provider import VmState
from spottrain.varuna_manager.core.model.state import State
from spottrain.wire import messages

STAGE_BYTES = 200_000
"""Too little for the whole model, enough for half of it."""
LOSS_S = 0.3
"""So that the job lasts as long as the market has something in store."""


@dataclass(frozen=True)
class Story:
    """What came of the job."""

    job: Job
    report: dict[str, Any]
    timeline: Answer
    """Of a mini-batch of the plan that has grown again."""
    planned: list[int]
    """Generations that began with a planned morph."""
    processes_left: list[int]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    zone = {"name": "a", "capacity": 4, "slot_memory_bytes": STAGE_BYTES}
    resources, local = {"max_vms": 4}, {"zones": [zone]}
    folder = tmp_path_factory.mktemp("market")
    options = {"resources": resources, "local": local, "profile": profile(folder)}
    with Job(folder, "market", **options) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        trains_on(job, "2x2", silent_losses=0)
        job.pace(LOSS_S)
        job.market("silence", machine=0)
        trains_on(job, silent_losses=1)
        job.market("capacity", zone="a", count=4)
        grown = trains_on(job, "2x2", silent_losses=1)
        timeline = job.run("timeline", job.name, "-o", "json")
        job.market("kill", machine=1)
        trains_on(job, preemptions_unnoticed=1)
        noticed = leave_by_notice(job)
        job.kill_manager()
        assert job.resume("--detach").code == 0
        job.market("capacity", zone="a", count=3)
        third = trains_on(job, after=noticed)
        job.market("capacity", zone="a", count=4)
        fourth = trains_on(job, "2x2", after=third)
        job.market("price", zone="a", usd_per_hour=0.2)
        job.until("the price", lambda state: View(state).tally.price_changes)
        job.pace(0.0)
        until("the end", lambda: not job.dir.is_managed())
        report = job.run("report", job.name, "-o", "json").report
        planned = [grown, noticed, third, fourth]
        yield Story(job, report, timeline, planned, job.left_over())


def profile(folder: Path) -> str:
    """Write that the loss takes as long as it does: no VM is replaced for its slowness."""
    said = json.loads((HERE / "tiny_profile.json").read_text())
    for one in said["microbatches"]:
        for task in ("forward_s", "recompute_s"):
            one["sections"][-1][task] += LOSS_S
    path = folder / "profile.json"
    path.write_text(json.dumps(said))
    return str(path)


def trains_on(job: Job, shape: str = "", after: int = 0, **tally: int) -> int:
    """Wait until a generation trains as described; return its number."""

    def found(state: State) -> int:
        generation = View(state).current_generation
        if generation is None or not trains(state) or generation.number <= after:
            return 0
        counts = {name: getattr(View(state).tally, name) for name in tally}
        fits = not shape or generation.plan.shape == shape
        return generation.number if fits and counts == tally else 0

    return job.until(f"training goes on: {shape} {tally}", found)


def leave_by_notice(job: Job) -> int:
    """Give notice to a VM that trains; return the generation without it."""
    generation = View(job.state()).generation
    running = [vm.vm_id for vm in job.vms() if vm.state is VmState.RUNNING]
    leaving = generation.plan.slots[0].vm_id
    job.market("notice", machine=running.index(leaving), lead_s=20.0)
    return trains_on(job, after=generation.number, preemptions_noticed=1)


def test_it_ends_as_if_nothing_had_happened(story: Story, reference: Undisturbed) -> None:
    assert story.report["state"] == "succeeded"
    assert story.report["steps_done"] == STEPS
    assert weights(story.job.checkpoint_root) == reference.weights


def test_no_minibatch_is_lost_or_computed_twice(story: Story) -> None:
    assert story.report["minibatches_lost"] == 0
    assert story.report["minibatches_recomputed"] == 0


def test_every_minibatch_is_measured_once_in_order(story: Story, reference: Undisturbed) -> None:
    assert [step for step, _ in story.job.losses()] == [*range(1, STEPS + 1)]
    assert dict(story.job.losses()) == pytest.approx(dict(reference.losses))


def test_every_interruption_is_told_with_its_cost(story: Story) -> None:
    hits = story.report["interruptions"]
    assert [hit["kind"] for hit in hits] == ["silence", "kill", "notice"]
    assert all(0 < hit["cost_s"] < 60 for hit in hits)
    counts = ("preemptions_noticed", "preemptions_unnoticed", "silent_losses")
    assert [story.report[count] for count in counts] == [1, 1, 1]
    assert story.report["price_changes"] == 1
    assert story.report["vms_launched"] == 7


def test_a_mini_batch_was_drawn_while_it_trained(story: Story) -> None:
    assert story.timeline.code == 0, story.timeline.err
    told = story.timeline.report
    assert told["generation"] == story.planned[0]
    rows = {row["stage"]: row for row in told["stages"]}
    assert list(rows) == ["0, 0", "0, 1", "1, 0", "1, 1"]
    for replica in "01":
        # Losses take time in the last stage's forwards; the first waits meanwhile.
        last, first = rows[f"{replica}, 1"], rows[f"{replica}, 0"]
        assert LOSS_S * 2 <= last["forward_s"] <= told["minibatch_s"]
        assert first["wait_s"] >= LOSS_S
        assert all(row["commit_s"] > 0 for row in (first, last))
    assert told["files"] == ["timeline.svg", "timeline.json"]
    picture = (Path(told["folder"]) / "timeline.svg").read_text()
    drawn = ElementTree.fromstring(picture).itertext()
    texts = [text.partition(":")[0] for text in drawn]
    # By titles, and where a task is wide enough by names: 2 x 2 ranks, 2 micro-batches.
    for task in ("F0", "F1", "B0", "B1"):
        assert texts.count(task) >= 4
    for kind in ("activation 0", "activation 1", "gradient 0", "gradient 1"):
        assert texts.count(kind) == 2


def test_every_second_that_was_billed_is_accounted_for(story: Story) -> None:
    seconds = dict(story.report["cost"]["vm_seconds"])
    billed_s = seconds.pop("billed")
    lived_s = sum((vm.ended_at_s or 0.0) - vm.launched_at_s for vm in story.job.vms())
    assert billed_s == pytest.approx(lived_s, abs=1e-3)
    assert sum(seconds.values()) == pytest.approx(billed_s, abs=1e-3)
    assert all(seconds[kind] > 0 for kind in ("productive", "morph", "boot", "lost"))
    assert story.report["cost"]["usd_spent"] == story.report["usd_spent"]


def test_the_manager_leaves_a_page(story: Story) -> None:
    page = story.job.dir.page.read_text()
    assert "market succeeded after" in page
    assert "without notice" in page
    assert str(story.job.dir.page) in story.job.dir.log.read_text()


def test_every_plan_is_told_with_its_reason(story: Story) -> None:
    plans = story.report["plans"]
    shapes = [(p["pipeline_depth"], p["data_parallel_width"]) for p in plans]
    assert shapes[0] == (2, 2)
    assert len(plans) == 7
    assert min(depth for depth, _ in shapes) >= 2
    words = ["start", "silent", "growth", "", "notice", "growth", "growth"]
    for plan, word in zip(plans, words, strict=True):
        assert word in plan["reason"]
    steps = [plan["from_step"] for plan in plans]
    assert steps == sorted(steps)
    assert all(plan["reason"] for plan in plans)


def test_a_planned_morph_opens_no_checkpoint(story: Story) -> None:
    started = story.job.reports(messages.GenerationStarted)
    loaded = {report.generation: report.sections_loaded for _, report in started}
    assert loaded.pop(1) > 0
    assert set(loaded.values()) == {0}


def test_survivors_of_a_planned_morph_keep_their_pid(story: Story) -> None:
    pids: dict[int, dict[str, int]] = {}
    for vm_id, report in story.job.reports(messages.GenerationStarted):
        pids.setdefault(report.generation, {})[vm_id] = report.pid
    for number in story.planned:
        before, now = pids[number - 1], pids[number]
        both = before.keys() & now.keys()
        assert both
        assert {vm: before[vm] for vm in both} == {vm: now[vm] for vm in both}


def test_nothing_is_left_of_it(story: Story) -> None:
    assert story.processes_left == []
    assert {vm.state for vm in story.job.vms()} == {VmState.TERMINATED}
