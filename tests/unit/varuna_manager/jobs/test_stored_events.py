"""What an earlier spottrain wrote down is read as it was meant.

The examples are in ``tests/integration/stored``, whose README tells what wrote them. All
values in an example differ: one that is read and no field took is missed here.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spottrain.cloud.local.folder import LocalFolder, marker
from spottrain.cloud.port import tags
from spottrain.cloud.process import tree as processes
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.pricing.prices.history import History
from spottrain.varuna_manager.core.model.events import Event, ReportReceived
from spottrain.varuna_manager.jobs import manager_location as away
from spottrain.varuna_manager.jobs.bucket import StoredJob
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import ReplicationStatus
from spottrain.varuna_manager.jobs.identity import ensure_identity
from spottrain.varuna_manager.jobs.journal import Journal, JournalRow
from spottrain.varuna_manager.jobs.segments import segment_of, unpack
from spottrain.wire.codec import decode
from spottrain.wire.model import Profile

SHAPES = Path(__file__).parents[3] / "integration" / "stored" / "shapes"
ROWS = [
    JournalRow(*json.loads(line))
    for line in (SHAPES / "events.jsonl").read_text().splitlines()
]
VM_TOKEN = "c5e56b1053ccee5adaf09ea497d348d3b0189121796c25340931e74b009cab7e"
ADMIN_TOKEN = "1fd849baf9cc24c3c13f83005d8c2072c844e426458480e8e9d47aea721a748c"


def values(document: Any) -> Counter[str]:
    """Return every value in a document, and how often it is there."""
    match document:
        case Mapping():
            # Keys are data too where they cannot be the name of a field.
            keys = Counter(key for key in document if "-" in key)
            return sum(map(values, document.values()), keys)
        case list() | tuple():
            return sum(map(values, document), Counter())
        case _:
            return Counter([json.dumps(document)])


def lost(stored: Any, read: Any) -> Counter[str]:
    """Return the values of a stored document that are not in what was read of it."""
    return values(stored) - values(read)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all examples, to be changed at will."""
    shutil.copytree(SHAPES, tmp_path / "shapes")
    return tmp_path / "shapes"


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """The stored events, as a journal gives them."""
    return read_back(tmp_path_factory.mktemp("stored"), ROWS)


def read_back(folder: Path, rows: list[JournalRow]) -> list[Event]:
    journal = Journal(folder / "journal.sqlite")
    try:
        journal.take_over(rows)
        return [event for _, event in journal.read()]
    finally:
        journal.close()


def written(folder: Path, events: list[Event]) -> list[JournalRow]:
    journal = Journal(folder / "journal.sqlite")
    try:
        return journal.rows(1, journal.append(*events))
    finally:
        journal.close()


def test_nothing_that_an_event_says_is_lost(events: list[Event]) -> None:
    for row, event in zip(ROWS, events, strict=True):
        assert event.at_s == row.at_s
        stored = json.loads(row.body)
        stored.get("report", {}).pop("kind", None)  # the name of a class
        assert not lost(stored, asdict(event)), row.kind


def test_events_of_every_kind_are_told_apart(events: list[Event]) -> None:
    pairs = {(row.kind, type(event)) for row, event in zip(ROWS, events, strict=True)}
    assert len(pairs) == len({kind for kind, _ in pairs}) == len({x for _, x in pairs})
    assert len(pairs) == 28


def test_reports_of_every_kind_are_told_apart(events: list[Event]) -> None:
    pairs = {
        (json.loads(row.body)["report"]["kind"], type(event.report))
        for row, event in zip(ROWS, events, strict=True)
        if isinstance(event, ReportReceived)
    }
    assert len(pairs) == len({kind for kind, _ in pairs}) == len({x for _, x in pairs})
    assert len(pairs) == 17


def test_events_written_anew_are_read_as_the_same(
    tmp_path: Path, events: list[Event]
) -> None:
    rows = written(tmp_path, events)
    (tmp_path / "again").mkdir()
    assert read_back(tmp_path / "again", rows) == events


def test_a_piece_of_a_copied_journal_holds_its_events() -> None:
    (path,) = SHAPES.glob("*.jsonl.gz")
    segment = segment_of(path.name)
    assert segment is not None
    assert (segment.first, segment.last) == (1, len(ROWS))
    assert (segment.epoch, segment.level) == (3, 1)
    assert unpack(segment, path.read_bytes()) == ROWS


def test_the_local_cloud_finds_its_vms_and_settings(folder: Path) -> None:
    cloud = LocalFolder(folder)
    check(folder / "cloud.json", cloud.load())
    settings = asdict(cloud.load_settings())
    stored = json.loads((folder / "settings.json").read_text())
    stored.pop("agent_argv", None)  # agents' commands came with the settings once
    assert not lost(stored, settings)


def test_hosts_and_their_vms_are_remembered(folder: Path) -> None:
    check(folder / "ssh.json", HostMemory(folder).read())


def test_a_manager_on_a_vm_is_found(folder: Path) -> None:
    check(folder / "away.json", away.read(JobDir(folder)))
    check(folder / "vm.json", away.own_vm(JobDir(folder)))


def test_what_was_measured_and_traced_of_a_model_is_known(folder: Path) -> None:
    profile = (folder / "profile.json").read_text()
    check(folder / "profile.json", decode(Profile, profile))
    check(folder / "facts.json", JobDir(folder).facts())


def test_a_note_on_the_copy_of_a_journal_is_read(folder: Path) -> None:
    text = (folder / "copy.json").read_text()
    check(folder / "copy.json", ReplicationStatus(**json.loads(text)))


def test_who_manages_a_stored_job_is_known(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "bucket" / "job" / "abc" / "manager"
    place.mkdir(parents=True)
    shutil.copy(folder / "claim.json", place / "000003.json")
    stored = StoredJob(f"file://{tmp_path}/bucket", "abc")
    epoch, claim = stored.newest_claim()
    assert epoch == 3
    check(folder / "claim.json", claim)
    assert not stored.is_down()
    (place.parent / "down.json").write_text('{"schema_version": 1, "at_s": 1.25}')
    assert stored.is_down()


def test_prices_and_lives_of_vms_are_remembered(folder: Path) -> None:
    path = folder / "market.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript((folder / "market.sql").read_text())
    with History(path) as history:
        (price,) = history.latest()
        row = ["cloud-11", "region-12", "zone-13", "instance_type-14", True]
        assert not lost([*row, 15.25, 16.25, 17.25, "source-18"], asdict(price))
        assert history.asked_s("scope-1") == 2.25
        (exposure,) = history.exposures()
        assert exposure.place == ("cloud-1", "region-2", "zone-3", "type-4")
        assert (exposure.vm_hours, exposure.losses) == (1.5, 1)


def test_secrets_of_a_job_are_told_and_used_as_ever(tmp_path: Path) -> None:
    """Else agents of VMs that still run would not be let in."""
    identity = ensure_identity(tmp_path, ("127.0.0.1",))
    text = (tmp_path / "identity.pem").read_text()
    secret = base64.b64encode(identity.secret).decode()
    assert text.startswith(f"spottrain-secret: {secret}\n")
    known = dataclasses.replace(identity, secret=b"secret")
    assert known.vm_token("vm-1") == VM_TOKEN
    assert known.admin_token() == ADMIN_TOKEN


def test_what_is_rented_is_known_by_the_same_marks() -> None:
    """Else VMs that still run would be found by nobody."""
    assert (tags.JOB, tags.INTENT) == ("spottrain-job", "spottrain-intent")
    assert (tags.PRICE, tags.EXPIRES) == ("spottrain-usd-per-hour", "spottrain-expires")
    assert tags.MANAGER == "manager"
    assert processes.VARIABLE == "SPOTTRAIN_VM"
    assert marker("job", "vm-1") == "job/vm-1"


def check(path: Path, read: Any) -> None:
    """Check that all that a file says is in what was read of it."""
    assert not lost(json.loads(path.read_text()), asdict(read)), path.name
