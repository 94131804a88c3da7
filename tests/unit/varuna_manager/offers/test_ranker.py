"""What offers are worth to a job, and what the core rents because of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.builders import a_plan
from tests.unit.varuna_manager.story import FACTS, OFFER, ON_DEMAND, PROFILE, SPEC, Story
from tests.view import View, changed

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.prices.hazard import Hazards, ObservedHours
from spottrain.pricing.prices.place import Place, offer_key
from spottrain.pricing.ranking.order import (
    OfferWorth,
    in_order,
)
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.offers.ranker import TRUSTED_STEPS, OfferRanker
from spottrain.wire.model import StateHome
from spottrain.wire.numerics import Numerics
from spottrain.wire.plan import Slot

CALM = Hazards((), {})
OTHER = replace(OFFER, zone="other", instance_type="u", usd_per_hour=1.1)
PLACE = Place(OFFER.cloud, OFFER.region, OFFER.zone, OFFER.instance_type)


def worth(offer: Offer, examples_per_usd: float) -> OfferWorth:
    return OfferWorth(
        offer=offer_key(offer),
        examples_per_usd=examples_per_usd,
        usd_per_hour=offer.usd_per_hour,
    )


# --- The core -------------------------------------------------------------------------------


def test_the_offer_with_most_examples_per_dollar_is_rented_whatever_its_market() -> None:
    story = Story(allow_on_demand=True)
    worths = (worth(OFFER, 5.0), worth(ON_DEMAND, 9.0))
    story.tell(e.OffersRanked, worths=worths)
    story.start()
    assert story.emitted(c.LaunchVms)[0].offer == ON_DEMAND


def test_a_new_price_counts_at_once() -> None:
    worths = {w.offer: w for w in (worth(OFFER, 5.0), worth(OTHER, 6.0))}
    assert in_order((OFFER, OTHER), worths) == (OTHER, OFFER)
    pricier = replace(OTHER, usd_per_hour=OTHER.usd_per_hour * 1.5)
    assert in_order((OFFER, pricier), worths) == (OFFER, pricier)


def test_offers_that_cannot_run_the_job_are_rented_only_if_there_are_no_others() -> None:
    worths = {w.offer: w for w in (worth(OFFER, 0.0), worth(OTHER, 6.0))}
    new = replace(OFFER, zone="new", usd_per_hour=0.1)
    assert in_order((OFFER, new, OTHER), worths) == (OTHER, new)
    assert in_order((OFFER,), worths) == (OFFER,)
    assert in_order((OTHER, OFFER), {}) == (OFFER, OTHER)


# --- The ranking ----------------------------------------------------------------------------


def trained(*ids: str, steps: int = TRUSTED_STEPS) -> State:
    return Story().training(*ids, steps=steps).state


def test_without_a_profile_offers_are_not_ranked() -> None:
    story = Story()
    story.start()
    assert OfferRanker().rank(story.state, (OFFER,), CALM) is None


def test_without_a_profile_clouds_gpus_are_ranked_by_their_peaks() -> None:
    story = Story()
    story.start()
    cloud = replace(OFFER, cloud="aws", usd_per_hour=10.0)
    v100, a100, h100 = (
        replace(cloud, instance_type=name)
        for name in ("p3.16xlarge", "p4d.24xlarge", "p5.48xlarge")
    )
    expensive = replace(a100, zone="expensive", usd_per_hour=1000.0)
    offers = (expensive, v100, a100, h100)
    ranker = OfferRanker()
    worths = ranker.rank(story.state, offers, CALM)
    assert worths is not None
    assert in_order(offers, worths) == (h100, a100, v100, expensive)
    assert ranker.rank(story.state, offers, CALM) is None
    assert ranker.rank(story.state, (*offers, OFFER), CALM) is None
    # A laptop's profile does not tell them apart either.
    known = e.KnownProfile(profile=PROFILE, measured_at_s=0.0)
    story.tell(e.ProfilesListed, profiles=(known,))
    again = OfferRanker().rank(story.state, offers, CALM)
    assert again == worths


def test_own_hosts_are_ranked_by_the_gpus_that_they_have() -> None:
    story = Story()
    story.start()
    host = replace(OFFER, cloud="ssh", instance_type="host", usd_per_hour=10.0)
    t4 = replace(host, zone="t4", gpu="Tesla T4")
    a100 = replace(host, zone="a100", gpu="NVIDIA A100-SXM4-40GB")
    worths = OfferRanker().rank(story.state, (t4, a100), CALM)
    assert worths is not None
    assert in_order((t4, a100), worths) == (a100, t4)
    known = e.KnownProfile(profile=replace(PROFILE, device="Tesla T4"), measured_at_s=0.0)
    story.tell(e.ProfilesListed, profiles=(known,))
    again = OfferRanker().rank(story.state, (t4, a100), CALM)
    assert again is not None
    assert in_order((t4, a100), again) == (a100, t4)


def test_machines_that_cannot_hold_the_model_come_last() -> None:
    huge = replace(FACTS.sections[0], param_bytes=10**12)
    facts = replace(FACTS, sections=(huge, FACTS.sections[1]), num_parameters=10**12)
    story = Story(facts=facts)
    story.start()
    cloud = replace(OFFER, cloud="aws", usd_per_hour=10.0)
    small = replace(cloud, instance_type="p3.2xlarge", usd_per_hour=0.1)
    large = replace(cloud, instance_type="p5.48xlarge")
    worths = OfferRanker().rank(story.state, (small, large), CALM)
    assert worths is not None
    assert in_order((small, large), worths) == (large,)


@pytest.mark.parametrize(("state", "holds"), [(None, True), ("device", False)])
def test_a_model_may_be_held_by_vms_whose_gpus_are_too_small(
    state: StateHome | None, holds: bool
) -> None:
    """Four p3.2xlarge: 16 GB of a V100, 61 GiB of the VM each."""
    huge = replace(FACTS.sections[0], param_bytes=30 * 10**9, optimizer_bytes=60 * 10**9)
    facts = replace(FACTS, sections=(huge, FACTS.sections[1]), num_parameters=75 * 10**8)
    story = Story(facts=facts, numerics=Numerics(state=state))
    story.start()
    small = replace(OFFER, cloud="aws", instance_type="p3.2xlarge")
    worths = OfferRanker().rank(story.state, (small,), CALM)
    assert worths is not None
    (worth,) = worths.values()
    assert (worth.examples_per_usd > 0) == holds


def test_a_profile_that_was_kept_ranks_before_anything_is_measured() -> None:
    story = Story()
    known = e.KnownProfile(profile=PROFILE, measured_at_s=0.0)
    story.tell(e.ProfilesListed, profiles=(known,))
    worths = OfferRanker().rank(story.state, (OFFER, OTHER), CALM)
    assert worths is not None
    first, second = worths[offer_key(OFFER)], worths[offer_key(OTHER)]
    assert first.examples_per_usd == pytest.approx(second.examples_per_usd * 1.1, rel=1e-3)


def test_vms_that_cannot_hold_the_groups_of_an_exact_job_s_first_plan_are_worth_nothing() -> None:
    large, ranker = replace(OFFER, instance_type="large", gpus=2), OfferRanker()
    story = Story(spec=replace(SPEC, reduction="exact")).training("a", "b")
    before = ranker.rank(story.state, (OFFER, large), CALM)
    assert before is not None
    assert min(one.examples_per_usd for one in before.values()) > 0
    slots = tuple(Slot(vm_id="a", index=index) for index in range(2))
    plan = a_plan(1, 1, num_sections=2, virtual_nodes=8, slots=slots, tensor_parallel=2)
    divided = replace(story.generation, plan=plan)
    after = ranker.rank(changed(story.state, current_generation=divided), (OFFER, large), CALM)
    assert after is not None
    assert after[offer_key(OFFER)].examples_per_usd == 0
    assert after[offer_key(large)].examples_per_usd > 0


def test_an_unchanged_market_is_not_ranked_again() -> None:
    state, ranker = trained("a", "b"), OfferRanker()
    assert ranker.rank(state, (OFFER,), CALM) is not None
    assert ranker.rank(state, (OFFER,), CALM) is None


def test_new_hazards_are_looked_at_wherever_they_lie_in_memory() -> None:
    state, ranker = trained("a", "b"), OfferRanker()
    for _ in range(20):  # each in place of the one before, which nobody else holds
        assert ranker.rank(state, (OFFER,), Hazards((), {})) is not None
    pricier = replace(OFFER, usd_per_hour=2.0)
    assert ranker.rank(state, (pricier,), CALM) is not None


def test_interruptions_that_were_seen_make_an_offer_worth_less() -> None:
    rough = Hazards([ObservedHours(place=PLACE, vm_hours=1.0, losses=500)], {})
    state = trained("a", "b")
    calm, seen = (OfferRanker().rank(state, (OFFER,), h) for h in (CALM, rough))
    assert calm is not None
    assert seen is not None
    key = offer_key(OFFER)
    assert seen[key].examples_per_usd < 0.9 * calm[key].examples_per_usd


def test_predictions_are_corrected_by_what_was_measured() -> None:
    # Predicted 1 s on a pipeline of two VMs, and a second is what its steps take.
    state = trained("a", "b")
    timed = replace(View(state).generation, measured_step_s=4.0, timed=TRUSTED_STEPS)
    slower = changed(state, current_generation=timed)
    few = changed(state, current_generation=replace(timed, timed=TRUSTED_STEPS - 1))
    key = offer_key(OFFER)
    right, slow, unsure = (OfferRanker().rank(one, (OFFER,), CALM) for one in (state, slower, few))
    assert right is not None
    assert slow is not None
    assert unsure is not None
    share = slow[key].examples_per_usd / right[key].examples_per_usd
    assert share == pytest.approx(0.25, rel=0.01)
    assert unsure[key] == right[key]


def test_a_hiccup_hardly_changes_a_correction_but_what_lasts_does() -> None:
    state = trained("a", "b")
    generation = View(state).generation
    usual_s = generation.measured_step_s
    assert usual_s is not None
    slow = replace(generation, measured_step_s=4 * usual_s)
    key, ranker = offer_key(OFFER), OfferRanker()
    usual = ranker.rank(state, (OFFER,), CALM)
    assert usual is not None

    def share(after_s: float) -> float:
        later = replace(state, now_s=state.now_s + after_s)
        later = changed(later, current_generation=slow)
        worths = ranker.rank(later, (OFFER,), CALM)
        assert worths is not None
        return worths[key].examples_per_usd / usual[key].examples_per_usd

    assert share(2.0) > 0.9
    assert share(600.0) == pytest.approx(0.25, rel=0.02)


def test_free_machines_can_be_compared() -> None:
    free = replace(OFFER, usd_per_hour=0.0)
    fast = replace(free, zone="fast", gpu_speed=2.0)
    worths = OfferRanker().rank(trained("a", "b"), (free, fast), CALM)
    assert worths is not None
    assert in_order((free, fast), worths) == (fast, free)
