"""What a cloud's refusal to rent means to the core."""

from __future__ import annotations

from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    MisconfiguredError,
    NoCapacityError,
    PriceTooHighError,
    QuotaExceededError,
    ThrottledError,
)
from spottrain.varuna_manager.core.model.events import RefusalKind

RETRY_S = 5.0
"""When to ask again where the cloud does not say."""

_REFUSALS: dict[type[CloudError], RefusalKind] = {
    NoCapacityError: "no_capacity",
    QuotaExceededError: "quota",
    PriceTooHighError: "price",
    AuthError: "auth",
    MisconfiguredError: "misconfigured",
    ThrottledError: "throttled",
}


def refusal_of(error: CloudError) -> RefusalKind:
    """Return the kind of a refusal; an error that says nothing of why is ``unknown``."""
    return _REFUSALS.get(type(error), "unknown")


def retry_after_s(error: CloudError) -> float:
    """Return how many seconds to wait before asking again."""
    return error.retry_after_s if isinstance(error, ThrottledError) else RETRY_S
