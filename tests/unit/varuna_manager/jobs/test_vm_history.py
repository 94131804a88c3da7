"""Lifetimes of VMs from the journal of a job."""

from __future__ import annotations

import pytest
from tests.unit.varuna_manager.story import OFFER, Story

from spottrain.cloud.port.provider import VmState
from spottrain.eventlog.folder import home
from spottrain.pricing.prices.history import VmLife
from spottrain.pricing.prices.place import Place
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.vm_history import (
    ingest_journals,
    open_history,
    vm_lives,
)
from spottrain.wire import messages

PLACE = Place(OFFER.cloud, OFFER.region, OFFER.zone, OFFER.instance_type)


def journal(story: Story, name: str = "job") -> Journal:
    folder = home() / "jobs" / name
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "journal.sqlite")
    journal.append(*story.steps)
    return journal


def by_vm(story: Story) -> dict[str, VmLife]:
    with_events = journal(story)
    try:
        return {life.vm_id: life for life in vm_lives(with_events)}
    finally:
        with_events.close()


def gone(story: Story, *ids: str, after_s: float) -> None:
    story.now_s += after_s
    vms = tuple(
        story.listed(vm.vm_id, vm.intent, launched_at_s=vm.launched_at_s)
        if vm.vm_id not in ids
        else story.listed(
            vm.vm_id,
            vm.intent,
            launched_at_s=vm.launched_at_s,
            state=VmState.TERMINATED,
            ended_at_s=story.now_s,
        )
        for vm in story.vms.values()
    )
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=vms)


def test_lives_end_as_the_manager_saw_them_end() -> None:
    story = Story().training("a", "b", "c", "d")
    born_s = story.vm("a").launched_at_s
    story.notice("a", lead_s=30.0)
    gone(story, "a", after_s=40.0)
    gone(story, "b", "c", after_s=60.0)
    found = by_vm(story)
    assert {vm: life.ended for vm, life in found.items()} == {
        "a": "notice",
        "b": "kill",
        "c": "kill",
        "d": "",
    }
    assert found["a"].until_s == story.now_s - 60.0
    assert found["d"].until_s == story.now_s
    assert all(life.from_s == born_s and life.place == PLACE for life in found.values())
    assert all(life.spot and life.job == "uid" for life in found.values())


def test_a_vm_whose_notice_was_cancelled_was_not_taken() -> None:
    story = Story(debounce_s=60.0).training("a", "b", "c")
    for vm_id in ("a", "b", "b", "c"):
        story.notice(vm_id, lead_s=120.0)
        if vm_id != "c":
            story.report(vm_id, messages.InterruptionCancelled())
    story.notice("b", lead_s=120.0)
    ended = {vm: life.ended for vm, life in by_vm(story).items()}
    assert ended == {"a": "", "b": "notice", "c": "notice"}


def test_vms_that_we_gave_back_were_not_taken() -> None:
    story = Story().training("a", "b")
    story.now_s += 5.0
    story.tell(e.StopRequested, by="me", now=True)
    story.tell(e.VmsReturned, vm_ids=("a", "b"))
    assert {life.ended for life in by_vm(story).values()} == {"returned"}


def test_journals_are_read_once_and_again_when_they_grow() -> None:
    story = Story().training("a", "b")
    written = journal(story)
    with open_history() as history:
        assert ingest_journals(history) == ()
        before = history.exposures()
        assert ingest_journals(history) == ()
        assert history.exposures() == before
        count = len(story.steps)
        gone(story, "a", after_s=3600.0)
        written.append(*story.steps[count:])
        written.close()
        assert ingest_journals(history) == ()
        hours = before[0].vm_hours + 2.0
        (after,) = history.exposures()
    assert (after.place, after.losses) == (PLACE, 1)
    assert after.vm_hours == pytest.approx(hours)


def test_a_journal_that_cannot_be_read_is_named_and_passed_over() -> None:
    journal(Story().training("a", "b")).close()
    broken = home() / "jobs" / "broken"
    broken.mkdir()
    (broken / "journal.sqlite").write_text("no database at all, not even a bit " * 9)
    with open_history() as history:
        (warning,) = ingest_journals(history)
        assert len(history.exposures()) == 1
    assert warning.startswith("job broken: its VMs are not counted: ")
