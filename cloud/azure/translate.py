"""Translation of the Azure SDK's errors to ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spottrain.cloud.port import errors
from spottrain.errors import one_line

EXTRA_MISSING = (
    "Azure's SDK is not installed; run pip install azure-identity azure-mgmt-compute "
    "azure-mgmt-network azure-mgmt-resource"
)
_RETRY_AFTER_S = 10.0
_MAX_MESSAGE_CHARS = 300
"""Length limit of Azure's text in a message."""
_ATTEMPTS = ". Attempted credentials:"
"""What follows is a line for each of ten kinds of login; ``--debug`` shows them."""
_THROTTLED = 429
_QUOTA_WORDS = ("quota", "exceeding approved")

_POLICY = "RequestDisallowedByPolicy"
_POLICY_ADVICE = (
    "an Azure Policy forbids it: give the tags that it demands in azure.tags, or have the "
    "resource group excepted"
)

_CODES: dict[str, type[errors.CloudError]] = {
    "SkuNotAvailable": errors.NoCapacityError,
    "AllocationFailed": errors.NoCapacityError,
    "ZonalAllocationFailed": errors.NoCapacityError,
    "OverconstrainedAllocationRequest": errors.NoCapacityError,
    "OverconstrainedZonalAllocationRequest": errors.NoCapacityError,
    "NotAvailableForSubscription": errors.NoCapacityError,
    "AzureSpotIsNotSupportedForThisVMSize": errors.NoCapacityError,
    "SubnetIsFull": errors.NoCapacityError,
    "QuotaExceeded": errors.QuotaExceededError,
    "PublicIPCountLimitReached": errors.RegionQuotaError,
    "StaticPublicIPCountLimitReached": errors.RegionQuotaError,
    "ResourceGroupQuotaExceeded": errors.QuotaExceededError,
    "SpotPriceGreaterThanProvidedMaxPrice": errors.PriceTooHighError,
    "AuthenticationFailed": errors.AuthError,
    "AuthorizationFailed": errors.AuthError,
    "AuthorizationPermissionMismatch": errors.AuthError,
    "ExpiredAuthenticationToken": errors.LoginExpiredError,
    "InvalidAuthenticationToken": errors.LoginExpiredError,  # also: a wrong clock
    "InvalidAuthenticationTokenTenant": errors.AuthError,
    "LinkedAuthorizationFailed": errors.AuthError,
    "MissingSubscriptionRegistration": errors.AuthError,  # must be registered
    "ReadOnlyDisabledSubscription": errors.AuthError,
    "ScopeLocked": errors.AuthError,
    "SubscriptionNotFound": errors.AuthError,
    "AzureSpotFeatureNotEnabledForSubscription": errors.MisconfiguredError,
    "BadRequest": errors.MisconfiguredError,
    "ImageNotFound": errors.MisconfiguredError,
    "InvalidParameter": errors.MisconfiguredError,
    "InvalidRequestContent": errors.MisconfiguredError,
    "InvalidRequestFormat": errors.MisconfiguredError,
    "InvalidResourceGroupLocation": errors.MisconfiguredError,
    "InvalidResourceReference": errors.MisconfiguredError,
    "InvalidSubscriptionId": errors.MisconfiguredError,
    "LocationNotAvailableForResourceGroup": errors.MisconfiguredError,
    "MarketplacePurchaseEligibilityFailed": errors.MisconfiguredError,
    "MaxPriceValueInvalid": errors.MisconfiguredError,
    "NoRegisteredProviderFound": errors.MisconfiguredError,
    "PlatformImageNotFound": errors.MisconfiguredError,
    "PropertyChangeNotAllowed": errors.MisconfiguredError,
    "RequestDisallowedByAzure": errors.MisconfiguredError,  # not in this region
    _POLICY: errors.MisconfiguredError,
    "ResourceGroupNotFound": errors.MisconfiguredError,
    "ResourcePurchaseValidationFailed": errors.MisconfiguredError,
    "VMMarketplaceInvalidInput": errors.MisconfiguredError,
}
_QUOTAS = ("LimitExceeded", "LimitReached")
"""Suffixes of the codes of other quotas: addresses, networks, role assignments ..."""

_ADVICE: dict[type[errors.CloudError], str] = {
    errors.NoCapacityError: "another zone or type may have some",
    errors.QuotaExceededError: "ask Azure for a higher quota or rent elsewhere",
    errors.RegionQuotaError: "ask Azure for a higher quota, or do without addresses",
    errors.PriceTooHighError: "wait, or rent elsewhere",
    errors.LoginExpiredError: (
        "run 'az login', which the running manager finds, or set this machine's clock"
    ),
    errors.AuthError: "check the credentials, what they permit, and this machine's clock",
    errors.MisconfiguredError: "correct the job file",
}


def code_of(error: Exception) -> str:
    """Return Azure's code of an error, empty if there is none.

    Classes of errors are too coarse: any 409 is a ``ResourceExistsError``, and an
    operation that failed later has the status 200.
    """
    details: Any = getattr(error, "error", None)
    return str(getattr(details, "code", None) or "")


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error, 0 if Azure did not answer."""
    return int(getattr(error, "status_code", None) or 0)


def translate(error: Exception, doing: str) -> errors.CloudError:
    """Return our error; unknown codes become a plain ``CloudError``, never "no
    capacity".

    Args:
        error: azure-core's ``AzureError``.
        doing: The action, such as ``launching Standard_NC6s_v3 in eastus-1``.
    """
    from azure.core import exceptions as azure

    code, status = code_of(error), status_of(error)
    words = getattr(getattr(error, "error", None), "message", None)
    text = one_line(words or error).partition(_ATTEMPTS)[0]
    text = text[:_MAX_MESSAGE_CHARS]
    if isinstance(error, azure.ClientAuthenticationError) and not status:
        return errors.LoginExpiredError(f"Azure, {doing}: {text}; run 'az login'")
    if not status:
        return errors.CloudError(f"Azure cannot be reached, {doing}: {text}; will be retried")
    if status == _THROTTLED:
        retry_after_s = _retry_after_s(error)
        return errors.ThrottledError(
            f"Azure, {doing}: {code or status}: slow down for {retry_after_s:g} s",
            retry_after_s,
        )
    kind = _kind(code, text)
    if kind is errors.CloudError and isinstance(error, azure.ClientAuthenticationError):
        kind = errors.AuthError
    advice = _POLICY_ADVICE if code == _POLICY else _ADVICE.get(kind)
    return kind(f"Azure, {doing}: {code or status}: {text}" + (f"; {advice}" if advice else ""))


def _kind(code: str, text: str) -> type[errors.CloudError]:
    if code == "OperationNotAllowed":  # a quota, or any other refusal
        quota = any(words in text.lower() for words in _QUOTA_WORDS)
        return errors.QuotaExceededError if quota else errors.CloudError
    quota = code.endswith(_QUOTAS)
    return _CODES.get(code, errors.QuotaExceededError if quota else errors.CloudError)


def _retry_after_s(error: Exception) -> float:
    response: Any = getattr(error, "response", None)
    text = str(response.headers.get("Retry-After", "")) if response is not None else ""
    return float(text) if text.isdigit() else _RETRY_AFTER_S


@contextmanager
def translating_errors(doing: str) -> Iterator[None]:
    """Translate the SDK's errors to ours.

    Raises:
        CloudError: or a subclass, with a one-line message.
    """
    try:
        from azure.core.exceptions import AzureError
    except ImportError as error:
        raise errors.CloudError(EXTRA_MISSING) from error
    try:
        yield
    except AzureError as error:
        raise translate(error, doing) from error


def is_missing(error: Exception) -> bool:
    """Return True if a resource does not exist."""
    return status_of(error) == 404


def get_or_none(get: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a call, None if the resource does not exist."""
    from azure.core.exceptions import HttpResponseError

    try:
        return get(*args, **kwargs)
    except HttpResponseError as error:
        if not is_missing(error):
            raise
        return None
