"""What a job trains on fleets of each kind of VM: what a pool divides its VMs by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spottrain.cloud.port.provider import Offer
from spottrain.errors import CapacityError
from spottrain.morphing.errors import PlanError
from spottrain.pricing.prices.hazard import Hazards
from spottrain.units import counted
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.launch.submit import state_as_launched
from spottrain.varuna_manager.offers.ranker import OfferRanker
from spottrain.varuna_manager.pool.core.model import Throughputs
from spottrain.wire.model import ModelFacts, Profile


class JobThroughputs:
    """The throughputs of one job, corrected by what it measures.

    Args:
        kinds: The pool's kinds of VM, in its order.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = tuple(kinds)
        self._ranker = OfferRanker()

    def of(self, state: State, offers: Sequence[Offer]) -> Throughputs | None:
        """Return the throughputs, or None if nothing is known.

        Args:
            offers: What can be rented.
        """
        wanted = [o for o in offers if o.spot or state.job.resources.allow_on_demand]
        try:
            rates = self._ranker.fleet_rates(
                state, wanted, Hazards((), {}), state.job.resources.max_vms
            )
        except PlanError:
            return None  # the job's manager will say why
        table = tuple(
            growing(rates.get(kind, ()), state.job.resources.min_vms) for kind in self._kinds
        )
        return table if any(table) else None


def growing(rates: Sequence[float], min_vms: int) -> tuple[tuple[int, float], ...]:
    """Return the sizes of fleets that train more than any smaller one, with what they train."""
    found: list[tuple[int, float]] = []
    for size, rate in enumerate(rates):
        rounded = float(f"{rate:.3g}")
        if size >= min_vms and rounded > (found[-1][1] if found else 0.0):
            found.append((size, rounded))
    return tuple(found)


def first_throughputs(
    config: JobConfig,
    facts: ModelFacts,
    kinds: Sequence[str],
    offers: Sequence[Offer],
    profile: Profile | None,
    data_bytes: Mapping[str, float] | None = None,
) -> Throughputs:
    """Return what a job that is submitted is expected to train.

    Args:
        kinds: The pool's kinds of VM, in its order.
        offers: What can be rented.
        profile: Measured of the model; None: the newest that is kept, or rooflines.
        data_bytes: Bytes that each VM fetches, by the cloud that holds them.

    Raises:
        CapacityError: No VM of the pool can train it.
    """
    state = state_as_launched(config, facts, offers, profile, data_bytes)
    found = JobThroughputs(kinds).of(state, offers)
    if found is None:
        raise CapacityError(
            f"{config.name}: no plan trains it on at most {counted(config.resources.max_vms, 'VM')} of "
            f"{', '.join(kinds)}: it does not fit their memory, or GPUs are not known"
        )
    return found
