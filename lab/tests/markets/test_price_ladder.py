"""The replay of prices: by hand on small markets, by the published figures on 2020's."""

from __future__ import annotations

from datetime import date, timedelta
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.conftest import DATA

from spottrain.errors import ConfigError
from spottrain.pricing.prices.place import Place
from spottrain.pricing.ranking.switching import Frictions, Quote, SwitchingRule
from spottrain_lab.markets.price_file import COLUMNS, PriceFile, parse_prices
from spottrain_lab.markets.price_ladder import (
    THROUGHPUTS,
    Ladder,
    LadderTerms,
    Rung,
    Strategy,
)

FIRST = date(2020, 1, 1)
MODEL = "ResNet-50(128)"
Price = tuple[str, str, str, int, float]
"""cloud, zone, instance type, day, USD per hour"""


def market(*prices: Price) -> PriceFile:
    lines = [
        f"{cloud},{zone},{kind},{FIRST + timedelta(days=day)},{usd}"
        for cloud, zone, kind, day, usd in prices
    ]
    return parse_prices("\n".join([",".join(COLUMNS), *lines]))


def v100(day: int, usd: float, zone: str = "us-east-1a") -> Price:
    return "aws", zone, "p3.2xlarge", day, usd


def single_start(*more: Price) -> Ladder:
    """A market of seven days whose price is 1 USD an hour: two start days, 1 and 2."""
    return Ladder(market(*(v100(day, 1.0) for day in range(7)), *more), "us-east-1")


def first_usd(ladder: Ladder, strategy: Strategy, terms: LadderTerms | None = None) -> float:
    return ladder.climb(MODEL, 2.0, terms or LadderTerms())[strategy].runs[0].usd


def test_starts_are_the_baselines_days_but_the_last_five() -> None:
    ladder = single_start()
    assert ladder.starts == [FIRST, FIRST + timedelta(days=1)]
    assert ladder.last == FIRST + timedelta(days=6)


def test_a_job_pays_each_days_price_for_the_hours_it_needs() -> None:
    ladder = Ladder(market(*(v100(day, 1.0 + day) for day in range(6))), "us-east-1")
    [run] = ladder.climb(MODEL, 2.5, LadderTerms())[Strategy.SINGLE].runs
    assert run.usd == pytest.approx(24 * 1 + 24 * 2 + 12 * 3)
    assert run.hours == pytest.approx(60)


def test_the_last_price_stays() -> None:
    ladder = Ladder(market(*(v100(day, 1.0 + day) for day in range(6))), "us-east-1")
    [run] = ladder.climb(MODEL, 8.0, LadderTerms())[Strategy.SINGLE].runs
    assert run.usd == pytest.approx(24 * (1 + 2 + 3 + 4 + 5 + 6 * 3))


def test_a_multi_gpu_instance_is_paid_by_the_gpu() -> None:
    expensive = ("aws", "us-east-1a", "p3.8xlarge", 0, 2.0)
    ladder = single_start(expensive)
    assert first_usd(ladder, Strategy.GPU_TYPE) == pytest.approx(48)
    assert first_usd(ladder, Strategy.MULTI_GPU) == pytest.approx(24)


def test_other_regions_of_the_same_cloud_are_not_used() -> None:
    ladder = single_start(v100(0, 0.1, "us-west-2a"))
    assert first_usd(ladder, Strategy.DYNAMIC) == pytest.approx(48)


def test_a_fixed_choice_stays_though_another_becomes_cheap() -> None:
    ladder = single_start(("azure", "us_east", "NC6s v3", 1, 0.5))
    assert first_usd(ladder, Strategy.MULTI_CLOUD) == pytest.approx(48)
    assert first_usd(ladder, Strategy.DYNAMIC) == pytest.approx(24 + 12)


def test_a_price_not_seen_that_day_stays_as_it_was() -> None:
    ladder = single_start(("azure", "us_east", "NC6s v3", 0, 0.5))
    rungs = ladder.climb(MODEL, 2.0, LadderTerms())
    assert rungs[Strategy.DYNAMIC].runs[0].usd == pytest.approx(24)
    assert rungs[Strategy.DYNAMIC].runs[0].switches == 0


def test_boot_interruptions_and_egress_are_paid() -> None:
    frictions = Frictions(
        boot_s=3600,
        lost_s=3600,
        move_s=1800,
        checkpoint_bytes=10e9,
        dataset_bytes=100e9,
    )
    terms = LadderTerms(frictions=frictions, losses_per_day=1.0)
    ladder = single_start(("azure", "us_east", "NC6s v3", 1, 0.1))
    rungs = ladder.climb(MODEL, 2.0, terms)
    wasted = 1 + 2 / 24
    # Alone: an hour's boot, then 48 hours at the pace that interruptions leave.
    fixed = rungs[Strategy.SINGLE].runs[0]
    assert fixed.hours == pytest.approx(1 + 48 * wasted)
    assert fixed.usd == pytest.approx(fixed.hours)
    # Moving after a day: boot, data, and half an hour's work again over there.
    moved = rungs[Strategy.DYNAMIC].runs[0]
    left_h = 48 - 23 / wasted + 0.5
    assert moved.switches == 1
    assert moved.hours == pytest.approx(24 + 1 + left_h * wasted)
    data_usd = 0.09 * (10 + 100)
    assert moved.usd == pytest.approx(24 + data_usd + 0.1 * (1 + left_h * wasted))


def test_a_move_that_does_not_pay_is_not_made() -> None:
    terms = LadderTerms(frictions=Frictions(dataset_bytes=1000e9))
    ladder = single_start(("azure", "us_east", "NC6s v3", 1, 0.1))
    assert first_usd(ladder, Strategy.DYNAMIC, terms) == pytest.approx(48)


def test_of_equal_prices_the_order_in_the_file_chooses_nothing() -> None:
    east = [v100(day, 1.0, "us-east-1b") for day in range(7)]
    east += [v100(day, 1.0 + 0.1 * (day == 2)) for day in range(7)]
    there, back = (
        Ladder(market(*prices), "us-east-1").climb(MODEL, 2.0, LadderTerms())
        for prices in (east, east[::-1])
    )
    assert there == back


def test_a_region_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="region us-west-2 is not in the file"):
        Ladder(market(v100(0, 1.0)), "us-west-2")


def test_too_few_days_are_refused() -> None:
    with pytest.raises(ConfigError, match="on 5 days; more than 5 are needed"):
        Ladder(market(*(v100(day, 1.0) for day in range(5))), "us-east-1")


WALK = st.lists(st.floats(0.1, 3.0), min_size=8, max_size=8)


@given(WALK, WALK, st.sampled_from(sorted(THROUGHPUTS)), st.floats(0.1, 5.0))
def test_each_day_the_dynamic_choice_is_paid_no_more_than_any_other(
    ours: list[float], theirs: list[float], model: str, days: float
) -> None:
    prices = [v100(day, usd) for day, usd in enumerate(ours)]
    prices += [("azure", "us_east", "NC6s v3", day, p) for day, p in enumerate(theirs)]
    rungs = Ladder(market(*prices), "us-east-1").climb(model, days, LadderTerms())
    # On equal GPUs all take equally long: day by day, the cheaper of two is cheaper.
    for strategy in Strategy:
        for run, other in zip(rungs[Strategy.DYNAMIC].runs, rungs[strategy].runs, strict=True):
            assert run.usd <= other.usd * (1 + 1e-9)


@given(WALK, WALK, st.floats(0.1, 5.0))
def test_scaled_prices_scale_every_cost(
    ours: list[float], theirs: list[float], factor: float
) -> None:
    def climb(scale: float) -> dict[Strategy, Rung]:
        prices = [v100(day, usd * scale) for day, usd in enumerate(ours)]
        prices += [("azure", "us_east", "NC6", day, usd * scale) for day, usd in enumerate(theirs)]
        return Ladder(market(*prices), "us-east-1").climb(MODEL, 2.0, LadderTerms())

    plain, scaled = climb(1.0), climb(factor)
    for strategy in Strategy:
        assert scaled[strategy].usd == pytest.approx(plain[strategy].usd * factor)


@pytest.mark.parametrize(
    ("model", "per_dollar"),
    [("ResNet-50(128)", (2052, 2319, 3595)), ("A3C", (26508, 10189, 10400))],
)
def test_examples_per_dollar_at_on_demand_prices(
    model: str, per_dollar: tuple[int, int, int]
) -> None:
    # Section 6.3.1, at GCP's on-demand prices: what Table 6.1 is made of.
    place = Place("gcp", "us-west1", "us-west1-a", "")
    prices = {"k80": 0.52, "p100": 1.68, "v100": 2.85}
    got = [
        1
        / Frictions().usd_per_example(
            Quote(
                place=place,
                usd_per_hour=usd,
                examples_per_s=THROUGHPUTS[model][gpu],
            )
        )
        for gpu, usd in prices.items()
    ]
    assert got == pytest.approx(per_dollar, rel=1e-3)


# --- The prices of 2020 -------------------------------------------------------------------


@pytest.fixture(scope="module")
def us_east_1() -> Ladder:
    return Ladder(parse_prices((DATA / "prices" / "spot-prices-2020.csv").read_text()), "us-east-1")


# By V100-days: + GPU type, + multi-GPU, + multi-cloud, + dynamic (Figure 6.5).
FIGURE_6_5 = {
    4.0: {
        "A3C": (1.32, 1.71, 3.10, 3.53),
        "CycleGAN": (1.00, 1.08, 1.54, 1.64),
        "LM(80)": (1.00, 1.08, 1.70, 1.81),
        "Recommendation(8192)": (1.01, 1.31, 2.38, 2.76),
        "ResNet-50(128)": (1.00, 1.08, 1.49, 1.53),
        "Transformer(256)": (1.00, 1.11, 2.36, 3.21),
    },
    8.0: {
        "A3C": (1.32, 1.72, 3.12, 3.72),
        "CycleGAN": (1.00, 1.09, 1.56, 1.72),
        "LM(80)": (1.00, 1.09, 1.72, 1.91),
        "Recommendation(8192)": (1.01, 1.32, 2.39, 2.88),
        "ResNet-50(128)": (1.00, 1.09, 1.50, 1.58),
        "Transformer(256)": (1.00, 1.12, 2.35, 3.47),
    },
}
FIGURE_6_6 = {
    "A3C": (1, 1, 1, 1.02, 1.05, 1.11, 1.16),
    "ResNet-50(128)": (1, 1, 1, 1, 1.01, 1.02, 1.05),
    "Transformer(256)": (1, 1, 1.02, 1.07, 1.17, 1.28, 1.41),
}


@pytest.mark.parametrize(
    ("days", "model"), [(d, m) for d, rows in FIGURE_6_5.items() for m in rows]
)
def test_the_ladder_of_figure_6_5(us_east_1: Ladder, days: float, model: str) -> None:
    rungs = us_east_1.climb(model, days, LadderTerms())
    base = rungs[Strategy.SINGLE].usd
    got = tuple(round(base / rung.usd, 2) for rung in rungs.values())
    assert got == (1.00, *FIGURE_6_5[days][model])


@pytest.mark.parametrize("model", FIGURE_6_6)
def test_the_gain_of_moving_of_figure_6_6(us_east_1: Ladder, model: str) -> None:
    gains = []
    for days in (0.125, 0.25, 0.5, 1, 2, 4, 8):
        rungs = us_east_1.climb(model, days, LadderTerms())
        gains.append(rungs[Strategy.DYNAMIC].gain_over(rungs[Strategy.MULTI_CLOUD]))
    assert tuple(round(gain, 2) for gain in gains) == FIGURE_6_6[model]


def test_the_mean_dollars_and_moves_of_2020(us_east_1: Ladder) -> None:
    rungs = us_east_1.climb("A3C", 4.0, LadderTerms())
    dollars = [rungs[s].usd for s in (Strategy.SINGLE, Strategy.DYNAMIC)]
    assert dollars == pytest.approx([95.52, 27.08], abs=0.005)
    assert us_east_1.starts[0] == date(2020, 2, 18)
    assert us_east_1.starts[-1] == date(2020, 3, 18)
    most = {
        model: us_east_1.climb(model, 4.0, LadderTerms())[Strategy.DYNAMIC].most_switches
        for model in THROUGHPUTS
    }
    assert max(most.values()) == 3


def test_a_hysteresis_of_a_twentieth_keeps_the_savings(us_east_1: Ladder) -> None:
    rule = SwitchingRule(hysteresis=0.05)
    for model, row in FIGURE_6_5[4.0].items():
        plain = us_east_1.climb(model, 4.0, LadderTerms())
        calm = us_east_1.climb(model, 4.0, LadderTerms(rule=rule))
        base = plain[Strategy.SINGLE].usd
        assert base / calm[Strategy.DYNAMIC].usd == pytest.approx(row[-1], abs=0.005)
        moves = [mean(r.switches for r in c[Strategy.DYNAMIC].runs) for c in (plain, calm)]
        assert moves[1] <= moves[0]


def test_each_rung_costs_no_more_than_the_one_before(us_east_1: Ladder) -> None:
    for model in THROUGHPUTS:
        costs = [rung.usd for rung in us_east_1.climb(model, 4.0, LadderTerms()).values()]
        assert costs == sorted(costs, reverse=True)
