"""The fleet of a preview is the one that the core rents, launch by launch."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.pricing.ranked import FACTS, THROUGHPUTS, priced
from tests.unit.varuna_manager.story import SETTINGS
from tests.view import View, changed, settings_with

from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.ranking.order import OfferWorth
from spottrain.pricing.ranking.rank import greedy_fleet, rank
from spottrain.varuna_manager.core.allocation import choice_of, next_launch
from spottrain.varuna_manager.core.model.records import Intent
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.offers.ranker import ranking_terms

ROWS = st.lists(
    st.tuples(st.sampled_from([1.0, 1.5, 2.0, 3.0, 7.0]), st.integers(0, 3)),
    min_size=1,
    max_size=4,
    unique_by=lambda row: row[0],
)


@given(
    rows=ROWS,
    max_vms=st.integers(1, 5),
    min_vms=st.integers(1, 3),
    cap=st.sampled_from([None, 4.0, 9.0]),
)
@example(rows=[(1.0, 1), (2.0, 2)], max_vms=4, min_vms=1, cap=4.0)  # equal but for an ulp
def test_the_fleet_is_the_one_that_the_core_rents_launch_by_launch(
    rows: list[tuple[float, int]], max_vms: int, min_vms: int, cap: float | None
) -> None:
    job = settings_with(
        SETTINGS,
        facts=FACTS,
        max_vms=max_vms,
        min_vms=min(min_vms, max_vms),
        max_usd_per_hour=cap,
    )
    market = [
        priced(zone=f"z{n}", usd_per_hour=usd, available=count, max_vms=count)
        for n, (usd, count) in enumerate(rows)
    ]
    terms = ranking_terms(job)
    ranking = rank(market, THROUGHPUTS, terms, exact=len(market))
    fleet = Counter[str]()
    for row, count in greedy_fleet(ranking, terms):
        fleet[row.priced.offer.zone] += count
    state = changed(
        State(phase=JobPhase.ACTIVE, settings=job),
        reconciled=True,
        offers=tuple(one.offer for one in market),
        worths={
            (key := offer_key(row.priced.offer)): OfferWorth(
                offer=key,
                examples_per_usd=row.worth.examples_per_usd if row.worth else 0.0,
                usd_per_hour=row.priced.offer.usd_per_hour,
            )
            for row in ranking.rows
        },
    )
    rented = Counter[str]()
    while (launch := next_launch(state)).offer is not None:
        rented[launch.offer.zone] += launch.count
        intents = View(state).intents
        name = f"intent-{len(intents)}"
        intent = Intent(
            intent=name,
            offer=launch.offer,
            count=launch.count,
            asked_at_s=0.0,
            choice=choice_of(state, launch.offer),
        )
        state = changed(state, intents={**intents, name: intent})
    assert rented == fleet
