"""What starts of VMs took: gathered from events, shown by report and status."""

from __future__ import annotations

import io
import statistics
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.varuna_manager.story import Story

from spottrain.cloud.port.provider import StartStep
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.reporting import documents, tables
from spottrain.varuna_manager.reporting.history import JobHistory
from spottrain.varuna_manager.watch.starts import (
    MILESTONES,
    StartRow,
    VmStarts,
    start_rows,
    start_view,
)

SENT = (
    StartStep(name="boot", seconds=40.0),
    StartStep(name="software", seconds=3.0, num_bytes=6_000_000, source="manager"),
    StartStep(name="setup", seconds=100.0, num_bytes=3_000_000_000),
)
SHARED = (
    StartStep(name="boot", seconds=40.0),
    StartStep(name="software", seconds=1.0, num_bytes=6_000_000, source="10.0.0.1:30000"),
    StartStep(name="packages", seconds=12.0, num_bytes=3_000_000_000, source="bucket"),
    StartStep(name="setup", seconds=20.0),
)


def history_of(story: Story) -> JobHistory:
    history = JobHistory()
    for step in story.steps:
        history.note(step.before, step.event, step.after)
    return history


def launched(story: Story, steps: dict[str, tuple[StartStep, ...]]) -> None:
    """Launch VMs at this moment, whose agents start a minute later; then they train."""
    (intent,) = story.intents
    vms = tuple(story.listed(vm_id, intent) for vm_id in steps)
    story.tell(e.VmsLaunched, intent=intent, vms=vms)
    story.now_s += 60.0
    for vm_id, taken in steps.items():
        story.tell(e.AgentStarted, vm_id=vm_id, steps=taken)
    story.now_s += 5.0
    for vm_id in steps:
        story.ready(vm_id)


def trained() -> Story:
    """A job of two VMs, of which the first began alone."""
    story = Story()
    story.start()
    launched(story, {"a": SENT, "b": SHARED})
    story.prepare()
    story.plan("a", "b")
    story.open()
    story.begin(0)
    return story


def test_a_start_lasts_until_the_first_mini_batch_that_the_vm_took_part_in() -> None:
    story = trained()
    launched_at_s = story.vm("a").launched_at_s
    assert [one["first_step_s"] for one in views(story)] == [None, None]
    story.now_s += 7.0
    story.commit(1)
    first_step_s = story.now_s - launched_at_s
    story.now_s += 1.0
    story.commit(2)
    for one in views(story):
        assert one["agent_s"] == 60.0
        assert one["ready_s"] == 65.0
        assert one["first_step_s"] == first_step_s


def views(story: Story) -> list[dict[str, Any]]:
    report = documents.report(story.state, history_of(story), True, story.now_s)
    starts: list[dict[str, Any]] = report["starts"]
    return starts


def test_a_vm_that_is_lost_before_it_trains_has_no_first_step() -> None:
    story = trained()
    story.tell(e.VmLost, vm_id="b", reason="gone")
    story.broken("a")
    starts = {one["vm_id"]: one for one in views(story)}
    assert starts["b"]["first_step_s"] is None
    assert starts["b"]["ready_s"] == 65.0


def test_an_agent_that_is_started_again_keeps_the_first_start() -> None:
    story = trained()
    story.tell(e.AgentStarted, vm_id="a", steps=(StartStep(name="agent", seconds=1.0),))
    assert [step["name"] for step in views(story)[0]["steps"]] == [step.name for step in SENT]


def test_status_has_the_steps_of_each_vm() -> None:
    story = trained()
    status = documents.status(story.state, True, story.now_s)
    by_vm = {vm["vm_id"]: vm["start"] for vm in status["fleet"]}
    assert by_vm["b"] == [
        {"name": "boot", "seconds": 40.0, "num_bytes": 0, "source": ""},
        {
            "name": "software",
            "seconds": 1.0,
            "num_bytes": 6_000_000,
            "source": "10.0.0.1:30000",
        },
        {
            "name": "packages",
            "seconds": 12.0,
            "num_bytes": 3_000_000_000,
            "source": "bucket",
        },
        {"name": "setup", "seconds": 20.0, "num_bytes": 0, "source": ""},
    ]


def test_the_report_compares_the_first_vm_with_later_ones() -> None:
    story = trained()
    story.now_s += 7.0
    story.commit(1)
    report = documents.report(story.state, history_of(story), True, story.now_s)
    console = Console(file=io.StringIO(), width=200)
    for table in tables.summary(report):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    rows = {line.split("  ")[0].strip("│ "): line for line in lines}
    assert "3.0 GB" in rows["packages"]
    assert "bucket" in rows["packages"]
    assert "another VM" in rows["software"]
    assert "1 min 40 s" in rows["setup"]
    assert "20 s" in rows["setup"]
    assert all(name in rows for name in MILESTONES)


def test_a_job_without_starts_has_no_rows() -> None:
    assert start_rows([]) == []


_STEPS = st.lists(
    st.builds(
        StartStep,
        name=st.sampled_from(["boot", "software", "setup"]),
        seconds=st.floats(0.0, 1e4),
        num_bytes=st.integers(0, 10**10),
        source=st.sampled_from(["", "manager", "bucket", "10.0.0.2:30000"]),
    ),
    unique_by=lambda step: step.name,
    max_size=3,
)


@given(st.lists(_STEPS, min_size=1, max_size=5))
def test_each_step_has_one_row_with_the_median_of_later_vms(
    taken: list[list[StartStep]],
) -> None:
    starts = [
        {
            "steps": [
                {
                    "name": step.name,
                    "seconds": step.seconds,
                    "num_bytes": step.num_bytes,
                    "source": step.source,
                }
                for step in steps
            ],
            "agent_s": 1.0,
            "ready_s": None,
            "first_step_s": None,
        }
        for steps in taken
    ]
    rows = start_rows(starts)
    names = [row.name for row in rows]
    assert sorted(names[: -len(MILESTONES)]) == sorted(
        {step.name for steps in taken for step in steps}
    )
    assert tuple(names[-len(MILESTONES) :]) == MILESTONES
    for row in rows[: -len(MILESTONES)]:
        first = [step for step in taken[0] if step.name == row.name]
        later = [s for steps in taken[1:] for s in steps if s.name == row.name]
        assert row.first_s == (first[0].seconds if first else None)
        assert row.first_bytes == (first[0].num_bytes if first else 0)
        if later:
            assert row.later_s == statistics.median(step.seconds for step in later)
        else:
            assert row == replace(row, later_s=None, later_bytes=0, later_source="")
    assert rows[-1] == StartRow(MILESTONES[-1], None, None)


def test_views_count_from_the_launch() -> None:
    story = trained()
    starts = VmStarts()
    for step in story.steps:
        starts.note(step.before, step.event, step.after)
    one = starts.by_vm["a"]
    assert start_view(one)["agent_s"] == one.started_at_s - one.launched_at_s
