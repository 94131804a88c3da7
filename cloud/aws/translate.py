"""Translation of boto3's errors to ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spottrain.cloud.port import errors
from spottrain.errors import one_line

EXTRA_MISSING = "boto3 is not installed; run pip install boto3"
TOKEN_USED = ("IdempotentParameterMismatch", "IdempotentInstanceTerminated")
"""The launch token was used before: its VMs are found by their tags."""
GONE = ("InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed")
"""Also returned for VMs that were launched a moment ago."""
_RETRY_AFTER_S = 5.0
_MAX_MESSAGE_CHARS = 300
"""Length limit of AWS's text in a message."""

_CODES: dict[str, type[errors.CloudError]] = {
    "InsufficientInstanceCapacity": errors.NoCapacityError,
    "InsufficientHostCapacity": errors.NoCapacityError,
    "InsufficientReservedInstanceCapacity": errors.NoCapacityError,
    "InsufficientCapacity": errors.NoCapacityError,
    "InsufficientFreeAddressesInSubnet": errors.NoCapacityError,
    "UnfulfillableCapacity": errors.NoCapacityError,
    "Unsupported": errors.NoCapacityError,  # the zone has no machines of this type
    "MaxSpotInstanceCountExceeded": errors.QuotaExceededError,
    "MaxFleetCountExceeded": errors.QuotaExceededError,
    "VolumeLimitExceeded": errors.RegionQuotaError,
    "SpotMaxPriceTooLow": errors.PriceTooHighError,
    "AuthFailure": errors.AuthError,
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": errors.AuthError,
    "AccessDenied": errors.AuthError,
    "AccessDeniedException": errors.AuthError,
    "ExpiredToken": errors.LoginExpiredError,
    "ExpiredTokenException": errors.LoginExpiredError,
    "IncompleteSignature": errors.AuthError,
    "InvalidClientTokenId": errors.AuthError,
    "InvalidSignatureException": errors.AuthError,
    "MissingAuthenticationToken": errors.AuthError,
    "RequestExpired": errors.LoginExpiredError,  # expired credentials, or a wrong clock
    "SignatureDoesNotMatch": errors.AuthError,
    "UnauthorizedOperation": errors.AuthError,
    "UnrecognizedClientException": errors.AuthError,
    "AccountProblem": errors.AuthError,
    "Blocked": errors.AuthError,
    "PendingVerification": errors.AuthError,
    "OptInRequired": errors.MisconfiguredError,
    "InvalidParameter": errors.MisconfiguredError,
    "InvalidParameterValue": errors.MisconfiguredError,
    "InvalidParameterCombination": errors.MisconfiguredError,
    "InvalidAMIID.Malformed": errors.MisconfiguredError,
    "InvalidAMIID.NotFound": errors.MisconfiguredError,
    "InvalidAMIID.Unavailable": errors.MisconfiguredError,
    "InvalidKey.Format": errors.MisconfiguredError,
    "InvalidZone": errors.MisconfiguredError,
    "InvalidBlockDeviceMapping": errors.MisconfiguredError,
    "InvalidAction": errors.MisconfiguredError,
    "MissingParameter": errors.MisconfiguredError,
    "UnsupportedOperation": errors.MisconfiguredError,
    "UnknownParameter": errors.MisconfiguredError,
    "ValidationError": errors.MisconfiguredError,
    "ValidationException": errors.MisconfiguredError,
    "VPCIdNotSpecified": errors.MisconfiguredError,
    "InvalidInstanceID.NotFound": errors.VmNotFoundError,
    "InvalidInstanceID.Malformed": errors.VmNotFoundError,
    "RequestLimitExceeded": errors.ThrottledError,
    "Throttling": errors.ThrottledError,
    "ThrottlingException": errors.ThrottledError,
    "TooManyRequestsException": errors.ThrottledError,
    "RequestThrottled": errors.ThrottledError,
}
_QUOTA = "LimitExceeded"
"""Suffix of the codes of other quotas: virtual CPUs, volumes, networks ..."""

_PASSING = frozenset(
    {
        "AwsChunkedWrapperError",
        "CapacityNotAvailableError",
        "ChecksumError",
        "ConnectionError",
        "FlexibleChecksumError",
        "HTTPClientError",
        "IncompleteReadError",
        "MetadataRetrievalError",
        "PaginationError",
        "ResponseParserError",
        "WaiterError",
    }
)
"""botocore's classes of what goes away by itself. By name: older versions lack some."""
_LOGIN = frozenset(
    {
        "CredentialRetrievalError",
        "LoginError",
        "NoAuthTokenError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "SSOError",
        "TokenRetrievalError",
        "UnknownCredentialError",
        "UnknownTokenProviderError",
    }
)
"""Those that a person ends by logging in. All others are somebody's mistake, and last."""

_POLICY = "explicit deny in a service control policy"
_POLICY_ADVICE = (
    "a policy of your organisation forbids it: give the tags that it demands in aws.tags, "
    "use a region that it allows, or have the account excepted"
)

_ADVICE: dict[type[errors.CloudError], str] = {
    errors.NoCapacityError: "another zone or type may have some",
    errors.QuotaExceededError: "ask AWS for a higher quota or rent elsewhere",
    errors.RegionQuotaError: "ask AWS for a higher quota, or set a smaller aws.disk_gib",
    errors.PriceTooHighError: "wait, or rent elsewhere",
    errors.LoginExpiredError: (
        "check the credentials: log in again ('aws sso login', or new keys in the "
        "profile), which the running manager finds, or set this machine's clock"
    ),
    errors.AuthError: "check the credentials, what they permit, and this machine's clock",
    errors.MisconfiguredError: "correct the job file",
}


def code_of(error: Exception) -> str:
    """Return AWS's code of an error, empty if AWS did not answer."""
    response: dict[str, Any] = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def translate(error: Exception, doing: str) -> errors.CloudError:
    """Return our error; unknown codes become a plain ``CloudError``, never "no
    capacity".

    Args:
        error: botocore's ``ClientError``, ``BotoCoreError`` or ``ResponseParserError``.
        doing: The action, such as ``launch g5.xlarge in us-east-1a``.
    """
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return _refused(error, doing)
    text = one_line(error)[:_MAX_MESSAGE_CHARS]
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & _PASSING:
        return errors.CloudError(f"AWS cannot be reached, {doing}: {text}; will be retried")
    if "RefreshWithMFAUnsupportedError" in kinds:
        return errors.LoginExpiredError(
            f"AWS, {doing}: the role asks for an MFA code, and nobody is there to give it; "
            "use keys that were made with one, such as of 'aws configure "
            "export-credentials --format env'"
        )
    if kinds & _LOGIN:
        return errors.LoginExpiredError(
            f"AWS, {doing}: {text}; run 'aws login', 'aws sso login' or 'aws configure'"
        )
    return errors.MisconfiguredError(
        f"AWS, {doing}: {text}; correct the job file, ~/.aws/config or the environment"
    )


def _refused(error: Any, doing: str) -> errors.CloudError:
    code, message = code_of(error), error.response.get("Error", {}).get("Message", "")
    message = one_line(message)
    quota = code.endswith(_QUOTA)
    kind = _CODES.get(code, errors.QuotaExceededError if quota else errors.CloudError)
    if kind is errors.CloudError and error.response["ResponseMetadata"]["HTTPStatusCode"] == 429:
        kind = errors.ThrottledError
    if kind is errors.ThrottledError:
        headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
        text = headers.get("retry-after", "")
        retry_after_s = float(text) if text.isdigit() else _RETRY_AFTER_S
        return errors.ThrottledError(
            f"AWS, {doing}: {code}: slow down for {retry_after_s:g} s", retry_after_s
        )
    policy = _POLICY in message
    message = message[:_MAX_MESSAGE_CHARS]
    advice = _POLICY_ADVICE if policy else _ADVICE.get(kind)
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
        raise errors.CloudError(EXTRA_MISSING) from error
    try:
        yield
    except (ClientError, BotoCoreError, ResponseParserError) as error:
        raise translate(error, doing) from error
