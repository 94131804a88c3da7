from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.billing.egress import fetched, sent, usd_per_gb
from spottrain.pricing.billing.money import NOTHING
from spottrain.pricing.prices.place import Site

SITES = st.builds(
    Site,
    st.sampled_from(["aws", "gcp", "azure", "local", "ssh"]),
    st.sampled_from("rs"),
    st.sampled_from("yz"),
)


@pytest.mark.parametrize(
    ("cloud", "zone_usd", "region_usd"),
    [("aws", 0.02, 0.02), ("gcp", 0.01, 0.02), ("azure", 0.0, 0.02), ("ssh", 0.0, 0.0)],
)
def test_data_costs_by_what_it_leaves(cloud: str, zone_usd: float, region_usd: float) -> None:
    here = Site(cloud, "r", "z")
    assert usd_per_gb(here, here) == 0.0
    assert usd_per_gb(here, Site(cloud, "r", "y")) == zone_usd
    assert usd_per_gb(here, Site(cloud, "s", "y")) == region_usd
    assert usd_per_gb(here, Site(cloud, "s", "z")) == region_usd, "a name says nothing"
    assert usd_per_gb(here, Site("other", "r", "z")) == 0.09


@given(here=SITES, there=SITES)
def test_it_costs_the_same_both_ways_and_a_given_price_holds_in_a_region_alone(
    here: Site, there: Site
) -> None:
    listed = usd_per_gb(here, there)
    assert usd_per_gb(there, here) == listed
    within = here[:2] == there[:2] and here != there
    assert usd_per_gb(here, there, 7.0) == (7.0 if within else listed)


def test_what_is_sent_is_summed_by_price() -> None:
    aws, zone, gcp = Site("aws", "r", "z"), Site("aws", "r", "y"), Site("gcp", "r", "z")
    num_bytes = {(aws, zone): 10**9, (zone, gcp): 10**9, (gcp, gcp): 10**12}
    assert sent(num_bytes).usd == 0.11
    assert sent(num_bytes, 0.0).usd == 0.09
    assert sent({}) == NOTHING


def test_what_other_clouds_hold_costs() -> None:
    held = {"aws": 1e9, "gcp": 2e9}
    assert fetched(held, "aws").usd == 0.18
    assert fetched(held, "azure").usd == fetched(held, "ssh").usd == 0.27
    assert fetched(held, "local") == fetched({}, "aws") == NOTHING
