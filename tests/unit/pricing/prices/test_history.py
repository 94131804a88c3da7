"""The database of prices and interruptions."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import costly

from spottrain.cloud.port.provider import SpotPool
from spottrain.pricing.prices.history import (
    RATE_KEPT_S,
    SCORE_KEPT_S,
    History,
    HistoryError,
    VmLife,
)
from spottrain.pricing.prices.place import Place
from spottrain.pricing.prices.price import Price
from spottrain.units import HOUR_S

NOW_S = 1e9
PLACE = Place("aws", "us-east-1", "us-east-1a", "p4d.24xlarge")
LIFE = VmLife(job="j", vm_id="vm-0", place=PLACE, spot=True, from_s=0.0, until_s=2 * HOUR_S)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with History(tmp_path / "market.sqlite") as history:
        yield history


def price(usd: float, since_s: float, seen_s: float, **changes: Any) -> Price:
    made = Price(
        cloud=PLACE.cloud,
        region=PLACE.region,
        zone=PLACE.zone,
        instance_type=PLACE.instance_type,
        spot=True,
        usd_per_hour=usd,
        since_s=since_s,
        seen_s=seen_s,
        source="test",
    )
    return replace(made, **changes)


def test_a_price_that_stays_takes_one_row(history: History) -> None:
    for at_s in (1.0, 2.0, 3.0):
        history.record_prices([price(8.0, at_s, at_s)])
    history.record_prices([price(9.0, 4.0, 4.0), price(8.0, 5.0, 5.0)])
    (newest,) = history.latest()
    assert newest == price(8.0, 5.0, 5.0)
    spans = [(p.usd_per_hour, p.since_s, p.seen_s) for p in history.series(newest, 0.0)]
    assert spans == [(8.0, 1.0, 3.0), (9.0, 4.0, 4.0), (8.0, 5.0, 5.0)]
    assert len(history.series(newest, 3.5)) == 2


def test_zones_types_and_markets_are_distinguished(history: History) -> None:
    prices = [
        price(8.0, 1.0, 1.0),
        price(7.0, 1.0, 1.0, zone="us-east-1b"),
        price(21.0, 1.0, 1.0, spot=False),
        price(30.0, 1.0, 1.0, instance_type="p5.48xlarge"),
    ]
    history.record_prices(prices)
    assert set(history.latest()) == set(prices)


moments = st.integers(0, 20).map(float)


@given(st.lists(st.tuples(moments, moments, st.sampled_from([1.0, 2.0]))))
@costly
def test_the_newest_price_is_the_one_seen_last_in_whatever_order_they_come(
    rows: list[tuple[float, float, float]],
) -> None:
    prices = [price(usd, since, since + extra) for since, extra, usd in rows]
    with TemporaryDirectory() as folder, History(Path(folder) / "m") as history:
        for one in prices:
            history.record_prices([one])
        newest = max((p.seen_s for p in prices), default=None)
        assert [p.seen_s for p in history.latest()] == ([newest] if prices else [])


def test_vms_recorded_by_a_clock_ahead_of_ours_do_not_count(
    history: History,
) -> None:
    history.record_vms([replace(LIFE, until_s=90 * HOUR_S)])
    assert history.exposures(now_s=HOUR_S) == []
    assert len(history.exposures(now_s=90 * HOUR_S)) == 1


def test_old_prices_can_be_deleted(history: History) -> None:
    kept = price(9.0, 3.0, 6.0)
    history.record_prices([price(8.0, 1.0, 2.0), kept])
    history.forget_prices(before_s=5.0)
    assert history.series(kept, 0.0) == [kept]


def test_queries_are_recorded(history: History) -> None:
    assert history.asked_s("azure|a|*") is None
    history.mark_asked(["azure|a|*", "azure|b|*"], 5.0)
    history.mark_asked(["azure|a|*"], 6.0)
    assert history.asked_s("azure|a|*") == 6.0
    assert history.asked_s("azure|b|*") == 5.0


def test_exposure_is_the_lifetime_and_the_losses_of_spot_vms(
    history: History,
) -> None:
    lives = [
        replace(LIFE, ended="kill"),
        replace(LIFE, vm_id="vm-1", ended="notice", until_s=HOUR_S),
        replace(LIFE, vm_id="vm-2", ended="silence"),
        replace(LIFE, vm_id="vm-3", ended="returned"),
        replace(LIFE, vm_id="vm-4"),
        replace(LIFE, vm_id="vm-5", spot=False, ended="returned"),
    ]
    history.record_vms(lives)
    history.record_vms([replace(LIFE, vm_id="vm-4", until_s=5 * HOUR_S)])
    (exposure,) = history.exposures()
    assert exposure.place == PLACE
    assert exposure.vm_hours == pytest.approx(2 + 1 + 2 + 2 + 5)
    assert exposure.losses == 3


def test_exposure_begins_at_the_given_moment(history: History) -> None:
    history.record_vms(
        [
            replace(LIFE, ended="kill"),
            replace(LIFE, vm_id="vm-1", until_s=6 * HOUR_S, ended="kill"),
        ]
    )
    (exposure,) = history.exposures(since_s=4 * HOUR_S)
    assert (exposure.vm_hours, exposure.losses) == (2.0, 1)


def test_a_clock_that_jumped_back_makes_no_negative_exposure(history: History) -> None:
    history.record_vms([replace(LIFE, from_s=9.0, until_s=3.0)])
    assert history.exposures()[0].vm_hours == 0.0


def test_both_halves_can_be_exported(history: History) -> None:
    history.record_prices([price(8.0, 1.0, 2.0, source='a "source", quoted')])
    history.record_vms([replace(LIFE, ended="kill")])
    (row,) = csv.DictReader(history.export_prices())
    assert row["source"] == 'a "source", quoted'
    assert float(row["usd_per_hour"]) == 8.0
    (row,) = csv.DictReader(history.export_vms())
    assert (row["vm_id"], row["zone"], row["ended"]) == ("vm-0", "us-east-1a", "kill")


def test_it_is_kept_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "new" / "market.sqlite"
    with History(path) as one, History(path) as other:
        one.record_prices([price(8.0, 1.0, 1.0)])
        other.record_prices([price(9.0, 2.0, 2.0)])
        assert one.latest() == other.latest() == [price(9.0, 2.0, 2.0)]


def test_spot_pools_count_for_as_long_as_they_tell_of_the_present(
    history: History,
) -> None:
    pool = SpotPool(
        cloud="aws",
        region="us-east-1",
        zone="us-east-1a",
        instance_type="g5.xlarge",
        losses_per_hour=0.01,
        obtainability=0.9,
    )
    history.record_pools([replace(pool, obtainability=0.1)], NOW_S)
    history.record_pools([pool], NOW_S)
    assert history.pools(NOW_S) == [pool]
    later_s = NOW_S + SCORE_KEPT_S + 1.0
    assert history.pools(later_s) == [replace(pool, obtainability=None)]
    assert history.pools(NOW_S + RATE_KEPT_S + 1.0) == []


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "market.sqlite"
    path.write_text("not a database, and long enough to be read as a header " * 10)
    with pytest.raises(HistoryError, match=r"market\.sqlite.*move it away"):
        History(path)
