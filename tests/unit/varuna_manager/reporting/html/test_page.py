"""The report as one page: whole, safe, small."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.unit.varuna_manager.measured_jobs import evaluated, store, trained
from tests.unit.varuna_manager.reporting.test_history import past_of
from tests.unit.varuna_manager.story import OFFER, SPEC, Story
from tests.view import changed

from spottrain.pricing.billing.ledger import Ledger
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.commands import Outcome
from spottrain.varuna_manager.core.model.records import (
    GenerationSummary,
    Interruption,
    Progress,
)
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.reporting import documents
from spottrain.varuna_manager.reporting.history import JobHistory, PriceSeries
from spottrain.varuna_manager.reporting.html.curves import read_curves
from spottrain.varuna_manager.reporting.html.page import (
    PageError,
    comparison,
    page,
    write_page,
)

EVIL = "<script>alert('\"&')</script>"
VOID = {"meta"}


class Structure(HTMLParser):
    """Checks that elements close, and collects what is in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]
        assert not [k for k, _ in attrs if k.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def page_of(state: State, history: JobHistory) -> str:
    report = documents.report(state, history, False, state.now_s)
    return page(report, state, history, read_curves(store()))


def eventful() -> Story:
    """A job that lost a VM, had a notice, and was stopped."""
    story = Story(max_usd=50.0).training("a", "b", "c", "d", steps=20)
    story.tell(e.OffersSeen, offers=(replace(OFFER, usd_per_hour=2.0),))
    story.now_s += 0.4
    story.tell(e.VmLost, vm_id="d", reason="gone")
    story.tell(e.LaunchRefused, intent="intent-1", reason="none", refusal="no_capacity")
    story.broken("a", "b", "c")
    story.plan("a", "b")
    story.open()
    story.begin(20)
    story.now_s += 1.0
    story.commit(21)
    story.notice("c", lead_s=30.0)
    story.tell(e.StopRequested, by="ada", now=True)
    story.tell(e.VmsReturned, vm_ids=("a", "b", "c"))
    assert story.state.phase is JobPhase.ENDED
    return story


def test_the_page_begins_with_a_summary() -> None:
    story = eventful()
    words = Structure(page_of(story.state, past_of(story))).words
    for part in (
        "job was stopped after",
        "stopped by ada. It trained 21 of 100 mini-batches.",
        "of a budget of $50.00",
        "on demand would have cost",
        "4 VMs were rented; 1 preempted with notice, 1 preempted without notice.",
        "2 plans ran; 0 mini-batches were lost, 0 were recomputed.",
        "of the rented time was productive",
    ):
        assert part in words


def test_the_page_needs_nothing_and_runs_nothing() -> None:
    story = eventful()
    text = page_of(story.state, past_of(story))
    found = Structure(text)
    assert found.links == []
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text


def test_every_picture_is_told_to_those_who_cannot_see_it_and_keeps_its_bounds() -> None:
    story = eventful()
    text = page_of(story.state, past_of(story))
    drawn = [
        ElementTree.fromstring(svg)
        for svg in re.findall(r'<svg role="img".*?</svg>', text, re.DOTALL)
    ]
    titles = [svg.findtext("title") for svg in drawn]
    assert titles == ["Throughput", "Plans", "VMs", "Prices", "Money", "Events"]
    for svg in drawn:
        assert len(svg.findtext("desc") or "") > 20
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for element in svg.iter("text"):
            assert 0 <= float(element.attrib["x"]) <= width
            assert 0 <= float(element.attrib["y"]) <= height
        for element in svg.iter("path"):
            for x in re.findall(r"[MHL]([-\d.]+)", element.attrib["d"]):
                assert 0 <= float(x) <= width
    hover = [t.text or "" for t in drawn[-1].iter("title")][1:]
    assert any("d: gone" in words for words in hover)
    assert any("new plan" in words for words in hover)


def test_no_text_of_others_gets_into_the_page_as_markup() -> None:
    offer = replace(OFFER, zone=EVIL, instance_type=EVIL, cloud=EVIL)
    ledger = Ledger().opened(
        EVIL, offer, on_demand_usd_per_hour=3.0, launched_at_s=1000.0, seen_at_s=1000.0
    )
    story = Story(spec=replace(SPEC, name=EVIL))
    history = past_of(story)
    history.prices["evil"] = PriceSeries(offer, [(1000.0, 1.0)])
    summary = GenerationSummary(
        generation=1,
        pipeline_depth=1,
        data_parallel_width=1,
        num_slots=1,
        from_step=0,
        to_step=5,
        reason=EVIL,
        predicted_step_s=0.0,
        measured_step_s=None,
        started_at_s=1000.0,
        ended_at_s=1010.0,
    )
    hit = Interruption(interruption="kill", vm_id=EVIL, at_s=1005.0, reason=EVIL, generation=1)
    state = replace(
        story.state,
        phase=JobPhase.ENDED,
        now_s=1010.0,
        outcome=Outcome(kind="failed", exit_code=3, reason=EVIL),
    )
    state = changed(state, ledger=ledger, generations=(summary,), interruptions=(hit,))
    text = page_of(state, history)
    found = Structure(text)
    assert "script" not in found.tags
    assert EVIL not in text
    assert found.words.count(EVIL) >= 8


def test_a_job_that_has_just_begun_has_a_page() -> None:
    story = Story()
    Structure(page_of(story.state, past_of(story)))


def long_job() -> tuple[State, JobHistory]:
    """11 hours, 100,000 mini-batches, 300 VMs, a thousand plans and interruptions."""
    story = Story(spec=replace(SPEC, steps=100_000), max_usd=100.0)
    hours_s, count = 11 * 3600.0, 1000
    history = past_of(story)
    for step in range(100_000):
        begun_s = 1000.0 + step * hours_s / 100_000
        history.throughput.add(begun_s, begun_s + 0.39, 8.0 / (0.39 + step % 7 / 100))
    ledger, offers = Ledger(), []
    for number in range(300):
        offer = replace(OFFER, zone=f"zone-{number % 9}")
        begun_s = 1000.0 + number * hours_s / 300
        ledger = ledger.opened(
            f"vm-{number}", offer, on_demand_usd_per_hour=3.0,
            launched_at_s=begun_s, seen_at_s=begun_s,
        ).ended(f"vm-{number}", begun_s + 4000.0)  # fmt: skip
        offers.append(offer)
    for number in range(9):
        points = [(1000.0 + i * 10.0, 1.0 + i * number % 13 / 10) for i in range(3960)]
        history.prices[f"{number}"] = PriceSeries(offers[number], points)
    history.checkpoints = [(1000.0 + i * 20.0, 50.0 * i) for i in range(1900)]
    plans, hits = plans_and_hits(count, hours_s / count)
    state = replace(story.state, phase=JobPhase.ENDED, now_s=1000.0 + hours_s, outcome=Outcome(kind="succeeded", exit_code=0, reason="100000 steps done"))  # fmt: skip
    progress = Progress(step=100_000, highest_step=100_000)
    return changed(state, ledger=ledger, generations=plans, interruptions=hits, progress=progress), history  # fmt: skip


def plans_and_hits(
    count: int, each_s: float
) -> tuple[tuple[GenerationSummary, ...], tuple[Interruption, ...]]:
    plans = tuple(
        GenerationSummary(
            generation=i, pipeline_depth=2 + i % 5, data_parallel_width=1 + i % 4,
            num_slots=8, from_step=i * 100, to_step=i * 100 + 100,
            reason="killed without notice, and then some more words " * 2,
            predicted_step_s=0.39, predicted_max_s=0.5 if i % 2 else None, measured_step_s=0.4,
            started_at_s=1000.0 + i * each_s, ended_at_s=1000.0 + (i + 1) * each_s,
        )
        for i in range(count)
    )  # fmt: skip
    hits = tuple(
        Interruption(
            interruption="kill", vm_id=f"vm-{i}", at_s=1000.0 + i * each_s,
            reason="killed without notice", generation=i, cost_s=3.0,
        )
        for i in range(count)
    )  # fmt: skip
    return plans, hits


def test_a_very_long_job_has_a_page_of_less_than_two_megabytes() -> None:
    state, history = long_job()
    text = page_of(state, history)
    Structure(text)
    assert len(text.encode()) < 2_000_000
    assert "predicted 390 ms to 500 ms" in text


def test_the_page_is_written_whole_or_an_error_says_why(tmp_path: Path) -> None:
    story = eventful()
    history = past_of(story)
    report: dict[str, Any] = documents.report(story.state, history, False, 0.0)
    file = tmp_path / "report.html"
    html = page(report, story.state, history, read_curves(store()))
    write_page(file, html)
    assert file.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(PageError, match=r"x\.html: cannot write the report: .*; name"):
        write_page(tmp_path / "nowhere" / "x.html", html)


@pytest.mark.rotated
def test_very_many_mini_batches_have_small_curves_first_on_the_page() -> None:
    story, measurements = eventful(), store()
    rows = (
        trained(1, step, loss=3.0 + 1 / step, learning_rate=1 / step) for step in range(1, 20_001)
    )
    measurements.write(rows)
    measurements.write(evaluated(1, step, "dev") for step in range(0, 20_001, 100))
    history = past_of(story)
    report = documents.report(story.state, history, False, story.state.now_s)
    text = page(report, story.state, history, read_curves(measurements))
    found = Structure(text)
    assert len(text.encode()) < 200_000
    assert text.index("<b>Loss</b>") < text.index("<b>Throughput</b>")
    for name in ("Gradient norm", "Learning rate", "training", "dev", "2,500"):
        assert name in found.words
    for svg in re.findall(r"<svg role.*?</svg>", text):
        ElementTree.fromstring(svg)


def test_several_jobs_are_overlaid_on_one_page() -> None:
    story, jobs = eventful(), []
    history = past_of(story)
    report = documents.report(story.state, history, False, story.state.now_s)
    for name in ("first", EVIL, "alone"):
        measurements = store()
        measurements.write(trained(1, step) for step in range(1, 2 + 5 * (name != "alone")))
        measurements.write([evaluated(1, 1, "dev")])
        jobs.append(({**report, "name": name}, read_curves(measurements)))
    text = comparison(jobs)
    found = Structure(text)
    assert "script" not in found.tags
    assert text.count('class="line c2"') >= 3
    for part in ("Training loss", "Held-out loss", "first: dev", EVIL, "21 of 100"):
        assert part in found.words
