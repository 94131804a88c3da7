"""What offers are worth to a job: the ranking, from the manager's state."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import Offer
from spottrain.pricing.deadline.model import Fleet
from spottrain.pricing.prices.catalogue import CLOUDS, catalogue
from spottrain.pricing.prices.hazard import Hazards
from spottrain.pricing.prices.place import Place, offer_key, place_of
from spottrain.pricing.ranking.gpu_speed import (
    gpu_of,
    gpu_speed,
    machine_as_offered,
    seconds,
    work_of,
)
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.pricing.ranking.order import FREE_USD, OfferWorth, in_order
from spottrain.pricing.ranking.rank import Priced, RankedOffer, RankingTerms, rank
from spottrain.pricing.ranking.throughput import ThroughputCache
from spottrain.units import HOUR_S
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.core.model.state import State, kind_of, settled_numerics
from spottrain.varuna_manager.core.planning import MORPH_COST_S, plan_inputs
from spottrain.varuna_manager.offers import market
from spottrain.wire.model import Profile
from spottrain.wire.numerics import Numerics

SAFE_SHARE = 0.95
"""Share of a fleet's predicted throughput that the deadline policy counts on."""
TRUSTED_STEPS = 5
"""Mini-batches that a plan must have run before its step time corrects predictions."""
SMOOTHING_S = 60.0
"""Time constant of the exponential smoothing of corrections: decisions must not change with
every hiccup."""

ROOFLINE_SHARE = 0.4
"""Assumed share of its roofline that a GPU reaches, until the model was measured."""

Kind = tuple[str, str]
"""Cloud and instance type."""


class OfferRanker:
    """Ranks what a job could rent, corrected by what the job has measured."""

    def __init__(self) -> None:
        self._profile: Profile | None = None
        self._settled = Numerics()
        self._throughputs: ThroughputCache | None = None
        self._corrections: dict[Kind, float] = {}
        self._measured: dict[Kind, tuple[float, float]] = {}
        """Predicted over measured step time, smoothed, and as of when."""
        self._boots_s: dict[Kind, float] = {}
        self._base: market.MeasuredOn | None = None
        self._last: object = None

    def rank(
        self, state: State, offers: Sequence[Offer], hazards: Hazards
    ) -> Mapping[str, OfferWorth] | None:
        """Return what offers are worth to the job, by ``offer_key``.

        Args:
            state: The manager's.
            offers: What can be rented now.
            hazards: Interruption rates.

        Returns:
            None if nothing that matters has changed since the last time. Before there is
            a profile that such machines can be compared with: by rooflines, or None
            if a GPU is not in the catalogue.

        Raises:
            PlanError: No plan can be made from the profile, whatever the machines.
        """
        profile = _profile_of(state)
        if profile is None or not _can_compare(profile, offers):
            return self._by_peaks(state, offers)
        self._learn(state)
        terms = self._terms(state)
        asked = (
            {offer_key(offer): offer.usd_per_hour for offer in offers},
            hazards,
            replace(terms, examples=1.0),
            dict(self._boots_s),
        )
        settled = settled_numerics(state)
        known = profile is self._profile and settled == self._settled
        if not known or self._throughputs is None:
            self._profile, self._settled = profile, settled
            self._throughputs = ThroughputCache(plan_inputs(state.job, profile, numerics=settled))
        elif asked == self._last:
            return None
        self._last = asked
        priced = [self._priced(o, state, profile, hazards) for o in offers]
        ranking = rank(priced, self._throughputs, terms)
        worths = map(_worth, ranking.rows)
        return {worth.offer: worth for worth in worths}

    def _by_peaks(self, state: State, offers: Sequence[Offer]) -> Mapping[str, OfferWorth] | None:
        """Return what offers are worth by the rooflines of GPUs alone."""
        asked = {offer_key(offer): offer.usd_per_hour for offer in offers}
        rates = [_peak_rate(offer, state) for offer in offers]
        if asked == self._last or None in rates:
            return None
        self._last = asked
        return {
            offer_key(offer): OfferWorth(
                offer=offer_key(offer),
                examples_per_usd=rate / max(offer.usd_per_hour, FREE_USD),
                usd_per_hour=max(offer.usd_per_hour, FREE_USD),
            )
            for offer, rate in zip(offers, rates, strict=True)
            if rate is not None and math.isfinite(offer.usd_per_hour)
        }

    def fleet_terms(
        self,
        state: State,
        offers: Sequence[Offer],
        hazards: Hazards,
        *,
        elsewhere: bool = False,
    ) -> FleetTerms | None:
        """Return the throughput of fleets of the kind of machine that the job has or
        should have.

        Args:
            state: The manager's.
            offers: What can be rented now.
            hazards: Interruption rates.
            elsewhere: Of the best other kind instead, to which the job could move.

        Returns:
            None before anything was ranked, or where nothing trains the job.

        Raises:
            PlanError: No plan can be made from the profile, whatever the machines.
        """
        profile, throughputs = self._profile, self._throughputs
        if profile is None or throughputs is None:
            return None
        of_kind = _of_one_kind(state, offers, elsewhere=elsewhere)
        if not of_kind:
            return None
        priced = [self._priced(o, state, profile, hazards) for o in of_kind]
        first = priced[0]
        if first.machine is None:
            return None
        share = SAFE_SHARE * self._terms(state).correction(first.place)
        rates = _rates(throughputs, first.machine, state.job.resources.max_vms, share)
        if not rates[-1]:
            return None
        morph_s = state.history.progress.morph_cost_s or MORPH_COST_S
        return FleetTerms(
            cloud=first.offer.cloud,
            instance_type=first.offer.instance_type,
            fleet=Fleet(
                examples_per_s=tuple(float(f"{rate:.3g}") for rate in rates),
                boot_s=float(f"{first.boot_s:.2g}"),
                morph_s=float(f"{morph_s:.1g}"),
                lost_s=float(f"{2 * morph_s:.1g}"),
            ),
            losses_per_hour={
                offer_key(one.offer): float(f"{one.losses_per_hour:.2g}")
                for one in priced
                if one.offer.spot
            },
        )

    def fleet_rates(
        self, state: State, offers: Sequence[Offer], hazards: Hazards, max_vms: int
    ) -> dict[str, list[float]]:
        """Return examples per second of homogeneous fleets by size, from 0; by ``kind_of``.

        As planned and corrected by what the job has measured; before it was measured, by the
        rooflines of GPUs, as if fleets of any size trained alike.

        Raises:
            PlanError: No plan can be made from the profile, whatever the machines.
        """
        self.rank(state, offers, hazards)
        profile, throughputs = self._profile, self._throughputs
        terms, found = self._terms(state), dict[str, list[float]]()
        for offer in offers:
            if (kind := kind_of(offer)) in found:
                continue
            if profile is None or throughputs is None:
                each = ROOFLINE_SHARE * (_peak_rate(offer, state) or 0.0)
                found[kind] = [each * n for n in range(max_vms + 1)]
                continue
            priced = self._priced(offer, state, profile, hazards)
            if priced.machine is not None:
                share = terms.correction(priced.place)
                found[kind] = _rates(throughputs, priced.machine, max_vms, share)
        return found

    def _priced(self, offer: Offer, state: State, profile: Profile, hazards: Hazards) -> Priced:
        kind = offer.cloud, offer.instance_type
        base = self._measured_on(state, profile)
        if offer.cloud in CLOUDS and base is not None:
            priced = market.priced_offer(offer, base, hazards)
        else:
            spec = state.job.spec
            speed = gpu_speed(offer, profile, state.job.facts, spec.precision)
            priced = Priced(
                offer=offer,
                machine=machine_as_offered(offer, offer.gpus, speed),
                losses_per_hour=market.losses_per_hour(offer, hazards),
                losses_basis=market.losses_basis(offer, hazards),
                obtainability=market.obtainability(offer, hazards),
                boot_s=market.BOOT_S if offer.cloud in CLOUDS else 0.0,
            )
        return replace(priced, boot_s=self._boots_s.get(kind, priced.boot_s))

    def _measured_on(self, state: State, profile: Profile) -> market.MeasuredOn | None:
        """Return what speeds are relative to; None if it is not in the catalogue."""
        others = tuple(known.profile for known in state.preparation.known_profiles)
        before = self._base
        if before is None or before.profile is not profile or before.others != others:
            gpu = catalogue().gpu_of(profile.device)
            if gpu is None:
                return None
            work = work_of(state.job.facts, state.job.spec.precision, profile)
            self._base = market.MeasuredOn(gpu=gpu, work=work, profile=profile, others=others)
        return self._base

    def _terms(self, state: State) -> RankingTerms:
        terms = ranking_terms(
            state.job,
            steps_done=state.history.progress.step,
            morph_s=state.history.progress.morph_cost_s,
        )
        return replace(terms, held=_held(state), corrections=dict(self._corrections))

    def _learn(self, state: State) -> None:
        """Learn the step time of the present plan, and how long VMs took to boot."""
        booted: dict[Kind, list[float]] = {}
        for vm in state.fleet.vms.values():
            if vm.ready_at_s is not None and not tags.order_of(vm.intent):
                kind = vm.offer.cloud, vm.offer.instance_type
                booted.setdefault(kind, []).append(vm.ready_at_s - vm.launched_at_s)
        for kind, times_s in booted.items():
            self._boots_s[kind] = max(0.0, statistics.median(times_s))
        generation = state.training.generation
        if generation is None or generation.timed < TRUSTED_STEPS:
            return
        ids = {slot.vm_id for slot in generation.plan.slots} & state.fleet.vms.keys()
        offers = [state.fleet.vms[vm_id].offer for vm_id in ids]
        kinds = {(offer.cloud, offer.instance_type) for offer in offers}
        measured_s = generation.measured_step_s
        if len(kinds) == 1 and measured_s:
            (kind,) = kinds
            ratio = generation.plan.predicted_step_s / measured_s
            before, at_s = self._measured.get(kind, (ratio, state.now_s))
            kept = math.exp(min(0.0, at_s - state.now_s) / SMOOTHING_S)
            ratio = before**kept * ratio ** (1 - kept)
            self._measured[kind] = ratio, state.now_s
            # Two digits: what changes less often is reported less often.
            self._corrections[kind] = float(f"{ratio:.2g}")


def _of_one_kind(state: State, offers: Sequence[Offer], *, elsewhere: bool) -> list[Offer]:
    """Return the offers of the kind of most VMs; without VMs, of the best kind; or those of
    the best other kind."""
    kinds = Counter((vm.offer.cloud, vm.offer.instance_type) for vm in state.fleet.training)
    ranked = [(o.cloud, o.instance_type) for o in in_order(offers, state.market.worths)]
    kind = max(kinds, key=lambda one: (kinds[one], one), default=next(iter(ranked), None))
    if elsewhere:
        kind = next((other for other in ranked if other != kind), None)
    return [o for o in offers if (o.cloud, o.instance_type) == kind]


def _rates(
    throughputs: ThroughputCache, machine: MachineShape, max_vms: int, share: float
) -> list[float]:
    """Return ``share`` of the throughput of fleets by size, from 0; it never falls.

    Of the small sizes all are planned, of the large ones ever fewer.
    """
    rates = [0.0]
    while (size := len(rates) - 1) < max_vms:
        step = min(max_vms, size + 1 + size // 8) - size
        throughput = throughputs.of(machine, size + step)
        rates += [rates[-1]] * (step - 1)
        rates.append(max(rates[-1], share * throughput.examples_per_s))
    return rates


def _worth(row: RankedOffer) -> OfferWorth:
    offer, worth, value = row.priced.offer, row.worth, 0.0
    if worth is not None:
        value = worth.examples_per_usd
        if math.isinf(value):
            value = worth.net_examples_per_s * HOUR_S / FREE_USD / row.vms
    return OfferWorth(
        offer=offer_key(offer),
        examples_per_usd=value,
        usd_per_hour=max(offer.usd_per_hour, FREE_USD),
    )


def _profile_of(state: State) -> Profile | None:
    """Return the job's profile; before it is measured, the newest kept one of its model."""
    if state.preparation.profile is not None:
        return state.preparation.profile
    newest = next(iter(state.preparation.known_profiles), None)
    return None if newest is None else newest.profile


def _can_compare(profile: Profile, offers: Sequence[Offer]) -> bool:
    """Return whether the speeds of all offers relative to the profile's device are known."""
    known = catalogue().gpu_of(profile.device) is not None
    return known or not any(offer.cloud in CLOUDS for offer in offers)


def _peak_rate(offer: Offer, state: State) -> float | None:
    """Return the rate of a machine's GPUs by their rooflines, in proportion; 0 if a fleet
    of them cannot hold the model."""
    gpu = gpu_of(offer)
    if gpu is None:
        return None
    each_s = seconds(gpu, work_of(state.job.facts, state.job.spec.precision))
    if each_s is None:
        return None
    kind = catalogue().find(offer.cloud, offer.instance_type)
    gpus = offer.gpus if kind is None else kind.gpus
    # What a host of the user's has of its own is not known: it is no limit.
    host_bytes = math.inf if kind is None else kind.memory_bytes
    homes = {"host": host_bytes, "device": gpus * gpu.memory_bytes}
    asked = settled_numerics(state).state
    room_bytes = max(homes.values()) if asked is None else homes[asked]
    fits = state.job.facts.stored_bytes(1) <= state.job.resources.max_vms * room_bytes
    return gpus / each_s if fits else 0.0


def _held(state: State) -> Place | None:
    """Return the place of most VMs of the fleet."""
    places = Counter(place_of(vm.offer) for vm in state.fleet.vms.values() if vm.counts)
    return max(places, key=lambda place: (places[place], place), default=None)


def ranking_terms(
    job: JobSettings, *, steps_done: int = 0, morph_s: float | None = None
) -> RankingTerms:
    """Return what a job's offers are ranked by, as far as its settings say.

    Args:
        steps_done: Mini-batches that are committed.
        morph_s: Measured cost of a morph; None: none was measured.
    """
    spec = job.spec
    return RankingTerms(
        examples=float(max(1, spec.steps - steps_done) * spec.minibatch_size),
        max_vms=job.resources.max_vms,
        min_vms=job.resources.min_vms,
        max_usd_per_hour=job.budget.max_usd_per_hour,
        allow_on_demand=job.resources.allow_on_demand,
        morph_s=morph_s or MORPH_COST_S,
        lag_steps=spec.checkpoint_every_steps / 2 or None,
        stored_bytes=float(job.facts.stored_bytes(spec.checkpoint_keep)),
        storage_usd_per_gb_month=job.budget.storage_usd_per_gb_month,
        zone_usd_per_gb=job.budget.zone_usd_per_gb,
        data_bytes=job.data_bytes,
    )
