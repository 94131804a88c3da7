"""The measurements of a job: one row for every mini-batch of its final history.

They lie in an SQLite file of their own, and are written before the events that they came
with. What the rows hold follows from the reports alone, in whatever order they arrive and
however often:

- A mini-batch of generation g is on the line that the weights took unless a later
  generation, which has committed something or is the newest, began below it.
- Of several reports of a mini-batch on the line the first one counts.

A generation that began lower and broke before it committed anything changed nothing: the
next one may begin above it. So rows above the beginning of the newest generation are
hidden, and deleted when it commits.

Positions order all rows: a mini-batch has twice its step, the evaluations after it one
more. A reader that follows the rows is told from which position on they have changed
other than by rows added at the end.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spottrain import database
from spottrain.database import Kind
from spottrain.eventlog.journal import translating_errors

SCHEMA = """
    CREATE TABLE minibatches (
        step INTEGER PRIMARY KEY,
        generation INTEGER NOT NULL,
        at_s REAL NOT NULL,
        loss REAL,
        grad_norm REAL,
        weight REAL NOT NULL,
        learning_rate REAL,
        metrics TEXT NOT NULL,
        step_s REAL,
        examples INTEGER NOT NULL,
        plan TEXT NOT NULL,
        usd_spent REAL NOT NULL,
        skipped TEXT NOT NULL
    ) STRICT;
    CREATE TABLE evaluations (
        step INTEGER NOT NULL,
        name TEXT NOT NULL,
        generation INTEGER NOT NULL,
        at_s REAL NOT NULL,
        loss REAL,
        metrics TEXT NOT NULL,
        is_best INTEGER NOT NULL,
        PRIMARY KEY (step, name)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE generations (
        number INTEGER PRIMARY KEY,
        step INTEGER NOT NULL,
        committed INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE rewrites (
        id INTEGER PRIMARY KEY,
        position INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE pending (
        first INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        PRIMARY KEY (first, epoch)
    ) STRICT
"""
"""``pending`` are the ``blocks`` of the copy of a job that was taken over which are not here
yet. SQLite keeps NaN as NULL."""

_ROW = (
    "step, generation, at_s, loss, grad_norm, weight, learning_rate, metrics, step_s, "
    "examples, plan, usd_spent, skipped"
)
_EVALUATION = "step, name, generation, at_s, loss, metrics, is_best"
_END = 1 << 62
_WHAT = "file of measurements"
_REMEDY = (
    "move it away: the job trains on without its past measurements, and 'spottrain resume' "
    "begins a new one"
)
_PAGE = 1000
"""Rows that are read at once."""
_LARGEST = 1 << 60
"""Of steps and generations; SQLite stores 64 bits."""
MEDIAN_OF = 2000
"""Mini-batches whose times are sorted for a generation's median."""

STEPS = 4096
"""Of a block."""
_BLOCK = re.compile(r"(\d{12})-(\d{6})\.json\.gz")


class Block(NamedTuple):
    """A file of mini-batches in the copy of a journal: the rows of ``STEPS`` steps.

    They cannot be derived from the events. What is here makes the same of rows in whatever
    order and however often they come, so blocks need no fencing: where managers of
    different epochs wrote one, both are read, the newer first.
    """

    first: int
    """Its first step, a multiple of ``STEPS``."""
    epoch: int
    """Of the manager that wrote it."""

    @property
    def name(self) -> str:
        """Name of the file; names sort by steps."""
        return f"{self.first:012d}-{self.epoch:06d}.json.gz"


def block_of(name: str) -> Block | None:
    """Return the block that a file name denotes; None for other files."""
    match = _BLOCK.fullmatch(name)
    return None if match is None else Block(*map(int, match.groups()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBegan:
    """A generation trains on from the weights after ``step`` mini-batches."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """A committed mini-batch; numbers that were not finite are NaN."""

    step: int
    generation: int
    at_s: float
    """When it was reported, seconds since the epoch."""
    loss: float
    grad_norm: float
    weight: float = 0.0
    """Sum of the loss's weights; 0: not reported, or not a number."""
    learning_rate: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_s: float | None = None
    """``None``: survivors have brought it to its end, whoever measured it is gone."""
    examples: int
    plan: str
    """Pipeline depth x data-parallel width; empty: unknown."""
    usd_spent: float
    """By the job until then."""
    skipped: str = ""
    """As in ``wire.messages``."""

    @property
    def position(self) -> int:
        """See the module."""
        return 2 * self.step

    @property
    def examples_per_s(self) -> float | None:
        """Measured speed of this mini-batch."""
        return self.examples / self.step_s if self.step_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed in units of the loss's weight, if that is not the number of examples."""
        if not self.step_s or self.weight in (0.0, float(self.examples)):
            return None
        return self.weight / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Loss and metrics of a held-out set after ``step`` mini-batches."""

    step: int
    name: str
    """Of the set."""
    generation: int
    at_s: float
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_best: bool = False

    @property
    def position(self) -> int:
        """See the module."""
        return 2 * self.step + 1


Sample = GenerationBegan | Minibatch | Evaluation
"""What the store is fed with."""
Row = Minibatch | Evaluation


class Cursor(NamedTuple):
    """How far a follower has read."""

    rewrite: int = 0
    """Number of the newest rewrite that it has taken into account."""
    position: int = -1
    """Of the last row."""


class Page(NamedTuple):
    """The rows that follow a cursor."""

    rows: list[Row]
    """In order of position."""
    rewound_to: int | None
    """Rows from this position on are to be dropped first: they have changed."""
    cursor: Cursor
    """Where to read on."""


class CurvePoint(NamedTuple):
    """Some neighbouring rows, as one point of a curve."""

    step: float
    mean: float
    low: float
    high: float


class Measurements:
    """The measurements of one job. Errors in reading are those of ``sqlite3``.

    Args:
        path: The SQLite file.
        read_only: Only read, while another process may write; the file must exist.

    Raises:
        JournalError: The file cannot be opened, is damaged or of another format.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._is_filling = False
        with translating_errors(path, _REMEDY, _WHAT):
            self._db = database.connect(path, Kind.MEASUREMENTS, SCHEMA, read_only=read_only)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with translating_errors(self._path, _REMEDY, _WHAT), database.transaction(self._db):
            yield

    # --- Writing --------------------------------------------------------------------------

    def write(self, samples: Iterable[Sample]) -> None:
        """Add samples, all or none; they are durable when this returns.

        What no worker of ours reports is left out: it must not end the manager.

        Raises:
            JournalWriteError: The disk refused; nothing was added.
        """
        with self._transaction():
            self._add(samples)

    def _add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if not all(0 <= n <= _LARGEST for n in (sample.generation, sample.step)):
                continue
            match sample:
                case GenerationBegan():
                    self._begin(sample)
                case Minibatch():
                    self._add_minibatch(sample)
                case Evaluation():
                    self._add_evaluation(sample)

    def await_blocks(self, blocks: Iterable[Block]) -> None:
        """Note which blocks are still to come.

        Args:
            blocks: Those of the copy.

        Raises:
            JournalWriteError: The disk refused.
        """
        with self._transaction():
            self._db.executemany("INSERT INTO pending VALUES (?, ?)", blocks)

    def pending(self) -> list[Block]:
        """Return the blocks that are still to come, the newest first."""
        rows = self._db.execute("SELECT first, epoch FROM pending ORDER BY first DESC, epoch DESC")
        return [Block(*row) for row in rows]

    def fill(self, samples: Sequence[Sample], arrived: Block | None = None) -> None:
        """Add samples of the past.

        Args:
            samples: Of a block.
            arrived: The block of which they are the last ones. After the last block
                followers read everything again.

        Raises:
            JournalWriteError: The disk refused; nothing was added.
        """
        with self._transaction():
            self._is_filling = True
            try:
                self._add(samples)
            finally:
                self._is_filling = False
            if arrived is not None:
                self._db.execute("DELETE FROM pending WHERE first = ? AND epoch = ?", arrived)
                if not self.pending():
                    self._rewrite(0)

    def _begin(self, began: GenerationBegan) -> None:
        top = self._top()
        self._db.execute(
            "INSERT OR IGNORE INTO generations VALUES (?, ?, 0)",
            (began.generation, began.step),
        )
        if self._top() < top:
            self._rewrite(self._top() + 1)

    def _add_minibatch(self, row: Minibatch) -> None:
        if row.step_s is not None:
            self._commit(row.generation, row.step)
        if self._is_superseded(row):
            return
        weight = 0.0 if math.isnan(row.weight) else row.weight
        found = self._db.execute(
            "SELECT generation, learning_rate FROM minibatches WHERE step = ?",
            (row.step,),
        ).fetchone()
        if found is None:
            self._note_insertion(row)
            self._db.execute(
                f"INSERT INTO minibatches ({_ROW}) VALUES ({', '.join('?' * 13)})",
                (
                    *(row.step, row.generation, row.at_s, row.loss, row.grad_norm),
                    *(weight, row.learning_rate, _text(row.metrics), row.step_s),
                    *(row.examples, row.plan, row.usd_spent, row.skipped),
                ),
            )
        elif found == (row.generation, None) and row.learning_rate is not None:
            # Whoever reported first trains nothing, so it has none.
            self._note_insertion(row)
            self._db.execute(
                "UPDATE minibatches SET learning_rate = ? WHERE step = ?",
                (row.learning_rate, row.step),
            )

    def _add_evaluation(self, row: Evaluation) -> None:
        name = row.name.encode("utf-8", "replace").decode()
        start = self._start(row.generation)
        if start is not None and row.step > start:
            self._commit(row.generation, row.step)
        if self._is_superseded(row):
            return
        found = self._db.execute(
            "SELECT 1 FROM evaluations WHERE step = ? AND name = ?",
            (row.step, name),
        ).fetchone()
        if found is None:
            self._note_insertion(row)
            self._db.execute(
                f"INSERT INTO evaluations ({_EVALUATION}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(row.step, name, row.generation, row.at_s, row.loss),
                    *(_text(row.metrics), row.is_best),
                ),
            )

    def _is_superseded(self, row: Row) -> bool:
        """Return whether a later generation has trained on from below ``row``."""
        found = self._db.execute(
            "SELECT 1 FROM generations WHERE number > ? AND step < ? AND committed",
            (row.generation, row.step),
        )
        return found.fetchone() is not None

    def _commit(self, generation: int, step: int) -> None:
        """Record that a generation has committed ``step``: what it began below goes."""
        self._begin(GenerationBegan(generation=generation, step=step - 1))
        top, start = self._top(), self._start(generation)
        committed = self._db.execute(
            "UPDATE generations SET committed = 1 WHERE number = ? AND NOT committed",
            (generation,),
        )
        if not committed.rowcount or start is None:
            return
        if self._remove_superseded(generation, start) and top > 2 * start + 1:
            self._rewrite(min(2 * start + 1, self._top()) + 1)

    def _remove_superseded(self, generation: int, start: int) -> int:
        """Delete what a generation trained anew; return the number of rows."""
        return sum(
            self._db.execute(
                f"DELETE FROM {table} WHERE generation < ? AND step > ?",
                (generation, start),
            ).rowcount
            for table in ("minibatches", "evaluations")
        )

    def _start(self, generation: int) -> int | None:
        """Return the step from which a generation trains on, if it is known."""
        found = self._db.execute(
            "SELECT step FROM generations WHERE number = ?", (generation,)
        ).fetchone()
        return None if found is None else int(found[0])

    def _note_insertion(self, row: Row) -> None:
        """Tell followers of a row that does not come after all others."""
        if row.step <= self._cut() and row.position <= self._top():
            self._rewrite(row.position)

    def _rewrite(self, position: int) -> None:
        if self._is_filling:
            return
        self._db.execute("INSERT INTO rewrites (position) VALUES (?)", (position,))

    def _cut(self) -> int:
        """Return the step above which rows are hidden."""
        found = self._db.execute(
            "SELECT step, committed FROM generations ORDER BY number DESC LIMIT 1"
        ).fetchone()
        return _END if found is None or found[1] else int(found[0])

    def _top(self) -> int:
        """Return the position of the last row; -1 if there is none."""
        minibatch = self._edge("minibatches", "DESC")
        evaluation = self._edge("evaluations", "DESC")
        return max(
            -1 if minibatch is None else 2 * minibatch,
            -1 if evaluation is None else 2 * evaluation + 1,
        )

    def _edge(self, table: str, order: str) -> int | None:
        """Return the first or last step of a table; an aggregate would read all of it."""
        found = self._select(f"step FROM {table}", f"ORDER BY step {order} LIMIT 1")
        return found[0][0] if found else None

    # --- Reading --------------------------------------------------------------------------

    def changes(self, cursor: Cursor, max_minibatches: int = 1000) -> Page:
        """Return what follows a cursor, at most ``max_minibatches`` and evaluations."""
        self._db.execute("BEGIN")
        try:
            lowest, newest = self._db.execute(
                "SELECT min(position), max(id) FROM rewrites WHERE id > ?",
                (cursor.rewrite,),
            ).fetchone()
            rewinds = lowest is not None and lowest <= cursor.position
            begin = lowest if rewinds else cursor.position + 1
            rows: list[Row] = [
                _minibatch(found)
                for found in self._select(
                    f"{_ROW} FROM minibatches",
                    "AND step >= :first ORDER BY step LIMIT :limit",
                    first=(begin + 1) // 2,
                    limit=max_minibatches,
                )
            ]
            last = rows[-1].step if len(rows) == max_minibatches else _END
            rows += self._evaluations(begin // 2, last)
            rows.sort(key=lambda row: row.position)
            position = rows[-1].position if rows else self._top()
        finally:
            self._db.execute("COMMIT")
        found_rewrite = cursor.rewrite if newest is None else newest
        return Page(rows, begin if rewinds else None, Cursor(found_rewrite, position))

    def changed(self, cursor: Cursor) -> tuple[int | None, Cursor]:
        """Return the position from which on rows have changed since a cursor, and the
        cursor of now; None if none has."""
        lowest, newest = self._db.execute(
            "SELECT min(position), max(id) FROM rewrites WHERE id > ?",
            (cursor.rewrite,),
        ).fetchone()
        top = self._top()
        now = Cursor(cursor.rewrite if newest is None else newest, top)
        begins = [] if lowest is None or lowest > cursor.position else [lowest]
        begins += [cursor.position + 1] if top > cursor.position else []
        return min(begins, default=None), now

    def between(self, first: int, last: int) -> list[Minibatch]:
        """Return the rows of some steps, in order."""
        found = self._select(
            f"{_ROW} FROM minibatches",
            "AND step BETWEEN :first AND :last ORDER BY step",
            first=first,
            last=last,
        )
        return [_minibatch(row) for row in found]

    def minibatches(self, *, last: int | None = None, every: int = 1) -> list[Minibatch]:
        """Return rows in order of step.

        Args:
            last: Only so many, the newest.
            every: Only those whose step it divides.
        """
        found = self._select(
            f"{_ROW} FROM minibatches",
            "AND step % :every = 0 ORDER BY step DESC LIMIT :limit",
            every=every,
            limit=-1 if last is None else last,
        )
        return [_minibatch(row) for row in reversed(found)]

    def iterate(self, every: int = 1) -> Iterator[Minibatch]:
        """Yield rows in order of step, without holding all of them.

        Args:
            every: Only those whose step it divides.
        """
        step = -1
        while True:
            rows = self._select(
                f"{_ROW} FROM minibatches",
                "AND step > :step AND step % :every = 0 ORDER BY step LIMIT :page",
                step=step,
                every=every,
                page=_PAGE,
            )
            yield from map(_minibatch, rows)
            if len(rows) < _PAGE:
                return
            step = rows[-1][0]

    def metric_names(self) -> list[str]:
        """Return the names of all metrics, in alphabetical order."""
        found = {
            name
            for table in ("minibatches", "evaluations")
            for (name,) in self._db.execute(
                f"SELECT DISTINCT key FROM {table}, json_each({table}.metrics) WHERE metrics != ''"
            )
        }
        return sorted(found)

    def newest_evaluations(self) -> dict[str, float]:
        """Return the newest loss of each held-out set."""
        found = self._select("name, max(step), loss FROM evaluations", "GROUP BY name")
        return {name: _number(loss) for name, _, loss in found}

    def evaluations(self) -> list[Evaluation]:
        """Return all evaluations in order of step and name."""
        return self._evaluations(0, _END)

    def curves(self, columns: Sequence[str], max_points: int) -> dict[str, list[CurvePoint]]:
        """Return columns of numbers over steps, downsampled; what is not finite is left
        out.

        Args:
            columns: Of ``loss``, ``grad_norm`` and ``learning_rate``.
            max_points: Neighbours are taken together so that there are no more.
        """
        first, last = (self._edge("minibatches", order) for order in ("ASC", "DESC"))
        if first is None or last is None:
            return {column: [] for column in columns}
        width = -(-(last - first + 1) // max_points)
        # All in one pass: reading the rows is what takes long.
        points = ", ".join(
            f"{function} FILTER (WHERE abs({column}) < 1e308)"
            for column in columns
            for function in (
                "avg(step)",
                f"avg({column})",
                f"min({column})",
                f"max({column})",
            )
        )
        found = self._select(
            f"{points} FROM minibatches",
            "GROUP BY (step - :low) / :width ORDER BY min(step)",
            low=first,
            width=width,
        )
        return {
            column: [
                CurvePoint(*row[4 * at : 4 * at + 4]) for row in found if row[4 * at] is not None
            ]
            for at, column in enumerate(columns)
        }

    def median_step_s(self) -> dict[int, float]:
        """Return the median time of each generation's mini-batches, in seconds; of
        ``MEDIAN_OF`` of them, drawn at random, if there are more."""
        found = {}
        for number, first, last in self._ranges():
            steps = range(first, last + 1)
            if len(steps) > MEDIAN_OF:
                drawn = random.Random(number).sample(steps, MEDIAN_OF)
                condition = f"step IN ({', '.join(map(str, drawn))})"
            else:
                condition = f"step BETWEEN {first} AND {last}"
            times = self._db.execute(
                f"SELECT step_s FROM minibatches WHERE {condition} AND generation = ? "
                "AND step_s IS NOT NULL",
                (number,),
            ).fetchall()
            if times:
                found[number] = statistics.median(time_s for (time_s,) in times)
        return found

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield each generation with its first and last step in the final history."""
        last = min(self._cut(), self._top() // 2)
        for number, step, committed in self._db.execute(
            "SELECT number, step, committed FROM generations ORDER BY number DESC"
        ).fetchall():
            if committed and step < last:
                yield number, step + 1, last
                last = step

    def losses(self, points: int) -> list[float]:
        """Return some losses at even distances over all steps, in a time that does not
        depend on how many there are."""
        first, last = (self._edge("minibatches", order) for order in ("ASC", "DESC"))
        if first is None or last is None:
            return []
        count = min(points, last - first + 1)
        steps = {last - (last - first) * i // max(1, count - 1) for i in range(count)}
        found = (
            self._select(
                "loss FROM minibatches",
                "AND step >= :step AND abs(loss) < 1e308 ORDER BY step LIMIT 1",
                step=step,
            )
            for step in sorted(steps)
        )
        return [row[0] for rows in found for row in rows]

    def _evaluations(self, first: int, last: int) -> list[Evaluation]:
        found = self._select(
            f"{_EVALUATION} FROM evaluations",
            "AND step BETWEEN :first AND :last ORDER BY step, name",
            first=first,
            last=last,
        )
        return [_evaluation(row) for row in found]

    def _select(self, what: str, rest: str = "", **values: int) -> list[Any]:
        """Return rows that are not hidden; ``rest`` follows that condition."""
        return self._db.execute(
            f"SELECT {what} WHERE step <= :cut {rest}", {"cut": self._cut()} | values
        ).fetchall()


def _text(metrics: Mapping[str, float]) -> str:
    """Return metrics as stored; JSON has no NaN."""
    finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
    return json.dumps(finite, separators=(",", ":")) if finite else ""


def _metrics(text: str) -> dict[str, float]:
    stored = json.loads(text) if text else {}
    return {name: _number(value) for name, value in stored.items()}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _minibatch(row: Sequence[Any]) -> Minibatch:
    known = dict(zip(_ROW.split(", "), row, strict=True))
    known |= {name: _number(known[name]) for name in ("loss", "grad_norm")}
    return Minibatch(**known | {"metrics": _metrics(known["metrics"])})


def _evaluation(row: Sequence[Any]) -> Evaluation:
    step, name, generation, at_s, loss, metrics, is_best = row
    return Evaluation(
        step=step,
        name=name,
        generation=generation,
        at_s=at_s,
        loss=_number(loss),
        metrics=_metrics(metrics),
        is_best=bool(is_best),
    )
