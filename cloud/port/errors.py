"""Cloud errors, one for each reaction of the caller.

CloudError              unknown: never read as "no capacity"
├── NoCapacityError     (zone, instance type) is sold out: cool down, try another offer
├── QuotaExceededError  (region, family): ask for less or elsewhere
│   └── RegionQuotaError    (region), of disks or addresses: whatever the type
├── PriceTooHighError   the market price rose above the bid
├── AuthError           credentials are missing or refused: tell the user
│   └── LoginExpiredError   read the login anew: a person may have renewed it
├── MisconfiguredError  a requested resource does not exist or fit: tell the user
├── ThrottledError      wait ``retry_after_s``
│   └── QueuedError         what was asked for waits for its turn: ask again, or withdraw it
└── VmNotFoundError     the VM is unknown or has ended
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spottrain.errors import SpottrainError


class CloudError(SpottrainError):
    """A cloud refused, for a reason that we cannot act on."""

    exit_code = 6


class NoCapacityError(CloudError):
    """The zone has no machine of this type left."""

    exit_code = 5


class QuotaExceededError(CloudError):
    """The account may not rent more of this family in this region."""


class RegionQuotaError(QuotaExceededError):
    """The account may not have more disks or addresses in this region."""


class PriceTooHighError(CloudError):
    """The market price is above the bid."""


class AuthError(CloudError):
    """Credentials are missing, expired or refused."""


class LoginExpiredError(AuthError):
    """The login has expired, and could not be renewed without a person."""


class MisconfiguredError(CloudError):
    """An image, type, network or setting does not exist or does not fit."""


class ThrottledError(CloudError):
    """Too many calls.

    Args:
        message: One line.
        retry_after_s: How long to wait before the next try.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueuedError(ThrottledError):
    """VMs of the launch wait in the cloud's queue; ``list_vms`` has them, too."""


class VmNotFoundError(CloudError):
    """The VM is unknown or has ended."""


@contextmanager
def undecided() -> Iterator[None]:
    """Let no error about VMs that may exist read as their refusal, such as an expired login's.

    Raises:
        ThrottledError: the cloud asks to wait.
        CloudError: the outcome is unknown; retry.
    """
    try:
        yield
    except CloudError as error:
        if type(error) in (CloudError, ThrottledError):
            raise
        raise CloudError(f"{error}; will be retried") from error
