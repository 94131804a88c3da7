from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.builders import an_offer

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.ranking.order import preference


def offer(**changes: Any) -> Offer:
    return replace(an_offer(zone="a", usd_per_hour=2.0), **changes)


def test_spot_comes_first_then_the_price_of_work() -> None:
    on_demand = offer(spot=False, usd_per_hour=0.1)
    expensive = offer(zone="expensive", usd_per_hour=3.0)
    fast = offer(zone="fast", usd_per_hour=4.0, gpu_speed=3.0)
    wide = offer(zone="wide", usd_per_hour=4.0, gpus=8)

    ranked = sorted([on_demand, expensive, fast, wide], key=preference)

    assert ranked == [wide, fast, expensive, on_demand]
