"""Translation of boto3's errors to ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    MisconfiguredError,
    NoCapacityError,
    PriceTooHighError,
    QuotaExceededError,
    ThrottledError,
    VmNotFoundError,
)

EXTRA_MISSING = "boto3 is not installed; run pip install 'spottrain[aws]'"
TOKEN_USED = ("IdempotentParameterMismatch", "IdempotentInstanceTerminated")
"""The launch token was used before: its VMs are found by their tags."""
GONE = ("InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed")
"""Also returned for VMs that were launched a moment ago."""
_RETRY_AFTER_S = 5.0
_MAX_MESSAGE_CHARS = 300
"""Length limit of AWS's text in a message."""

_CODES: dict[str, type[CloudError]] = {
    "InsufficientInstanceCapacity": NoCapacityError,
    "InsufficientHostCapacity": NoCapacityError,
    "InsufficientReservedInstanceCapacity": NoCapacityError,
    "InsufficientCapacity": NoCapacityError,
    "InsufficientFreeAddressesInSubnet": NoCapacityError,
    "UnfulfillableCapacity": NoCapacityError,
    "Unsupported": NoCapacityError,  # the zone has no machines of this type
    "MaxSpotInstanceCountExceeded": QuotaExceededError,
    "MaxFleetCountExceeded": QuotaExceededError,
    "SpotMaxPriceTooLow": PriceTooHighError,
    "AuthFailure": AuthError,
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": AuthError,
    "AccessDenied": AuthError,
    "AccessDeniedException": AuthError,
    "ExpiredToken": AuthError,
    "ExpiredTokenException": AuthError,
    "IncompleteSignature": AuthError,
    "InvalidClientTokenId": AuthError,
    "InvalidSignatureException": AuthError,
    "MissingAuthenticationToken": AuthError,
    "RequestExpired": AuthError,  # expired credentials, or a wrong clock
    "SignatureDoesNotMatch": AuthError,
    "UnauthorizedOperation": AuthError,
    "UnrecognizedClientException": AuthError,
    "AccountProblem": AuthError,
    "Blocked": AuthError,
    "PendingVerification": AuthError,
    "OptInRequired": MisconfiguredError,
    "InvalidParameter": MisconfiguredError,
    "InvalidParameterValue": MisconfiguredError,
    "InvalidParameterCombination": MisconfiguredError,
    "InvalidAMIID.Malformed": MisconfiguredError,
    "InvalidAMIID.NotFound": MisconfiguredError,
    "InvalidAMIID.Unavailable": MisconfiguredError,
    "InvalidKey.Format": MisconfiguredError,
    "InvalidZone": MisconfiguredError,
    "InvalidBlockDeviceMapping": MisconfiguredError,
    "InvalidAction": MisconfiguredError,
    "MissingParameter": MisconfiguredError,
    "UnsupportedOperation": MisconfiguredError,
    "UnknownParameter": MisconfiguredError,
    "ValidationError": MisconfiguredError,
    "ValidationException": MisconfiguredError,
    "VPCIdNotSpecified": MisconfiguredError,
    "InvalidInstanceID.NotFound": VmNotFoundError,
    "InvalidInstanceID.Malformed": VmNotFoundError,
    "RequestLimitExceeded": ThrottledError,
    "Throttling": ThrottledError,
    "ThrottlingException": ThrottledError,
    "TooManyRequestsException": ThrottledError,
    "RequestThrottled": ThrottledError,
}
_QUOTA = "LimitExceeded"
"""Suffix of the codes of other quotas: virtual CPUs, volumes, networks ..."""

_ADVICE: dict[type[CloudError], str] = {
    NoCapacityError: "another zone or type may have some",
    QuotaExceededError: "ask AWS for a higher quota or rent elsewhere",
    PriceTooHighError: "wait, or rent elsewhere",
    AuthError: "check the credentials, what they permit, and this machine's clock",
    MisconfiguredError: "correct the job file",
}


def code_of(error: Exception) -> str:
    """Return AWS's code of an error, empty if AWS did not answer."""
    response: dict[str, Any] = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def translate(error: Exception, doing: str) -> CloudError:
    """Return our error; unknown codes become a plain ``CloudError``, never "no
    capacity".

    Args:
        error: botocore's ``ClientError``, ``BotoCoreError`` or ``ResponseParserError``.
        doing: The action, such as ``launch g5.xlarge in us-east-1a``.
    """
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return _refused(error, doing)
    text = " ".join(str(error).split())[:_MAX_MESSAGE_CHARS]
    credentials = (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.CredentialRetrievalError,
        boto.TokenRetrievalError,
        boto.UnauthorizedSSOTokenError,
        boto.SSOTokenLoadError,
        boto.ProfileNotFound,
        boto.NoAuthTokenError,
    )
    if isinstance(error, credentials):
        return AuthError(
            f"AWS, {doing}: {text}; run 'aws configure' or 'aws sso login'"
        )
    wrong = (boto.InvalidRegionError, boto.NoRegionError, boto.ParamValidationError)
    if isinstance(error, wrong):
        return MisconfiguredError(f"AWS, {doing}: {text}; correct the job file")
    return CloudError(f"AWS cannot be reached, {doing}: {text}; will be retried")


def _refused(error: Any, doing: str) -> CloudError:
    code, message = code_of(error), error.response.get("Error", {}).get("Message", "")
    message = " ".join(str(message).split())[:_MAX_MESSAGE_CHARS]
    quota = code.endswith(_QUOTA)
    kind = _CODES.get(code, QuotaExceededError if quota else CloudError)
    if (
        kind is CloudError
        and error.response["ResponseMetadata"]["HTTPStatusCode"] == 429
    ):
        kind = ThrottledError
    if kind is ThrottledError:
        headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
        text = headers.get("retry-after", "")
        retry_after_s = float(text) if text.isdigit() else _RETRY_AFTER_S
        return ThrottledError(
            f"AWS, {doing}: {code}: slow down for {retry_after_s:g} s", retry_after_s
        )
    advice = _ADVICE.get(kind)
    return kind(f"AWS, {doing}: {code}: {message}" + (f"; {advice}" if advice else ""))


@contextmanager
def translating_errors(doing: str) -> Iterator[None]:
    """Translate boto3's errors to ours.

    Raises:
        CloudError: or a subclass, with a one-line message.
    """
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
    except ImportError as error:
        raise CloudError(EXTRA_MISSING) from error
    try:
        yield
    except (ClientError, BotoCoreError, ResponseParserError) as error:
        raise translate(error, doing) from error
