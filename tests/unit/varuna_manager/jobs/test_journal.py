from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_plan, a_spec, minibatch_committed, model_facts
from tests.journals import noted
from tests.tiers import costly

from spottrain.codec import SCHEMA_VERSION, hints
from spottrain.eventlog.journal import JournalError, JournalWriteError
from spottrain.pricing.deadline.model import Fleet
from spottrain.varuna_manager.config.sections import (
    BudgetConfig,
    ManagerConfig,
    MorphingConfig,
    NonFiniteConfig,
    ResourcesConfig,
)
from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model.events import (
    EVENT_TYPES,
    Event,
    JobSubmitted,
    ManagerStarted,
    ReportReceived,
    StopRequested,
    TimerFired,
    VmSilent,
)
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import ModelFacts, Profile
from spottrain.wire.plan import Plan


def submitted() -> JobSubmitted:
    spec = a_spec(
        minibatch_size=4,
        reduction="exact",
        checkpoint_path="/tmp/none",
        checkpoint_every_steps=5,
    )
    job = JobSettings(uid="u", spec=spec, facts=model_facts())
    return JobSubmitted(at_s=1.0, settings=job)


def report(loss: float, number: int = 0) -> ReportReceived:
    committed = minibatch_committed(number + 1, sections=(0, 1), loss=loss)
    return ReportReceived(at_s=2.0, vm_id="vm", number=number, report=committed)


def events_of(path: Path) -> list[Event]:
    journal = Journal(path, read_only=True)
    try:
        return [event for _, event in journal.read()]
    finally:
        journal.close()


@pytest.mark.parametrize("kind", sorted(EVENT_TYPES))
@given(data=st.data())
@costly
def test_every_event_is_read_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    st.register_type_strategy(float, st.floats(allow_nan=False))
    st.register_type_strategy(str, st.text(st.characters(codec="utf-8"), max_size=8))
    st.register_type_strategy(Plan, st.just(PLAN))
    st.register_type_strategy(Fleet, st.just(FLEET))
    for cls in (JobSpec, ModelFacts, Profile):
        one = st.builds(cls, schema_version=st.just(SCHEMA_VERSION))
        st.register_type_strategy(cls, one)
    for section in SECTIONS:
        values = {name: st.from_type(hints(section)[name]) for name in section.model_fields}
        st.register_type_strategy(section, st.builds(section.model_construct, **values))
    event: Any = data.draw(st.builds(EVENT_TYPES[kind]))
    path = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    journal = Journal(path)
    journal.append(*noted(event))
    journal.close()
    assert events_of(path) == [event]


SECTIONS = (
    *(ResourcesConfig, BudgetConfig, MorphingConfig),
    *(ManagerConfig, NonFiniteConfig),
)
FLEET = Fleet(examples_per_s=(0.0, 1.0, 1.75))
PLAN = a_plan(microbatch_size=2, num_sections=2, virtual_nodes=2)


def test_numbers_count_on_and_reading_can_begin_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    events = [VmSilent(at_s=float(i), vm_id=f"vm-{i}") for i in range(2500)]
    assert journal.append(*noted(*events[:3])) == 3
    assert journal.append(*noted(*events[3:])) == 2500
    assert journal.append() == 2500
    assert [e for _, e in journal.read()] == events
    assert next(iter(journal.read(2000))) == (2001, events[2000])
    journal.close()


def test_replay_is_the_fold_of_all_events(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    events: list[Event] = [
        submitted(),
        ManagerStarted(at_s=2.0, software_version="1", pid=1),
        TimerFired(at_s=3.0),
        StopRequested(at_s=4.0, by="me"),
    ]
    state = journal.record(*events[:2])
    for event in events[2:]:
        state, _ = step.step(state, event)
        assert journal.record(event) == state
    assert journal.replay() == state
    journal.close()


def test_a_reader_sees_what_the_writer_adds(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    writer = Journal(path)
    reader = Journal(path, read_only=True)
    assert list(reader.read()) == []
    writer.append(*noted(TimerFired(at_s=1.0)))
    assert list(reader.read()) == [(1, TimerFired(at_s=1.0))]
    writer.append(*noted(TimerFired(at_s=2.0)))
    assert list(reader.read(1)) == [(2, TimerFired(at_s=2.0))]
    writer.close()
    reader.close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    reader = Journal(path, read_only=True)
    with pytest.raises(JournalError, match="readonly"):
        reader.append(*noted(TimerFired(at_s=1.0)))
    reader.close()


def test_what_was_appended_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    code = f"""if True:
        import os, signal
        from pathlib import Path
        from spottrain.varuna_manager.core.model.events import TimerFired
        from spottrain.varuna_manager.jobs.journal import Journal
        from tests.journals import noted
        journal = Journal(Path({str(path)!r}))
        for i in range(100):
            journal.append(*noted(TimerFired(at_s=float(i))))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9
    journal = Journal(path)
    assert [e.at_s for _, e in journal.read()] == list(range(100))
    journal.close()


def test_losses_that_are_no_numbers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.append(*noted(report(math.inf, 0), report(-math.inf, 1), report(math.nan, 2)))
    journal.close()
    losses = [e.report.loss for e in _reports(path)]
    assert losses[:2] == [math.inf, -math.inf]
    assert math.isnan(losses[2])


def _reports(path: Path) -> list[Any]:
    return [e for e in events_of(path) if isinstance(e, ReportReceived)]


def test_text_that_is_not_unicode_is_kept_readable(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    odd = messages.UserCodeFailed(message="file \udcff", traceback="ö\n'\"")
    journal.append(*noted(ReportReceived(at_s=1.0, vm_id="vm", number=0, report=odd)))
    journal.close()
    kept = _reports(path)[0].report
    assert (kept.message, kept.traceback) == ("file ?", "ö\n'\"")


def test_missing_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        Journal(tmp_path / "journal.sqlite", read_only=True)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_of_junk_is_named_with_what_to_do(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"junk" * 4096)
    with pytest.raises(JournalError, match=r"damaged.*spottrain down") as caught:
        Journal(path, read_only=read_only)
    assert "\n" not in str(caught.value)


def test_damaged_pages_are_found_before_anything_is_decided(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.append(*noted(*(report(float(i), i) for i in range(1000))))
    journal.close()
    content = bytearray(path.read_bytes())
    content[8192:16384] = b"\xff" * 8192
    path.write_bytes(content)
    with pytest.raises(JournalError, match="damaged") as caught:
        Journal(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE events SET kind = 'Surprise'",
        "UPDATE events SET body = '{}'",
        "UPDATE events SET body = 'no json'",
    ],
)
def test_an_event_that_makes_no_sense_is_named_by_its_number(tmp_path: Path, change: str) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.append(*noted(TimerFired(at_s=1.0)))
    journal.close()
    with sqlite3.connect(path) as db:
        db.execute(change)
    db.close()
    with pytest.raises(JournalError, match="event 1 is no"):
        events_of(path)


def test_a_refused_append_adds_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(JournalWriteError, match="locked"):
            journal.append(*noted(TimerFired(at_s=1.0), TimerFired(at_s=2.0)))
        other.execute("ROLLBACK")
    other.close()
    assert journal.append(*noted(TimerFired(at_s=3.0))) == 1
    journal.close()


def test_every_event_carries_its_time() -> None:
    for cls in EVENT_TYPES.values():
        assert "at_s" in {field.name for field in fields(cls)}
