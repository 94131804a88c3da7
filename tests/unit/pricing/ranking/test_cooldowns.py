"""What a refusal closes, and for how long."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import an_offer

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.ranking.cooldowns import (
    MAX_S,
    MIN_S,
    Cooldown,
    Refusal,
    granted,
    home_of,
    max_batch,
    open_at_s,
    refused,
    scope_of,
    spread,
)

HERE = an_offer(
    cloud="aws",
    region="us-east-1",
    zone="us-east-1a",
    instance_type="g5.xlarge",
    usd_per_hour=0.4,
    gpu_memory_bytes=1,
    family="G and VT",
)
OTHERS = {
    "same": HERE,
    "cheaper now": replace(HERE, usd_per_hour=0.3),
    "on demand": replace(HERE, spot=False),
    "zone": replace(HERE, zone="us-east-1b"),
    "size": replace(HERE, instance_type="g5.48xlarge"),
    "family": replace(HERE, instance_type="p4d.24xlarge", family="P"),
    "region": replace(HERE, region="us-west-2", zone="us-west-2a"),
    "cloud": replace(HERE, cloud="gcp"),
}
BASE_S = 30.0

CLOSES: list[tuple[Refusal, set[str]]] = [
    ("no_capacity", {"same", "cheaper now"}),
    ("price", {"same"}),
    ("quota", {"same", "cheaper now", "zone", "size"}),
    ("region_quota", set(OTHERS) - {"region", "cloud"}),
    ("misconfigured", {"same", "cheaper now", "on demand", "zone"}),
    ("auth", set(OTHERS) - {"cloud"}),
]


def shut(closed: dict[str, Cooldown], offer: Offer, now_s: float = 0.0) -> bool:
    return open_at_s(closed, offer) > now_s


@pytest.mark.parametrize(("refusal", "names"), CLOSES)
def test_a_refusal_closes_its_own_scope_and_no_more(refusal: Refusal, names: set[str]) -> None:
    closed = refused({}, HERE, refusal, 0.0, BASE_S)
    assert {name for name, offer in OTHERS.items() if shut(closed, offer)} == names


def test_it_closes_for_longer_each_time_it_refuses_soon_after() -> None:
    closed: dict[str, Cooldown] = {}
    now_s, lengths = 0.0, []
    for _ in range(8):
        closed = refused(closed, HERE, "no_capacity", now_s, BASE_S)
        lengths.append(open_at_s(closed, HERE) - now_s)
        now_s = open_at_s(closed, HERE)
    assert lengths == [30, 60, 120, 240, 480, 960, 1800, 1800]
    assert lengths[-1] == MAX_S


def test_a_scope_open_for_as_long_as_it_was_closed_starts_over() -> None:
    closed = refused({}, HERE, "no_capacity", 0.0, BASE_S)
    closed = refused(closed, HERE, "no_capacity", 30.0, BASE_S)
    assert open_at_s(closed, HERE) == 90.0
    assert open_at_s(refused(closed, HERE, "no_capacity", 149.0, 30.0), HERE) == 269.0
    assert open_at_s(refused(closed, HERE, "no_capacity", 150.0, 30.0), HERE) == 180.0


def test_an_offer_that_gave_vms_is_open_and_its_past_forgotten() -> None:
    closed = refused({}, HERE, "no_capacity", 0.0, BASE_S)
    closed = refused(closed, HERE, "quota", 0.0, BASE_S)
    closed = refused(closed, OTHERS["region"], "no_capacity", 0.0, BASE_S)
    closed = granted(closed, HERE)
    assert not shut(closed, HERE)
    assert shut(closed, OTHERS["region"])


@given(st.integers(1, 64), st.integers(0, 64))
def test_a_quota_is_found_by_halving_before_it_closes(wanted: int, quota: int) -> None:
    closed: dict[str, Cooldown] = {}
    left, held, calls = wanted, 0, 0
    while left and not shut(closed, HERE):
        asked = int(min(left, max_batch(closed, scope_of(HERE, "quota"), 0.0)))
        calls += 1
        if asked <= quota - held:
            held, left = held + asked, left - asked
            closed = granted(closed, HERE)
        else:
            closed = refused(closed, HERE, "quota", 0.0, BASE_S, asked)
    assert held == min(wanted, quota)
    assert calls <= (1 + math.log2(wanted + 1)) ** 2
    if left:
        assert open_at_s(closed, HERE) == MIN_S["quota"]
        later_s = MIN_S["quota"]
        assert max_batch(closed, scope_of(HERE, "quota"), later_s) == 1  # not all over again
        closed = refused(closed, HERE, "quota", later_s, BASE_S)
        assert open_at_s(closed, HERE) == 3 * MIN_S["quota"]
    assert max_batch(closed, scope_of(OTHERS["region"], "quota"), 0.0) == math.inf


offers = st.sampled_from(list(OTHERS.values()))
refusals = st.sampled_from([refusal for refusal, _ in CLOSES])


@given(st.lists(st.tuples(offers, refusals, st.floats(0, 5000))))
def test_nothing_is_closed_for_ever_nor_remembered_for_ever(
    history: list[tuple[Offer, Refusal, float]],
) -> None:
    closed: dict[str, Cooldown] = {}
    now_s = 0.0
    for offer, refusal, pause_s in history:
        now_s += pause_s
        closed = refused(closed, offer, refusal, now_s, BASE_S)
        assert shut(closed, offer, now_s)
        for each in OTHERS.values():
            assert open_at_s(closed, each) <= now_s + MAX_S
    later_s = now_s + 2 * MAX_S + 1  # sums of floats are not exact
    assert not any(shut(closed, each, later_s) for each in OTHERS.values())
    closed = refused(closed, HERE, "price", later_s, BASE_S)
    assert len(closed) == 1


def test_the_home_is_where_most_gpus_are() -> None:
    far = replace(OTHERS["region"], gpus=8)
    assert home_of([]) is None
    assert home_of([HERE, HERE, far]) == ("aws", "us-west-2")


def test_zones_of_similar_prices_are_filled_evenly() -> None:
    zones = [replace(HERE, zone=f"us-east-1{letter}") for letter in "abc"]
    pricier = replace(HERE, zone="us-east-1d", usd_per_hour=0.45)
    held: dict[str, int] = {}
    wanted = 8
    while wanted:
        offer, count = spread(zones[0], [*zones, pricier], held, wanted)
        held[offer.zone] = held.get(offer.zone, 0) + count
        wanted -= count
    assert held == {"us-east-1a": 3, "us-east-1b": 3, "us-east-1c": 2}


@given(
    st.lists(st.sampled_from("abcd"), unique=True, min_size=1),
    st.dictionaries(st.sampled_from(["us-east-1a", "us-east-1b"]), st.integers(0, 9)),
    st.integers(1, 50),
)
def test_spreading_asks_for_something_and_never_for_too_much(
    letters: list[str], held: dict[str, int], wanted: int
) -> None:
    alike = [replace(HERE, zone=f"us-east-1{letter}") for letter in letters]
    offer, count = spread(alike[0], alike, held, wanted)
    assert offer in alike
    assert 1 <= count <= wanted
