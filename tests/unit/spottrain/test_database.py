from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from spottrain.database import SHARED, Kind, connect
from spottrain.errors import SpottrainError
from spottrain.pricing.prices.history import History
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.pool.store.journal import PoolJournal

Open = Callable[[Path], object]
KINDS: dict[Kind, Open] = {
    Kind.JOB: Journal,
    Kind.POOL: PoolJournal,
    Kind.PRICES: History,
}
READERS: list[Open] = [
    *KINDS.values(),
    lambda path: Journal(path, read_only=True),
    lambda path: PoolJournal(path, read_only=True),
]


def made(path: Path, kind: Kind) -> Path:
    file = KINDS[kind](path)
    assert isinstance(file, Journal | PoolJournal | History)
    file.close()
    return path


def change(path: Path, *pragmas: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        for pragma in pragmas:
            db.execute(f"PRAGMA {pragma}")


def refused(open_file: Open, path: Path) -> str:
    before = path.read_bytes()
    with pytest.raises(SpottrainError) as error:
        open_file(path)
    assert path.read_bytes() == before
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path, kind: Kind) -> None:
    for other in set(KINDS) - {kind}:
        path = made(tmp_path / other.name, other)
        assert "move it away" in refused(KINDS[kind], path)


@pytest.mark.parametrize("open_file", READERS)
def test_what_was_written_before_the_first_release_is_refused(
    tmp_path: Path, open_file: Open
) -> None:
    path = tmp_path / "file.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE events (seq INTEGER); PRAGMA user_version = 4;")
    assert "before 0.1.0" in refused(open_file, path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_format_is_refused(tmp_path: Path, kind: Kind) -> None:
    path = made(tmp_path / "file.sqlite", kind)
    change(path, "user_version = 2")
    assert "use the newer spottrain" in refused(KINDS[kind], path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_opened_again(tmp_path: Path, kind: Kind) -> None:
    path = made(made(tmp_path / "file.sqlite", kind), kind)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (kind,)


def test_a_file_that_other_machines_read_has_no_memory_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, schema = tmp_path / "file", "CREATE TABLE rows (number INTEGER)"
    connect(path, Kind.JOB, schema).close()
    monkeypatch.setenv(SHARED, "yes")
    shared = connect(path, Kind.JOB, schema)
    shared.execute("INSERT INTO rows VALUES (1)")
    reader = connect(path, Kind.JOB, schema, read_only=True)
    assert reader.execute("SELECT * FROM rows").fetchall() == [(1,)]
    assert not list(tmp_path.glob("*-shm"))
    for one in (shared, reader):
        one.close()
