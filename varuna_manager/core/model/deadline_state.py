"""What the manager knows about meeting a deadline or a minimum throughput."""

from __future__ import annotations

from dataclasses import dataclass, field

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.deadline.model import Fleet, FleetDecision
from spottrain.pricing.deadline.outlook import MarketOutlook
from spottrain.pricing.deadline.rolling import Rolling


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTerms:
    """The throughput of fleets of one kind of machine, and their interruptions.

    What the ranking of offers found out for the deadline policy; journalled with
    ``FleetRated``.
    """

    cloud: str
    instance_type: str
    fleet: Fleet
    losses_per_hour: dict[str, float] = field(default_factory=dict)
    """Interruptions of one VM to expect, by ``offer_key``."""

    def is_for(self, offer: Offer) -> bool:
        """Return whether an offer is of this kind."""
        return (offer.cloud, offer.instance_type) == (self.cloud, self.instance_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineState:
    """The newest decision of the deadline policy, and what it depends on."""

    terms: FleetTerms | None = None
    """None: not known yet."""
    elsewhere: FleetTerms | None = None
    """Of the best other kind of machine, where the job may move."""
    outlook: MarketOutlook = field(default_factory=MarketOutlook)
    decision: FleetDecision | None = None
    """None: the job has no such limits, or nothing is known."""
    rolling: Rolling | None = None
    """How forecasts since the limits were last changed have turned out; None: not yet."""
    limits: tuple[float | None, ...] = ()
    """The job's limits of time, throughput and money when it was first decided on them."""
    limits_examples: float = 0.0
    """Work that was left then."""
    limits_usd: float = 0.0
    """Money that had been spent then."""
    seen: tuple[object, ...] = field(default=(), compare=False)
    """What the decision depends on, time apart: it is made again when that changes, and by
    a manager that starts."""
    review_at_s: float = 0.0
    """When it is made again at the latest."""
