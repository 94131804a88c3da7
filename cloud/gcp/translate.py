"""Translation of the SDK's errors and of failed operations to our errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    LoginExpiredError,
    MisconfiguredError,
    NoCapacityError,
    QuotaExceededError,
    RegionQuotaError,
    ThrottledError,
    VmNotFoundError,
)
from spottrain.errors import one_line

EXTRA_MISSING = "google-cloud-compute is not installed; run pip install google-cloud-compute"
_RETRY_AFTER_S = 5.0
_MAX_MESSAGE_CHARS = 300
"""Length limit of Google's text in a message."""
_NOT_FOUND = 404
ALREADY_EXISTS = "alreadyExists"

_CODES: dict[str, type[CloudError]] = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": NoCapacityError,
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": NoCapacityError,
    "REGION_RESOURCE_POOL_EXHAUSTED": NoCapacityError,
    "STOCKOUT": NoCapacityError,
    "insufficientCapacity": NoCapacityError,
    "resourcesExhausted": NoCapacityError,
    "VM_MIN_COUNT_NOT_REACHED": NoCapacityError,
    "IP_SPACE_EXHAUSTED": NoCapacityError,
    "RESOURCE_NOT_FOUND": NoCapacityError,  # the zone does not have the type (any more)
    "UNSUPPORTED_OPERATION": NoCapacityError,  # preempted during its creation
    "QUOTA_EXCEEDED": QuotaExceededError,
    "QUOTA_LIMIT_EXCEEDED": QuotaExceededError,
    "LIMIT_EXCEEDED": QuotaExceededError,
    "quotaExceeded": QuotaExceededError,
    "limitExceeded": QuotaExceededError,
    "authError": LoginExpiredError,
    "required": AuthError,
    "forbidden": AuthError,
    "accessNotConfigured": AuthError,
    "billingNotEnabled": AuthError,
    "insufficientPermissions": AuthError,
    "IAM_PERMISSION_DENIED": AuthError,
    "PERMISSIONS_ERROR": AuthError,
    "FORBIDDEN": AuthError,
    "SERVICE_ACCOUNT_ACCESS_DENIED": AuthError,
    "conditionNotMet": MisconfiguredError,
    "invalid": MisconfiguredError,
    "invalidParameter": MisconfiguredError,
    "badRequest": MisconfiguredError,
    "INVALID_FIELD_VALUE": MisconfiguredError,
    "INVALID_USAGE": MisconfiguredError,
    "CONDITION_NOT_MET": MisconfiguredError,  # also: a policy of the organisation
    "EXTERNAL_RESOURCE_NOT_FOUND": MisconfiguredError,
    "SERVICE_ACCOUNT_NOT_FOUND": MisconfiguredError,
    "VPC_NOT_FOUND": MisconfiguredError,
    "rateLimitExceeded": ThrottledError,
    "userRateLimitExceeded": ThrottledError,
    "RATE_LIMIT_EXCEEDED": ThrottledError,
    "RESOURCE_OPERATION_RATE_EXCEEDED": ThrottledError,
    "operationRateExceeded": ThrottledError,
}
_SHARED_QUOTA = re.compile(r"'(\w*_TOTAL_GB|IN_USE_ADDRESSES)'")
"""Quotas that all machines of a region count against."""
_POLICY = re.compile(r"constraints/[\w.]+")
_POLICIES = {
    "constraints/compute.vmExternalIpAccess": (
        "your organisation allows no public addresses: set gcp.public_addresses: false "
        "and gcp.ssh_proxy: iap, in a subnet of yours with Cloud NAT"
    ),
    "constraints/compute.requireOsLogin": (
        "your organisation demands OS Login, but VMs are entered with the job's own key: "
        "have the project excepted from the policy"
    ),
}
_OTHER_POLICY = "have the project excepted from this policy of your organisation"
_STATUSES: dict[int, type[CloudError]] = {
    400: MisconfiguredError,
    401: LoginExpiredError,
    403: AuthError,
    429: ThrottledError,
}
"""By HTTP status, if the code is unknown."""
_SUMMARY = "VM_MIN_COUNT_NOT_REACHED"
"""Summary of a failed launch; another error may have the reason."""
_UNSETTLED = ("resourceNotReady", "resourceInUseByAnotherResource")
"""Transient, although the status says that the request is wrong."""

_ADVICE: dict[type[CloudError], str] = {
    NoCapacityError: "another zone or type may have some",
    QuotaExceededError: "ask Google for a higher quota or rent elsewhere",
    RegionQuotaError: "ask Google for a higher quota, or set a smaller gcp.disk_gib",
    LoginExpiredError: (
        "run 'gcloud auth application-default login', which the running manager finds, or "
        "set this machine's clock"
    ),
    AuthError: "check the credentials, their roles, and this machine's clock",
    MisconfiguredError: "correct the job file",
}


def code_of(error: Exception) -> str:
    """Return Google's code of an error, empty if Google did not answer."""
    return str(_first(error).get("reason", ""))


def _first(error: Exception) -> Mapping[str, Any]:
    errors: Sequence[Any] = getattr(error, "errors", ()) or ({},)
    return errors[0] if isinstance(errors[0], Mapping) else {}


def is_transient(error: Exception) -> bool:
    """Return True if a retry of the call may succeed."""
    import requests
    from google.api_core import exceptions as google
    from google.auth.exceptions import TransportError

    lost = (requests.ConnectionError, requests.Timeout, TransportError)
    broken = (
        google.TooManyRequests,
        google.InternalServerError,
        google.BadGateway,
        google.ServiceUnavailable,
        google.GatewayTimeout,
    )
    if isinstance(error, lost):
        return True
    kind = _CODES.get(code_of(error))
    return kind is ThrottledError or (kind is None and isinstance(error, broken))


def translate(error: Exception, doing: str) -> CloudError:
    """Return our error; unknown codes become a plain ``CloudError``, never "no
    capacity".

    Args:
        error: Of ``google.api_core``, ``google.auth`` or ``requests``.
        doing: The action, such as ``launching 2 a2-highgpu-1g in us-central1-a``.
    """
    from google.api_core import exceptions as google
    from google.auth import exceptions as auth

    if isinstance(error, google.RetryError) and isinstance(error.cause, Exception):
        return translate(error.cause, doing)
    if isinstance(error, google.GoogleAPICallError):
        return _refused(error, doing)
    text = _one_line(str(error))
    if isinstance(error, auth.GoogleAuthError) and not isinstance(error, auth.TransportError):
        return LoginExpiredError(
            f"GCP, {doing}: {text}; run 'gcloud auth application-default login'"
        )
    return CloudError(f"GCP cannot be reached, {doing}: {text}; will be retried")


def raise_failed(operation: Mapping[str, Any]) -> None:
    """Raise the most specific error of a failed operation.

    Raises:
        CloudError: or a subclass.
    """
    errors = operation.get("error", {}).get("errors", ())
    if not errors:
        return
    error = min(errors, key=_vagueness)
    code, message = error.get("code", ""), error.get("message", "")
    doing = str(operation.get("operation_type", "an operation"))
    raise _made(_CODES.get(code, CloudError), code, message, doing)


def _vagueness(error: Mapping[str, Any]) -> int:
    code = error.get("code", "")
    return 2 if code == _SUMMARY else int(code not in _CODES)


def _refused(error: Any, doing: str) -> CloudError:
    code, status = code_of(error), int(error.code or 0)
    message = str(_first(error).get("message", error.message))
    kind = _CODES.get(code)
    if kind is None and status == _NOT_FOUND:
        kind = VmNotFoundError if "/instances/" in message else MisconfiguredError
    if kind is None:
        kind = CloudError if code in _UNSETTLED else _STATUSES.get(status, CloudError)
    headers = getattr(error.response, "headers", None) or {}
    after = headers.get("Retry-After", "")
    retry_after_s = float(after) if after.isdigit() else _RETRY_AFTER_S
    return _made(kind, code or str(status), message, doing, retry_after_s)


def _made(
    kind: type[CloudError],
    code: str,
    message: str,
    doing: str,
    retry_after_s: float = _RETRY_AFTER_S,
) -> CloudError:
    if kind is ThrottledError:
        return ThrottledError(
            f"GCP, {doing}: {code}: slow down for {retry_after_s:g} s", retry_after_s
        )
    if kind is QuotaExceededError and _SHARED_QUOTA.search(message):
        kind = RegionQuotaError
    advice = _policy_advice(message) or _ADVICE.get(kind)
    text = f"GCP, {doing}: {code}: {_one_line(message)}"
    return kind(text + (f"; {advice}" if advice else ""))


def _policy_advice(message: str) -> str:
    """Return what to do about an organisation's policy; empty if it is about none."""
    found = _POLICY.search(message)
    return "" if found is None else _POLICIES.get(found[0], _OTHER_POLICY)


def _one_line(text: str) -> str:
    return one_line(text)[:_MAX_MESSAGE_CHARS]


@contextmanager
def translating_errors(doing: str) -> Iterator[None]:
    """Translate the SDK's errors to ours.

    Raises:
        CloudError: or a subclass, with a one-line message.
    """
    try:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException
    except ImportError as error:
        raise CloudError(EXTRA_MISSING) from error
    try:
        yield
    except (GoogleAPIError, GoogleAuthError, RequestException) as error:
        raise translate(error, doing) from error
