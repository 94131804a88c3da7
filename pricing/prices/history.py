"""History of the market: prices, spot pools, lifetimes of VMs, in one SQLite file.

It belongs to this machine, not to a job; any number of processes may use it. It holds
nothing precious: prices can be queried again, lifetimes are in the jobs' journals.
"""

from __future__ import annotations

import csv
import io
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from spottrain import database
from spottrain.cloud.port.provider import SpotPool
from spottrain.database import FormatError, Kind
from spottrain.errors import SpottrainError
from spottrain.pricing.prices.hazard import ObservedHours
from spottrain.pricing.prices.place import Place
from spottrain.pricing.prices.price import Price
from spottrain.units import DAY_S, HOUR_S

_SCHEMA = """
    CREATE TABLE prices (
        cloud TEXT NOT NULL,
        region TEXT NOT NULL,
        zone TEXT NOT NULL,
        instance_type TEXT NOT NULL,
        spot INTEGER NOT NULL,
        since_s REAL NOT NULL,
        seen_s REAL NOT NULL,
        usd_per_hour REAL NOT NULL,
        source TEXT NOT NULL,
        PRIMARY KEY (cloud, zone, instance_type, spot, since_s)
    ) STRICT;
    CREATE TABLE questions (
        scope TEXT PRIMARY KEY,
        asked_s REAL NOT NULL
    ) STRICT;
    CREATE TABLE vms (
        job TEXT NOT NULL,
        vm_id TEXT NOT NULL,
        cloud TEXT NOT NULL,
        region TEXT NOT NULL,
        zone TEXT NOT NULL,
        instance_type TEXT NOT NULL,
        spot INTEGER NOT NULL,
        from_s REAL NOT NULL,
        until_s REAL NOT NULL,
        ended TEXT NOT NULL,
        PRIMARY KEY (job, vm_id)
    ) STRICT;
    CREATE TABLE pools (
        cloud TEXT NOT NULL,
        region TEXT NOT NULL,
        zone TEXT NOT NULL,
        instance_type TEXT NOT NULL,
        losses_per_hour REAL,
        obtainability REAL,
        seen_s REAL NOT NULL,
        PRIMARY KEY (cloud, zone, instance_type)
    ) STRICT;
"""
AHEAD_S = HOUR_S
"""Entries further in the future were made under a clock that was ahead."""
_PRICE = "cloud, region, zone, instance_type, spot, usd_per_hour, since_s, seen_s, source"
_POOL = "cloud, region, zone, instance_type, losses_per_hour, obtainability"
RATE_KEPT_S = 7 * DAY_S
"""Published rates of interruptions are averages over weeks."""
SCORE_KEPT_S = 3 * HOUR_S
"""Where a request will succeed is said of the present."""
_VM = "job, vm_id, cloud, region, zone, instance_type, spot, from_s, until_s, ended"
INTERRUPTED = ("notice", "kill", "silence")
"""Ends of a VM that count as interruptions."""


class HistoryError(SpottrainError):
    """The database of prices cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmLife:
    """Lifetime of one VM, and its end."""

    job: str
    """The job's unique name."""
    vm_id: str
    place: Place
    spot: bool
    from_s: float
    """Seconds since the epoch."""
    until_s: float
    """Its end; while it lives, the newest moment known."""
    ended: str = ""
    """Empty while it lives; one of INTERRUPTED; ``returned`` if we returned it."""


class History:
    """The database.

    Args:
        path: The SQLite file; made if absent.

    Raises:
        HistoryError: it cannot be opened, is damaged or of another format.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._translating_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = database.connect(path, Kind.PRICES, _SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def record_prices(self, prices: Iterable[Price]) -> None:
        """Add prices in any order; an unchanged one extends its row."""
        with self._transaction():
            for price in sorted(prices, key=lambda price: price.since_s):
                self._record(price)

    def forget_prices(self, before_s: float) -> None:
        """Delete prices that were last seen before a moment."""
        with self._transaction():
            self._db.execute("DELETE FROM prices WHERE seen_s < ?", (before_s,))

    def latest(self, now_s: float = math.inf) -> list[Price]:
        """Return the newest price of every offer.

        Args:
            now_s: Seconds since the epoch. Prices recorded under a clock that was ahead
                do not count; those confirmed under one count as seen when they began.
        """
        # SQLite takes the other columns from the row of the maximum.
        query = (
            f"SELECT {_PRICE}, max(CASE WHEN seen_s > ? THEN since_s ELSE seen_s END) "
            "FROM prices WHERE since_s <= ? GROUP BY cloud, zone, instance_type, spot"
        )
        latest_s = now_s + AHEAD_S
        with self._translating_errors():
            rows = self._db.execute(query, (latest_s, latest_s)).fetchall()
        return [replace(_price(row[:-1]), seen_s=row[-1]) for row in rows]

    def series(self, price: Price, since_s: float) -> list[Price]:
        """Return the prices of the same offer that held after a moment, oldest first."""
        with self._translating_errors():
            rows = self._db.execute(
                f"SELECT {_PRICE} FROM prices WHERE cloud = ? AND zone = ? AND "
                "instance_type = ? AND spot = ? AND seen_s >= ? ORDER BY since_s",
                (price.cloud, price.zone, price.instance_type, price.spot, since_s),
            ).fetchall()
        return [_price(row) for row in rows]

    def asked_s(self, scope: str) -> float | None:
        """Return when a query was last answered, in seconds since the epoch."""
        with self._translating_errors():
            row = self._db.execute(
                "SELECT asked_s FROM questions WHERE scope = ?", (scope,)
            ).fetchone()
        return None if row is None else float(row[0])

    def mark_asked(self, scopes: Iterable[str], at_s: float) -> None:
        """Record that queries were answered."""
        rows = [(scope, at_s) for scope in scopes]
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO questions VALUES (?, ?)", rows)

    def record_vms(self, lives: Iterable[VmLife]) -> None:
        """Add VMs; a newer record of a VM replaces the older one."""
        rows = [
            (
                *(life.job, life.vm_id, *life.place, life.spot, life.from_s),
                *(max(life.from_s, life.until_s), life.ended),
            )
            for life in lives
        ]
        with self._transaction():
            self._db.executemany(
                f"INSERT OR REPLACE INTO vms ({_VM}) VALUES (?,?,?,?,?,?,?,?,?,?)", rows
            )

    def exposures(self, since_s: float = 0.0, now_s: float = math.inf) -> list[ObservedHours]:
        """Return VM-hours and losses of spot VMs since a moment, by place.

        VMs recorded under a clock that was ahead of ``now_s`` do not count.
        """
        marks = ",".join("?" * len(INTERRUPTED))
        with self._translating_errors():
            rows = self._db.execute(
                "SELECT cloud, region, zone, instance_type, "
                f"sum(until_s - max(from_s, ?)), sum(ended IN ({marks})) "
                "FROM vms WHERE spot AND until_s BETWEEN ? AND ? GROUP BY 1, 2, 3, 4",
                (since_s, *INTERRUPTED, since_s, now_s + AHEAD_S),
            ).fetchall()
        return [
            ObservedHours(place=Place(*row[:4]), vm_hours=row[4] / HOUR_S, losses=row[5])
            for row in rows
        ]

    def record_pools(self, pools: Iterable[SpotPool], seen_s: float) -> None:
        """Replace what is known of some spot pools."""
        rows = [(*_pool_row(pool), seen_s) for pool in pools]
        with self._transaction():
            self._db.executemany(
                f"INSERT OR REPLACE INTO pools ({_POOL}, seen_s) VALUES (?,?,?,?,?,?,?)",
                rows,
            )

    def pools(self, now_s: float) -> list[SpotPool]:
        """Return what clouds said of their spot pools, as far as it still counts."""
        with self._translating_errors():
            rows = self._db.execute(
                f"SELECT {_POOL}, seen_s FROM pools WHERE seen_s BETWEEN ? AND ?",
                (now_s - RATE_KEPT_S, now_s + AHEAD_S),
            ).fetchall()
        return [
            SpotPool(
                cloud=cloud,
                region=region,
                zone=zone,
                instance_type=kind,
                losses_per_hour=losses,
                obtainability=score if now_s - seen_s <= SCORE_KEPT_S else None,
            )
            for cloud, region, zone, kind, losses, score, seen_s in rows
        ]

    def export_prices(self) -> Iterator[str]:
        """Yield all prices as lines of CSV, the header first."""
        yield from self._export(_PRICE, "prices")

    def export_vms(self) -> Iterator[str]:
        """Yield the lifetimes of all VMs as lines of CSV, the header first."""
        yield from self._export(_VM, "vms")

    def _export(self, columns: str, table: str) -> Iterator[str]:
        yield _csv(columns.split(", "))
        with self._translating_errors():
            rows = self._db.execute(f"SELECT {columns} FROM {table} ORDER BY rowid")
            for row in rows:
                yield _csv(row)

    def _record(self, price: Price) -> None:
        offer = (price.cloud, price.zone, price.instance_type, price.spot)
        before = self._db.execute(
            "SELECT rowid, usd_per_hour FROM prices WHERE cloud = ? AND zone = ? AND "
            "instance_type = ? AND spot = ? AND since_s <= ? "
            "ORDER BY since_s DESC LIMIT 1",
            (*offer, price.since_s),
        ).fetchone()
        if before is not None and before[1] == price.usd_per_hour:
            self._db.execute(
                "UPDATE prices SET seen_s = max(seen_s, ?), source = ? WHERE rowid = ?",
                (price.seen_s, price.source, before[0]),
            )
            return
        self._db.execute(
            f"INSERT INTO prices ({_PRICE}) VALUES (?,?,?,?,?,?,?,?,?) "
            "ON CONFLICT DO UPDATE SET usd_per_hour = excluded.usd_per_hour, "
            "seen_s = excluded.seen_s, source = excluded.source "
            "WHERE excluded.seen_s >= seen_s",
            (
                *(price.cloud, price.region, price.zone, price.instance_type),
                *(price.spot, price.usd_per_hour, price.since_s, price.seen_s),
                price.source,
            ),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translating_errors(), database.transaction(self._db):
            yield

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except FormatError as error:
            raise HistoryError(str(error)) from error
        except (sqlite3.Error, OSError) as error:
            raise HistoryError(
                f"{self._path}: the database of prices cannot be used: {error}; if it "
                "is damaged, move it away; a new one will be created"
            ) from error


def _pool_row(pool: SpotPool) -> tuple[object, ...]:
    place = (pool.cloud, pool.region, pool.zone, pool.instance_type)
    return *place, pool.losses_per_hour, pool.obtainability


def _price(row: Sequence[Any]) -> Price:
    fields = dict(zip(_PRICE.split(", "), row, strict=True))
    return Price(**{**fields, "spot": bool(fields["spot"])})


def _csv(row: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(row)
    return line.getvalue()
