"""Which VMs to rent next: ``next_launch`` decides, everything else here is what it asks.

No function here changes the state. What is asked may change by itself when time passes;
``changes_at_s`` says when, and whoever decides by it has the core woken then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.billing import egress
from spottrain.pricing.deadline.model import Holdings
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.place import Place, offer_key
from spottrain.pricing.ranking import cooldowns
from spottrain.pricing.ranking.order import in_order
from spottrain.pricing.ranking.quotas import quota_left
from spottrain.varuna_manager.core.model.records import (
    LaunchChoice,
    PassedOver,
    VmRecord,
)
from spottrain.varuna_manager.core.model.state import (
    State,
    budgets,
    held_by_kind,
    is_expecting,
    is_unfit,
    kind_of,
    places_by_kind,
    settled_numerics,
)
from spottrain.varuna_manager.format import clock

OFFER_LAG_S = 10.0
"""How long an offer's count may lag behind the VMs that we took from it."""


PASSED_OVER = 5
"""Offers of which is kept why they were not rented."""
CHEAPER = 0.1
"""Share by which the cheapest offer must have become cheaper before more VMs are rented,
once some were returned that the plan did not use."""


_INTENT = "intent-"


def next_intent(state: State) -> str:
    """Return the name of the next launch intent."""
    launches = state.launches
    moved = f"{launches.takeover_epoch}-" if launches.takeover_epoch else ""
    return f"{_INTENT}{moved}{launches.next_intent}"


def epoch_of(intent: str) -> int:
    """Return the epoch of the takeover after which an intent was; 0: there was none."""
    epoch = intent.removeprefix(_INTENT).rpartition("-")[0]
    return int(epoch) if epoch.isdecimal() else 0


def cheapest_usd_per_hour(state: State) -> float:
    """Return the lowest price on offer; infinite if there are no offers."""
    return min((offer.usd_per_hour for offer in state.market.offers), default=math.inf)


def room(state: State) -> int:
    """Return how many more VMs may be asked for; see ``VmRecord.counts``.

    Against a pool's grant every VM counts that is billed: others may not hold it too.
    During a move as many as it is to have first; those that it leaves do not count.
    """
    move, best, limit = state.fleet.move, state.fleet.size_limit, state.most_vms
    if move is not None and not move.is_cut_over:
        return move.new_vms - _count(state)
    if best is not None:
        limit_usd_per_hour = (1 - CHEAPER) * best.usd_per_hour
        if cheapest_usd_per_hour(state) >= limit_usd_per_hour:
            limit = min(limit, best.vms)
    if state.job.grant is not None:
        return limit - (held_by_kind(state) + places_by_kind(state)).total()
    return limit - _count(state)


def within_grant(state: State) -> Callable[[Offer], int]:
    """Return a function: how many more VMs of an offer's kind a pool's grant allows."""
    grant, max_vms = state.job.grant, state.job.resources.max_vms
    if grant is None:
        return lambda offer: max_vms
    granted = dict(grant.vms)
    held = held_by_kind(state) + places_by_kind(state)
    return lambda offer: granted.get(kind := kind_of(offer), 0) - held[kind]


def _count(state: State) -> int:
    """Return how many VMs count towards ``max_vms``, launches in flight included."""
    intents = state.launches.intents.values()
    return sum(vm.counts for vm in state.fleet.vms.values()) + sum(one.missing for one in intents)


def choice_of(state: State, offer: Offer) -> LaunchChoice:
    """Return what is kept of a decision for an offer: what the best others lacked."""
    order = in_order(state.market.offers, state.market.worths)
    keys = [offer_key(one) for one in order]
    place = keys.index(offer_key(offer))
    others = [at for at in range(len(order)) if at != place]
    passed_over = []
    for at in others[:PASSED_OVER]:
        why = why_not(state, order[at])
        if not why:
            why = "ranked lower" if at > place else "chosen by spread, location or caps"
        passed_over.append(_passed_over(state, order[at], why))
    return LaunchChoice(
        examples_per_usd=examples_per_usd(state, offer),
        is_ranked=any(worth.examples_per_usd for worth in state.market.worths.values()),
        passed_over=tuple(passed_over),
        others=len(others),
    )


def _passed_over(state: State, offer: Offer, why: str) -> PassedOver:
    return PassedOver(
        instance_type=offer.instance_type,
        zone=offer.zone,
        spot=offer.spot,
        usd_per_hour=offer.usd_per_hour,
        examples_per_usd=examples_per_usd(state, offer),
        why=why,
    )


def passed_over(state: State) -> tuple[PassedOver, ...]:
    """Return the best offers that the job may not rent now, and why."""
    best = in_order(state.market.offers, state.market.worths)[:PASSED_OVER]
    return tuple(
        _passed_over(state, offer, why) for offer in best if (why := why_not(state, offer))
    )


def examples_per_usd(state: State, offer: Offer) -> float | None:
    """Return what an offer is worth at its price; None if it was not ranked."""
    worth = state.market.worths.get(offer_key(offer))
    return None if worth is None else worth.at(offer.usd_per_hour)


def why_not(state: State, offer: Offer) -> str:
    """Return what keeps the job from renting an offer; empty: none of the rules of
    ``next_launch`` but its rank."""
    opens_s = opens_at_s(state, offer)
    if not offer.spot and not state.job.resources.allow_on_demand:
        return "on-demand VMs are not allowed"
    if not _holds_group(state, offer):
        size = settled_numerics(state).tensor_parallel
        return f"of one VM {size} slots divide matrices, it has {offer.gpus}"
    if not _has_kernels(state, offer):
        return f"rounds differently from {state.launches.kernels} that the job began on"
    if math.isinf(opens_s) and opens_s > 0:
        return "its VMs cannot run the job"
    if opens_s > state.now_s:
        return f"refused lately, asked again from {clock(opens_s)}"
    if (found := available(state, offer)) <= 0:
        return f"the cloud has none left ({max(found, 0)} available)"
    if affordable(state)(offer) <= 0:
        return _cap(state)
    if wanted_by_deadline(state)(offer) <= 0:
        return "not wanted by the deadline policy"
    if not is_at(state, home(state), offer):
        return "too far from the VMs that train"
    return ""


def _cap(state: State) -> str:
    """Return which cap an offer exceeds."""
    (money, *hours), job = budgets(state), state.job
    left = f"${money.spent.usd:.2f} spent at ${money.rate.usd_per_hour:g}/hour"
    left += "".join(f", {one.spent.usd:.2f} {one.unit}" for one in hours)
    caps = []
    if job.budget.max_usd is not None:
        caps.append(f"${job.budget.max_usd:g}")
    if job.budget.max_usd_per_hour is not None:
        caps.append(f"${job.budget.max_usd_per_hour:g}/hour")
    caps += [f"{job.budget.max_gpu_hours:g} {one.unit}" for one in hours]
    return f"over the cap of {' and '.join(caps) or 'the budget'} ({left})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NextLaunch:
    """What to rent next."""

    offer: Offer | None = None
    """None: nothing now."""
    count: int = 0
    changes_at_s: float | None = None
    """When to decide again though no event comes, see ``changes_at_s``."""


def next_launch(state: State, replacing: VmRecord | None = None) -> NextLaunch:
    """Decide what to rent next, and how many VMs of it.

    After VMs that came up and never trained, one at a time (``FailedStarts``). Every rule is
    applied here, in this order:

    1. Count (``room``, ``within_grant``): up to ``max_vms``, launches in flight included;
       while on-demand VMs take over for a deadline, a few more. Of each kind no more than
       a pool grants. After VMs were returned that the plan did not use, not before prices
       have fallen.
    2. Worth (``in_order``): the most examples per dollar first, as ``pricing.ranking``
       found; offers that the job cannot run on are left out.
    3. Availability (``available``): nothing on demand unless the job allows it, nothing
       that cools down after a refusal, and no more than the cloud has and the account's
       quotas allow (``quota_left``).
    4. Caps (``affordable``): no more than the hourly cap and the budget pay for.
    5. Deadline (``wanted_by_deadline``): no more than the deadline policy decided to have.
    6. Location (``_reachable``): where the other VMs are.
    7. Spread (``cooldowns.spread``): evenly over zones whose prices differ little.

    Args:
        state: The manager's.
        replacing: A VM that is to go once there is another one: the decision is about
            that one VM, whether or not the fleet is complete.
    """
    bound = replacing is None or state.job.grant is not None
    wanted = room(state) if bound else 1
    wanted = wanted if replacing is None else min(1, wanted)
    generation = state.training.generation
    done = generation is not None and generation.done
    if wanted <= 0 or (replacing is None and (done or not state.fleet.reconciled)):
        return NextLaunch()
    failing = state.launches.failing
    if failing is not None and failing.is_probing:
        if state.now_s < failing.opens_at_s:
            return NextLaunch(changes_at_s=failing.opens_at_s)
        if is_expecting(state) or any(vm.is_coming for vm in state.fleet.vms.values()):
            return NextLaunch()
        wanted = 1
    offers = in_order(state.market.offers, state.market.worths)
    affords, demand = affordable(state), wanted_by_deadline(state, replacing)
    left, granted = quota_left(state.market.offers, rented(state)), within_grant(state)
    counts: dict[str, int] = {}
    candidates: list[Offer] = []
    for offer in offers:
        count = min(wanted, available(state, offer), affords(offer), demand(offer))
        count = min(count, granted(offer))
        count = _within_quota(state, offer, count)
        count = int(min(count, left(offer)))
        if count > 0:
            counts[offer_key(offer)] = count
            candidates.append(offer)
    changes = changes_at_s(state, offers)
    candidates = _reachable(state, candidates)
    if not candidates:
        return NextLaunch(changes_at_s=changes)
    best = candidates[0]
    count, by_zone = counts[offer_key(best)], _held_by_zone(state)
    offer, count = cooldowns.spread(best, candidates, by_zone, count)
    count = min(count, counts[offer_key(offer)])
    return NextLaunch(offer=offer, count=count, changes_at_s=changes)


def held(state: State) -> tuple[Holdings, ...]:
    """Return the VMs that are rented or asked for, by offer."""
    ready: Counter[str] = Counter()
    booting: Counter[str] = Counter()
    for vm in state.fleet.vms.values():
        if vm.counts:
            (ready if vm.is_usable else booting)[offer_key(vm.offer)] += 1
    for intent in state.launches.intents.values():
        booting[offer_key(intent.offer)] += intent.missing
    return tuple(
        Holdings(name=name, ready=ready[name], booting=booting[name])
        for name in sorted({*ready, *booting})
    )


def wanted_by_deadline(state: State, replacing: VmRecord | None = None) -> Callable[[Offer], int]:
    """Return a function: how many more VMs of an offer the deadline policy wants.

    Before the throughput of fleets is known, on demand only what training takes to start.
    """
    have = {one.name: one.ready + one.booting for one in held(state)}
    move, decision = state.fleet.move, state.deadline.decision
    if move is not None and not move.is_cut_over:
        missing = move.new_vms - sum(have.values())
        return lambda offer: missing if offer_key(offer) == move.offer else 0
    if replacing is not None and replacing.counts:
        have[offer_key(replacing.offer)] -= 1
    if decision is not None:
        wanted = dict(decision.wanted)
        return lambda offer: wanted.get(key := offer_key(offer), 0) - have.get(key, 0)
    first = state.job.resources.min_vms - sum(have.values())
    has_slo, max_vms = state.job.has_slo, state.job.resources.max_vms
    return lambda offer: first if has_slo and not offer.spot else max_vms


def opens_at_s(state: State, offer: Offer) -> float:
    """Return from when on an offer may be asked for; infinite: never."""
    if not offer.spot and not state.job.resources.allow_on_demand:
        return math.inf
    if is_unfit(state, offer) or not _has_device(state, offer) or not _computes_alike(state, offer):
        return math.inf
    return cooldowns.open_at_s(state.launches.cooldowns, offer)


def _has_device(state: State, offer: Offer) -> bool:
    """Return whether the job trains on what a cloud's offer is rented for."""
    wanted = "cpu" if state.job.spec.device == "cpu" else "gpu"
    return offer.device in ("", wanted)


def _has_kernels(state: State, offer: Offer) -> bool:
    """Return whether a VM's GPUs are of the model that an exact job keeps, as far as is known."""
    kind = catalogue().find(offer.cloud, offer.instance_type)
    kernels = state.launches.kernels
    settled = catalogue().gpu_of(kernels) if kernels else None
    return kind is None or settled is None or kind.gpu.name == settled.name


def _holds_group(state: State, offer: Offer) -> bool:
    """Return whether a VM has the slots that divide matrices in every plan."""
    return offer.gpus >= (settled_numerics(state).tensor_parallel or 1)


def _computes_alike(state: State, offer: Offer) -> bool:
    """Return whether plans can have a VM, as far as it is settled what bits depend on."""
    return _holds_group(state, offer) and _has_kernels(state, offer)


def small_vms(state: State) -> tuple[VmRecord, ...]:
    """Return VMs that no plan can use, as they have fewer slots than divide matrices."""
    return tuple(vm for vm in state.fleet.vms.values() if not _holds_group(state, vm.offer))


def why_unlike(state: State) -> str:
    """Return which VMs the job keeps to that cannot be had now; empty: they can, or none can."""
    offers = [
        offer
        for offer in state.market.offers
        if offer.available != 0 and (offer.spot or state.job.resources.allow_on_demand)
        if cooldowns.open_at_s(state.launches.cooldowns, offer) <= state.now_s
    ]
    if not offers or any(_computes_alike(state, offer) for offer in offers):
        return ""
    if any(_holds_group(state, offer) for offer in offers):
        return (
            f"VMs that compute on {state.launches.kernels}, which reduction: exact keeps from the "
            "first VM on: none can be had; wait, or go on elsewhere with --adopt"
        )
    why = "as the job file says"
    if state.job.spec.reduction == "exact":
        why = "which reduction: exact keeps from the first plan on"
    size = settled_numerics(state).tensor_parallel
    return (
        f"VMs of {size} slots, that divide matrices, {why}: what can be had has "
        f"{max(offer.gpus for offer in offers)} at most; wait, or go on elsewhere with --adopt"
    )


def is_open(state: State, offer: Offer) -> bool:
    """Return whether the job may ask for an offer now."""
    return opens_at_s(state, offer) <= state.now_s


def changes_at_s(state: State, offers: Iterable[Offer]) -> float | None:
    """Return when the first of ``offers`` opens, or may have more VMs than we know of.

    A decision over them has to be made again then, though no event comes. None:
    nothing will change by itself.
    """
    times = []
    for offer in offers:
        opens_s = opens_at_s(state, offer)
        times.append(opens_s)
        if opens_s <= state.now_s and offer.available is not None:
            times += [vm.known_at_s + OFFER_LAG_S for vm in _unseen(state, offer)]
    coming = [at_s for at_s in times if state.now_s < at_s < math.inf]
    return min(coming, default=None)


def home(state: State) -> tuple[str, ...] | None:
    """Return the location (``location_of``) where VMs train together; None if there are none."""
    staying = [vm.offer for vm in state.fleet.vms.values() if vm.counts]
    coming = [intent.offer for intent in state.launches.intents.values()]
    return cooldowns.home_of([*staying, *coming], state.job.resources.span)


def is_at(state: State, where: tuple[str, ...] | None, offer: Offer) -> bool:
    """Return whether VMs of an offer can train with those at the location ``where``."""
    return where is None or cooldowns.location_of(offer, state.job.resources.span) == where


def reach_each_other(state: State, one: Place, other: Place) -> bool:
    """Return whether VMs of two places can train together."""
    span = state.job.resources.span
    return span == "any" or one[: 1 + (span == "region")] == other[: 1 + (span == "region")]


def at_home(state: State) -> tuple[VmRecord, ...]:
    """Return the VMs that can train together."""
    where = home(state)
    return tuple(vm for vm in state.fleet.vms.values() if is_at(state, where, vm.offer))


def must_move(state: State) -> bool:
    """Return whether too few VMs can train together, and there is room for no more."""
    here, enough = at_home(state), state.job.resources.min_vms
    is_enough = sum(vm.is_usable for vm in here) >= enough
    if is_enough or is_expecting(state) or room(state) > 0:
        return False
    return sum(vm.counts for vm in here) < enough


def stranded_vms(state: State) -> tuple[VmRecord, ...]:
    """Return VMs that cannot train with the others, once those are enough.

    Where the job must move, only those stay that are where more can be rented.
    """
    where, here = home(state), at_home(state)
    if sum(vm.is_usable for vm in here) < state.job.resources.min_vms:
        if not must_move(state):
            return ()
        best = in_order(state.market.offers, state.market.worths)
        offer = next((one for one in best if available(state, one) > 0), None)
        if offer is None:
            return ()
        where = cooldowns.location_of(offer, state.job.resources.span)
    elif len(here) == len(state.fleet.vms):
        return ()
    counting = (vm for vm in state.fleet.vms.values() if vm.counts)
    return tuple(vm for vm in counting if not is_at(state, where, vm.offer))


def _reachable(state: State, offers: list[Offer]) -> list[Offer]:
    """Return the offers where the other VMs are. If there are none, and those VMs are too
    few to train, all others: the job moves."""
    move = state.fleet.move
    if move is not None and not move.is_cut_over:
        return [one for one in offers if offer_key(one) == move.offer]
    where = home(state)
    near = [offer for offer in offers if is_at(state, where, offer)]
    here = sum(vm.counts for vm in at_home(state)) + sum(
        intent.missing
        for intent in state.launches.intents.values()
        if is_at(state, where, intent.offer)
    )
    return near if near or here >= state.job.resources.min_vms else offers


def _held_by_zone(state: State) -> Counter[str]:
    held = Counter(vm.offer.zone for vm in state.fleet.vms.values() if vm.counts)
    for intent in state.launches.intents.values():
        held[intent.offer.zone] += intent.missing
    return held


def available(state: State, offer: Offer) -> int:
    """Return how many VMs of an offer the job may ask for, as far as the cloud has said."""
    if offer.gpus < 1 or offer.gpu_speed <= 0 or not is_open(state, offer):
        return 0
    if offer.available is None:
        return state.job.resources.max_vms
    key = offer_key(offer)
    intents = state.launches.intents.values()
    asked = sum(intent.count for intent in intents if offer_key(intent.offer) == key)
    return offer.available - asked - len(_unseen(state, offer))


def rented(state: State) -> Counter[Offer]:
    """Return the VMs that count against quotas, launches in flight included."""
    found = Counter(vm.offer for vm in state.fleet.vms.values())
    for intent in state.launches.intents.values():
        found[intent.offer] += intent.missing
    return found


def _within_quota(state: State, offer: Offer, count: int) -> int:
    """Return how many of ``count`` VMs a quota that refused may give at once, launches in
    flight included."""
    for quota in cooldowns.QUOTAS:
        scope = cooldowns.scope_of(offer, quota)
        bound = cooldowns.max_batch(state.launches.cooldowns, scope, state.now_s)
        if math.isinf(bound):
            continue
        coming = (
            intent.count
            for intent in state.launches.intents.values()
            if cooldowns.scope_of(intent.offer, quota) == scope
        )
        count = min(count, int(bound) - sum(coming))
    return count


def _unseen(state: State, offer: Offer) -> list[VmRecord]:
    """Return VMs so new that an offer's count, as last seen, may still include them."""
    key = offer_key(offer)
    return [
        vm
        for vm in state.fleet.vms.values()
        if offer_key(vm.offer) == key
        and vm.known_at_s > state.market.offers_seen_at_s
        and vm.known_at_s + OFFER_LAG_S > state.now_s
    ]


def affordable(state: State) -> Callable[[Offer], int]:
    """Return a function: how many more VMs of an offer the hourly cap and budgets pay for.

    None where the fleet would still be too small to train: it would only cost.
    """
    (money, *hours), job = budgets(state), state.job
    missing = job.resources.min_vms - _count(state)

    def affords(offer: Offer) -> int:
        fetched = egress.fetched(job.data_bytes, offer.cloud)
        vms = money.affords(offer.usd_per_hour, job.resources.max_vms, fetched)
        vms = min([vms, *(one.affords(offer.gpus, vms) for one in hours)])
        return vms if vms >= missing else 0

    return affords
