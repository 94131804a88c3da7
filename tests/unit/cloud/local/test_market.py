from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.cloud.local.market import MarketEvent, MarketSpec, ZoneSpec, stream
from spottrain.codec import decode, encode
from spottrain.errors import ConfigError

ZONE = ZoneSpec(
    name="a",
    capacity=4,
    slot_memory_bytes=10**9,
    spot_usd_per_hour=1.0,
    on_demand_usd_per_hour=3.0,
)
WILD = MarketSpec(
    seed=7,
    zones=(ZONE, replace(ZONE, name="b", capacity=2)),
    events=(
        MarketEvent(at_s=90, kind="price", zone="a", usd_per_hour=2.0),
        MarketEvent(at_s=30, kind="capacity", zone="b", count=6),
    ),
    notices_per_hour=20,
    kills_per_hour=10,
    silences_per_hour=5,
    price_volatility=0.5,
)


def timeline(spec: MarketSpec, horizon_s: float) -> tuple[MarketEvent, ...]:
    """Return the events of the first ``horizon_s`` seconds."""
    return tuple(itertools.takewhile(lambda e: e.at_s <= horizon_s, stream(spec)))


@given(
    seed=st.integers(0, 2**32),
    shorter_s=st.floats(0, 3600),
    more_s=st.floats(0, 3600),
)
def test_a_longer_timeline_begins_with_the_shorter_one(
    seed: int, shorter_s: float, more_s: float
) -> None:
    spec = replace(WILD, seed=seed)
    short = timeline(spec, shorter_s)
    long = timeline(spec, shorter_s + more_s)
    assert long[: len(short)] == short
    assert all(e.at_s > shorter_s for e in long[len(short) :])
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(long))


def test_the_same_seed_gives_the_same_timeline_and_another_one_another() -> None:
    assert timeline(WILD, 3600) == timeline(replace(WILD), 3600)
    assert timeline(WILD, 3600) != timeline(replace(WILD, seed=8), 3600)


def test_a_script_without_hazards_is_played_in_order_of_time() -> None:
    spec = MarketSpec(zones=WILD.zones, events=WILD.events)
    assert [e.at_s for e in timeline(spec, 1e9)] == [30, 90]


def test_hazards_strike_each_machine_at_their_rate() -> None:
    hours = 100
    strikes = timeline(MarketSpec(zones=(ZONE,), kills_per_hour=30), hours * 3600.0)
    for machine in range(ZONE.capacity):
        hits = sum(e.machine == machine for e in strikes)
        assert hits == pytest.approx(30 * hours, rel=0.1)
    assert {e.return_after_s for e in strikes} == {30.0}


def test_hazards_reach_machines_that_a_script_adds() -> None:
    strikes = [e for e in timeline(WILD, 36000) if e.zone == "b" and e.kind == "kill"]
    assert {e.machine for e in strikes} == set(range(6))


def test_a_volatile_price_stays_between_zero_and_the_on_demand_price() -> None:
    spec = MarketSpec(zones=(ZONE,), price_volatility=3.0)
    prices = [e.usd_per_hour or 0.0 for e in timeline(spec, 48 * 3600.0)]
    assert len(prices) == 48 * 60
    assert 0 < min(prices) < max(prices) <= ZONE.on_demand_usd_per_hour
    assert statistics.pstdev(prices) > 0


@given(
    events=st.lists(
        st.builds(
            MarketEvent,
            at_s=st.floats(0, 1e6),
            kind=st.sampled_from(["notice", "kill", "silence"]),
            zone=st.sampled_from([None, "a", "b"]),
            count=st.integers(0, 9),
            lead_s=st.floats(0, 1e3),
            return_after_s=st.none() | st.floats(0, 1e3),
        ),
        max_size=5,
    )
)
def test_a_market_survives_json(events: list[MarketEvent]) -> None:
    spec = replace(WILD, events=(*WILD.events, *events))
    assert decode(MarketSpec, encode(spec)) == spec


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"zones": ()}, "one or more"),
        ({"zones": (ZONE, ZONE)}, "different names"),
        ({"events": (MarketEvent(at_s=0, kind="kill", zone="c"),)}, "names zone 'c'"),
    ],
)
def test_a_market_that_contradicts_itself_is_refused(
    changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(WILD, **changes)


@pytest.mark.parametrize(
    "fields",
    [
        {"at_s": 0, "kind": "price", "zone": "a"},
        {"at_s": 0, "kind": "slow"},
        {"at_s": 0, "kind": "kill", "factor": 2.0},
        {"at_s": 0, "kind": "kill", "usd_per_hour": 1.0},
        {"at_s": 0, "kind": "capacity", "count": 2},
    ],
)
def test_an_event_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MarketEvent(**fields)
