from __future__ import annotations

from dataclasses import replace

from tests.builders import an_offer

from spottrain.pricing.prices.place import Site, offer_key, place_of

OFFER = an_offer(
    region="local", zone="a", instance_type="cpu", usd_per_hour=2.0, gpu_memory_bytes=1
)


def test_a_new_price_does_not_make_another_offer() -> None:
    later = replace(OFFER, usd_per_hour=9.0, observed_at_s=5.0)
    assert offer_key(OFFER) == offer_key(later) == "local/local/a/cpu/spot"


def test_place_type_and_market_make_another_offer() -> None:
    others = [
        replace(OFFER, cloud="aws"),
        replace(OFFER, region="eu"),
        replace(OFFER, zone="b"),
        replace(OFFER, instance_type="gpu"),
        replace(OFFER, spot=False),
    ]
    assert len({offer_key(offer) for offer in (OFFER, *others)}) == 6


def test_the_site_of_a_place_does_not_depend_on_the_instance_type() -> None:
    assert place_of(OFFER).site == Site("local", "local", "a")
    assert place_of(replace(OFFER, instance_type="gpu")).site == place_of(OFFER).site
