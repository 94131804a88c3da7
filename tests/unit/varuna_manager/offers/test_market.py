"""What a job could rent, and the ranking at today's prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.pricing.prices.test_refresh import Market as PriceApi
from tests.unit.pricing.ranked import FACTS, JOB, PROFILE, TERMS

from spottrain.codec import decode
from spottrain.errors import ConfigError
from spottrain.morphing.plan.workload import Workload
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.hazard import Hazards
from spottrain.pricing.prices.history import History, VmLife
from spottrain.pricing.prices.place import Place
from spottrain.pricing.prices.price import Price
from spottrain.pricing.ranking.gpu_speed import speed_ratio, work_of
from spottrain.pricing.ranking.rank import Priced, RankingTerms, best_of_each, rank
from spottrain.pricing.ranking.throughput import ThroughputCache
from spottrain.units import DAY_S
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.offers.live import rank_live
from spottrain.varuna_manager.offers.market import (
    BOOT_S,
    MeasuredOn,
    base_of,
    cloud_market,
    hazards_of,
    own_market,
)

REPOSITORY = Path(__file__).resolve().parents[4]

NOW_S = 1_790_000_000.0
V100, A100 = catalogue().gpus["V100"], catalogue().gpus["A100"]
BASE = MeasuredOn(gpu=V100, work=work_of(FACTS), profile=PROFILE)
SPOT = Price(
    cloud="aws",
    region="us-east-1",
    zone="us-east-1a",
    instance_type="p4d.24xlarge",
    spot=True,
    usd_per_hour=8.0,
    since_s=NOW_S - 600,
    seen_s=NOW_S - 600,
    source="test",
)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with History(tmp_path / "market.sqlite") as history:
        yield history


def job(**changes: object) -> JobConfig:
    zones = [
        {"name": "a", "spot_usd_per_hour": 1.0, "capacity": 2, "boot_s": 9.0},
        {"name": "b", "slot_speed": 2.0, "slots": 4},
    ]
    data = {
        "name": "job",
        "entrypoint": "m:f",
        "minibatch_size": 16,
        "steps": 100,
        "local": {"zones": zones},
    }
    return parse_config({**data, **changes}, "job.yaml")


def test_a_job_file_s_zones_are_offers_on_both_markets() -> None:
    market = own_market(job(), Hazards((), {}), NOW_S)
    assert not any(p.machine.is_gpu for p in market.offers if p.machine)
    gpus = own_market(job(), Hazards((), {}), NOW_S, on_gpus=True).offers
    assert all(p.machine is not None and p.machine.is_gpu for p in gpus)
    found = [(p.offer.zone, p.offer.spot, p.offer.usd_per_hour) for p in market.offers]
    assert found == [
        ("a", True, 1.0),
        ("a", False, 0.3),
        ("b", True, 0.1),
        ("b", False, 0.3),
    ]
    first, on_demand, fast = market.offers[:3]
    assert (first.max_vms, first.boot_s, first.is_estimate) == (2, 9.0, False)
    assert first.losses_per_hour > 0
    assert on_demand.losses_per_hour == 0
    assert fast.is_estimate
    assert fast.machine is not None
    assert (fast.machine.speed, fast.machine.gpus) == (2.0, 4)


def test_own_hosts_are_offered_as_the_gpus_that_they_are_said_to_have() -> None:
    fast = {"address": "a", "type": "fast", "slots": 4, "gpu": "A100"}
    plain = {"address": "b", "type": "plain"}

    def machines(**resources: str) -> list[tuple[str, bool, int]]:
        asked = {"provider": "ssh", **resources}
        config = job(
            resources=asked,
            checkpoint={"path": "/shared"},
            ssh={"hosts": [fast, plain]},
        )
        offers = own_market(config, Hazards((), {}), NOW_S).offers
        shapes = [(one.offer.gpu, one.machine) for one in offers]
        return [(gpu, m.is_gpu, m.gpu_memory_bytes) for gpu, m in shapes if m]

    a100 = catalogue().gpus["A100"].memory_bytes
    assert machines() == [("A100", True, a100), ("", False, 4 * 10**9)]
    assert machines(device="cpu") == [("", False, 4 * 10**9)] * 2


def test_a_cloud_s_offers_are_priced_by_the_last_known_prices(history: History) -> None:
    history.record_prices([SPOT, replace(SPOT, zone="us-east-1b", usd_per_hour=99.0)])
    place = Place("aws", "us-east-1", "us-east-1a", "p4d.24xlarge")
    life = VmLife(
        job="j",
        vm_id="v",
        place=place,
        spot=True,
        from_s=NOW_S - 36_000,
        until_s=NOW_S - 10,
        ended="kill",
    )
    history.record_vms([life])
    market = cloud_market(
        history,
        BASE,
        NOW_S,
        clouds=["aws"],
        regions=["us-east-1"],
        instance_types=["p4d.24xlarge"],
    )
    spot = [p for p in market.offers if p.offer.spot]
    (one,) = spot
    assert one.offer.usd_per_hour == 8.0
    assert one.losses_per_hour == hazards_of(history, NOW_S).of(place).losses_per_hour
    assert one.boot_s == BOOT_S
    assert one.is_estimate
    assert one.machine is not None
    assert one.machine.speed == pytest.approx(speed_ratio(A100, V100, BASE.work))
    assert market.warnings[0] == "1 spot prices left out: no lower than on demand"


def test_offers_with_stale_prices_are_shown_but_not_rented(history: History) -> None:
    history.record_prices([SPOT])
    market = cloud_market(
        history,
        BASE,
        NOW_S + 2 * DAY_S,
        clouds=["aws"],
        instance_types=["p4d.24xlarge"],
    )
    assert [p.is_stale for p in market.offers if p.offer.spot] == [True]
    assert any("too old to rent by" in warning for warning in market.warnings)


def test_speeds_are_relative_to_a_gpu_of_the_catalogue() -> None:
    assert base_of(PROFILE, FACTS) == BASE
    laptop = replace(PROFILE, device="Xeon, 1 thread")
    with pytest.raises(ConfigError, match="measured on a CPU, Xeon, 1 thread"):
        base_of(laptop, FACTS)
    new = replace(PROFILE, device="NVIDIA T4000")
    with pytest.raises(ConfigError, match="measured on NVIDIA T4000"):
        base_of(new, FACTS)


def rented(history: History) -> tuple[Priced, ...]:
    return cloud_market(
        history, BASE, NOW_S, clouds=["aws"], instance_types=["p4d.24xlarge"]
    ).offers


def test_the_best_offers_are_asked_for_again_until_the_best_was(
    history: History,
) -> None:
    prices = enumerate("abcdef", 4)
    zones = [replace(SPOT, zone=f"us-east-1{z}", usd_per_hour=n) for n, z in prices]
    history.record_prices(zones)
    # The first is gone, the next three have become pricier.
    pricier = [replace(p, usd_per_hour=15.0, since_s=NOW_S) for p in zones[1:4]]
    api = PriceApi([*pricier, *zones[4:]])
    ranking, warnings = rank_live(
        rented(history), ThroughputCache(JOB), TERMS, history, NOW_S, sources=[api]
    )
    best = ranking.best
    assert best is not None
    assert best.priced.offer.zone == "us-east-1e"
    assert best.priced.offer.usd_per_hour == 8.0
    assert any("us-east-1a" in w and "no price to rent by" in w for w in warnings)
    assert len(api.questions) == 1  # the same type and region were asked just now


def test_where_no_cloud_answers_the_last_known_prices_serve(history: History) -> None:
    history.record_prices([SPOT])
    down = [PriceApi([], down=True)]
    ranking, warnings = rank_live(
        rented(history), ThroughputCache(JOB), TERMS, history, NOW_S, sources=down
    )
    assert ranking.best is not None
    assert ranking.best.priced.offer.usd_per_hour == 8.0
    assert any("the API is down" in warning for warning in warnings)


def test_a_plan_takes_dated_prices_of_a_cloud_of_which_nothing_newer_is_known(
    history: History,
) -> None:
    kinds = ["p4d.24xlarge", "p5.48xlarge", "a2-highgpu-1g"]

    def market() -> dict[tuple[str, str, bool], Priced]:
        found = cloud_market(
            history,
            BASE,
            NOW_S,
            clouds=["aws", "gcp"],
            instance_types=kinds,
            dated=True,
        )
        return {(p.offer.cloud, p.offer.instance_type, p.offer.spot): p for p in found.offers}

    shipped = market()
    spot = shipped["aws", "p5.48xlarge", True]
    assert (spot.is_dated, spot.is_stale) == (True, False)
    assert shipped["gcp", "a2-highgpu-1g", True].is_dated
    history.record_prices([SPOT])
    observed = market()
    assert not observed["aws", "p4d.24xlarge", True].is_dated
    assert observed["aws", "p4d.24xlarge", True].offer.usd_per_hour == 8.0
    spot = observed["aws", "p5.48xlarge", True]
    assert (spot.is_dated, spot.is_stale) == (False, True)
    assert observed["gcp", "a2-highgpu-1g", True].is_dated
    rentable = cloud_market(history, BASE, NOW_S, clouds=["gcp"])
    assert all(not p.offer.spot for p in rentable.offers)


def test_for_a_gpt_an_h100_comes_before_an_l40s_and_that_before_an_l4(
    history: History,
) -> None:
    text = (REPOSITORY / "examples/profiles/varuna-2.5b.json").read_text()
    workload: Workload = decode(Workload, text)
    base = base_of(workload.profile, workload.facts, "fp16")
    usd = {"p5.48xlarge": 14.0, "g6e.xlarge": 0.78, "g6.xlarge": 0.41}
    history.record_prices(
        replace(SPOT, instance_type=kind, usd_per_hour=price) for kind, price in usd.items()
    )
    market = cloud_market(history, base, NOW_S, clouds=["aws"], instance_types=[*usd])
    spot = [priced for priced in market.offers if priced.offer.spot]
    throughputs = ThroughputCache(workload.plan_inputs())
    terms = RankingTerms(examples=1e9, max_vms=8, max_gpus=8)
    ranking = rank(spot, throughputs, terms, exact=3)
    kinds = [row.priced.offer.instance_type for row in ranking.rows]
    assert kinds == ["p5.48xlarge", "g6e.xlarge", "g6.xlarge"]
    bests = best_of_each(ranking, lambda one: str(one.offer.spot), throughputs, terms)
    assert [(name, row.priced.offer.instance_type) for name, row in bests] == [
        ("True", "p5.48xlarge")
    ]
