"""How many VMs of an offer the quotas of an account allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from spottrain.cloud.port.provider import ANY_FAMILY, Offer, Quota
from spottrain.pricing.prices.catalogue import Catalogue
from spottrain.pricing.ranking.cooldowns import scope_of

_TINY = 1e-9


def with_quotas(
    offers: Iterable[Offer],
    quotas: Sequence[Quota],
    facts: Catalogue,
    *,
    unused: bool = False,
) -> list[Offer]:
    """Return offers with the number of VMs that quotas allow of each, if only it is rented.

    Args:
        offers: Of one cloud.
        quotas: Of that cloud's account, as far as it reports them.
        facts: The catalogue, which knows what a machine counts.
        unused: Count what is left now, not what the quotas allow altogether.
    """
    return [
        replace(offer, quota_vms=min(_bounds(offer, quotas, facts, unused), default=None))
        for offer in offers
    ]


def _bounds(offer: Offer, quotas: Sequence[Quota], facts: Catalogue, unused: bool) -> list[float]:
    kind = facts.find(offer.cloud, offer.instance_type)
    here = [quota for quota in quotas if quota.region in ("", offer.region)]
    # Those of all regions together count every GPU.
    shared = [q for q in here if q.family == ANY_FAMILY or not q.region]
    named = offer.family.casefold()
    family = [q for q in here if q not in shared and q.family.casefold() == named]
    own = [q for q in family if q.spot == offer.spot]
    if not own and offer.spot:
        own = family  # without a quota of their own spot VMs count as on demand
    bounds = []
    for quota in (*own, *shared):
        counted = 1 if quota.unit == "vm" else 0
        if kind is not None and quota.unit != "vm":
            counted = kind.vcpus if quota.unit == "vcpu" else kind.gpus
        if counted:
            free = quota.limit - (quota.used or 0.0 if unused else 0.0)
            bounds.append(max(0.0, free) / counted)
    return bounds


def quota_left(offers: Iterable[Offer], rented: Mapping[Offer, int]) -> Callable[[Offer], float]:
    """Return a function: how many more VMs of an offer its family's quota allows.

    VMs of several types share a quota. One VM may always be asked for where there is none
    yet: the quota may have grown, and a refusal says what to do.

    Args:
        offers: Known ones, with quotas.
        rented: VMs that are rented or asked for, by offer.
    """
    share = {_kind(o): 1 / max(o.quota_vms, _TINY) for o in offers if o.quota_vms}
    held: dict[str, list[tuple[tuple[str, ...], int]]] = {}
    for offer, count in rented.items():
        held.setdefault(scope_of(offer, "quota"), []).append((_kind(offer), count))

    def left(offer: Offer) -> float:
        if offer.quota_vms is None:
            return float("inf")
        own = held.get(scope_of(offer, "quota"), [])
        used = sum(count * share.get(kind, 0.0) for kind, count in own)
        more = int(max(0.0, offer.quota_vms * (1 - used)) + _TINY)
        return more if any(count for _, count in own) else max(1, more)

    return left


def _kind(offer: Offer) -> tuple[str, ...]:
    return offer.cloud, offer.region, offer.instance_type, str(offer.spot)
