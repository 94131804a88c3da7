"""``spottrain explain``: the chain of causes, from a journal alone."""

from __future__ import annotations

import json
from contextlib import closing
from typing import NoReturn

import pytest
from tests.builders import checkpoint_saved
from tests.unit.varuna_manager.story import (
    OFFER,
    ON_DEMAND,
    Story,
    plan_over,
)
from tests.view import View

from spottrain.cloud.port.provider import Offer
from spottrain.varuna_manager.core import allocation
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.format import duration
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.reporting.explain import chain
from spottrain.varuna_manager.reporting.explain.document import (
    explanation,
    explanation_lines,
)
from tests.commands import Run, runs


def grown() -> Story:
    """Two VMs train, two more come, and the job morphs."""
    story = Story(debounce_s=2.0).training("a", "b", steps=30)
    story.tell(e.OffersSeen, offers=(OFFER,))
    story.boot("c", "d")
    story.wait(2.0)
    story.plan("a", "b", "c", "d")
    story.stopped(31)
    return story


@pytest.fixture
def job() -> JobDir:
    job = job_dir("job")
    job.path.mkdir(parents=True)
    return job


def keep(job: JobDir, story: Story) -> None:
    with closing(Journal(job.journal)) as journal:
        journal.append(*story.steps)


def seq_that_asked(story: Story, command: type[c.Command]) -> int:
    """Return the newest event because of which a command was emitted."""
    return max(
        seq
        for seq, step in enumerate(story.steps, 1)
        if any(isinstance(one, command) for one in step.commands)
    )


def seq_of(story: Story, event: type[e.Event]) -> int:
    """Return the newest event of a kind."""
    return max(seq for seq, step in enumerate(story.steps, 1) if isinstance(step.event, event))


def test_a_vm_is_explained_by_price_rule_and_what_others_cost(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story().training("a", "b")
    keep(job, story)

    def otherwise(state: State, offer: Offer) -> NoReturn:
        raise AssertionError("it is told as it was decided")

    monkeypatch.setattr(allocation, "why_not", otherwise)
    document = explanation(job, "a")
    launch = next(x for x in document["chain"] if x["kind"] == "OffersSeen")
    told = "\n".join(launch["decided"])
    assert f"${OFFER.usd_per_hour:g}/hour" in told
    assert f"${ON_DEMAND.usd_per_hour:g}/hour: on-demand VMs are not allowed" in told
    assert "rule: " in told
    assert launch["seq"] == seq_of(story, e.OffersSeen)
    ready = document["chain"][-1]
    assert ready["what"] == "a reported: supervisor ready"


def test_a_morph_is_explained_by_both_speeds_and_what_makes_up_for_it(
    job: JobDir,
) -> None:
    story = grown()
    keep(job, story)
    choice = story.morph
    assert choice is not None
    assert choice.needed_s is not None
    plan = plan_over(("a", "b", "c", "d"))
    assert choice.shape == plan.shape
    left = next(
        seq
        for seq, step in enumerate(story.steps, 1)
        if View(step.after).plan_reason.startswith("growth")
    )
    *_, last = explanation(job, str(left))["chain"]
    told = "\n".join(last["decided"])
    assert f"{choice.present_examples_per_s:.3g} examples/s" in told
    assert f"would train {choice.new_examples_per_s:.3g}" in told
    assert "it pays: a morph costs" in told
    assert "leave generation 1 (2x1): growth: +2 slots" in told


def test_a_returned_vm_is_explained_by_the_notice(job: JobDir) -> None:
    story = Story().training("a", "b")
    story.notice("b", lead_s=100.0)
    story.wait(30.0)
    if story.plan_asked:
        story.plan()
    story.report("a", checkpoint_saved(4))
    story.stopped(4)
    keep(job, story)
    document = explanation(job, "b")
    lines = "\n".join(explanation_lines(document))
    assert f"b reported: the cloud will take it in {duration(100.0)}" in lines
    assert "leave generation 1 (2x1): notice: b" in lines
    assert "return b: drained before its preemption" in lines
    assert [x["seq"] for x in document["chain"]] == sorted(x["seq"] for x in document["chain"])


def test_an_ended_job_is_explained_by_what_ended_it(job: JobDir) -> None:
    story = Story().training("a", "b")
    story.tell(e.StopRequested, by="ann", now=True)
    keep(job, story)
    document = explanation(job, None)
    *_, last = document["chain"]
    assert last["what"] == "ann asked the job to stop"
    assert any(line.startswith("the job ends (stopped)") for line in last["decided"])


def test_causes_are_the_events_that_asked(job: JobDir) -> None:
    story = Story().training("a", "b")
    keep(job, story)
    with closing(Journal(job.journal, read_only=True)) as journal:
        plan = seq_of(story, e.PlanComputed)
        assert chain.cause(journal, plan) == seq_that_asked(story, c.ComputePlan)
        given = seq_of(story, e.VmsLaunched)
        assert chain.cause(journal, given) == seq_that_asked(story, c.LaunchVms)
        assert chain.cause(journal, 1) is None


def test_every_event_can_be_explained_and_causes_come_first(job: JobDir) -> None:
    story = grown()
    keep(job, story)
    for seq in range(1, len(story.steps) + 1):
        links = explanation(job, str(seq))["chain"]
        assert links[-1]["seq"] == seq
        assert all(x["because"] is None or x["because"] < x["seq"] for x in links)
        assert all(x["what"] for x in links)


@pytest.fixture
def run(job: JobDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    keep(job, Story().training("a", "b"))
    return runs(monkeypatch, capsys, "explain", "job")


def test_json_is_one_document_with_the_same_lines(run: Run) -> None:
    code, out, err = run("last", "-o", "json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["about"] == "last"
    code, out, _ = run("last")
    assert code == 0
    assert out.splitlines() == list(explanation_lines(document))


@pytest.mark.parametrize("about", ["99999", "0", "vm-none"])
def test_what_is_unknown_is_a_line_and_exit_2(run: Run, about: str) -> None:
    code, out, err = run(about)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert about in err
