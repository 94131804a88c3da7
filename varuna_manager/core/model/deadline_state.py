"""What the manager knows of a job's promise: a deadline, or a least throughput."""

from __future__ import annotations

from dataclasses import dataclass, field

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.deadline.model import Fleet, FleetDecision
from spottrain.pricing.deadline.outlook import MarketOutlook


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTerms:
    """What fleets of one kind of machine do for the job."""

    cloud: str
    instance_type: str
    fleet: Fleet
    losses_per_hour: dict[str, float] = field(default_factory=dict)
    """By ``offer_key``, of one VM."""

    def is_for(self, offer: Offer) -> bool:
        """Whether an offer is of this kind."""
        return (offer.cloud, offer.instance_type) == (self.cloud, self.instance_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineState:
    """What was decided last, and what it was decided by."""

    terms: FleetTerms | None = None
    """None: not known yet."""
    outlook: MarketOutlook = field(default_factory=MarketOutlook)
    decision: FleetDecision | None = None
    """None: nothing is promised, or nothing is known."""
    seen: tuple[object, ...] = ()
    """What the decision depends on beside time: it is made anew when that changes."""
    review_at_s: float = 0.0
