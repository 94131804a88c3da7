"""Every error of Google becomes one that a caller can act on."""

from __future__ import annotations

import pytest
import requests
from google.api_core import exceptions as google
from google.auth import exceptions as auth
from hypothesis import given
from hypothesis import strategies as st

from spottrain.cloud.gcp.translate import (
    is_transient,
    raise_failed,
    translate,
    translating_errors,
)
from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    LoginExpiredError,
    MisconfiguredError,
    NoCapacityError,
    QuotaExceededError,
    ThrottledError,
    VmNotFoundError,
)


def refusal(status: int, reason: str, message: str = "two\nlines", **headers: str) -> Exception:
    response = requests.Response()
    response.headers.update({k.replace("_", "-"): v for k, v in headers.items()})
    errors = [{"reason": reason, "message": message}]
    made: Exception = google.from_http_status(status, message, errors=errors, response=response)
    return made


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (503, "resourcesExhausted", NoCapacityError),
        (403, "quotaExceeded", QuotaExceededError),
        (401, "authError", LoginExpiredError),
        (403, "forbidden", AuthError),
        (403, "accessNotConfigured", AuthError),
        (403, "rateLimitExceeded", ThrottledError),
        (429, "anything", ThrottledError),
        (400, "invalid", MisconfiguredError),
        (400, "resourceNotReady", CloudError),
        (400, "resourceInUseByAnotherResource", CloudError),
        (404, "notFound", MisconfiguredError),
        (500, "internalError", CloudError),
        (503, "backendError", CloudError),
    ],
)
def test_error_reasons_map_to_error_classes(
    status: int, reason: str, kind: type[CloudError]
) -> None:
    error = translate(refusal(status, reason), "launching 1 a2-highgpu-1g")
    assert type(error) is kind
    assert "\n" not in str(error)
    assert reason in str(error)


def test_an_instance_that_is_not_found_has_ended() -> None:
    told = "The resource 'projects/p/zones/z/instances/x' was not found"
    error = translate(refusal(404, "notFound", told), "looking")
    assert type(error) is VmNotFoundError


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ZONE_RESOURCE_POOL_EXHAUSTED", NoCapacityError),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", NoCapacityError),
        ("UNSUPPORTED_OPERATION", NoCapacityError),
        ("QUOTA_EXCEEDED", QuotaExceededError),
        ("PERMISSIONS_ERROR", AuthError),
        ("RESOURCE_OPERATION_RATE_EXCEEDED", ThrottledError),
        ("IP_SPACE_EXHAUSTED", NoCapacityError),
        ("LIMIT_EXCEEDED", QuotaExceededError),
        ("SERVICE_ACCOUNT_ACCESS_DENIED", AuthError),
        ("SERVICE_ACCOUNT_NOT_FOUND", MisconfiguredError),
        ("EXTERNAL_RESOURCE_NOT_FOUND", MisconfiguredError),
        ("CONDITION_NOT_MET", MisconfiguredError),
        ("INVALID_USAGE", MisconfiguredError),
        ("INTERNAL_ERROR", CloudError),
    ],
)
def test_a_failed_operation_raises_its_error(code: str, kind: type[CloudError]) -> None:
    operation = {
        "operation_type": "bulkInsert",
        "error": {"errors": [{"code": code, "message": "a\nb"}]},
    }
    with pytest.raises(CloudError) as told:
        raise_failed(operation)
    assert type(told.value) is kind
    assert "\n" not in str(told.value)
    raise_failed({"operation_type": "bulkInsert"})


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (("VM_MIN_COUNT_NOT_REACHED", "QUOTA_EXCEEDED"), QuotaExceededError),
        (("VM_MIN_COUNT_NOT_REACHED", "INTERNAL_ERROR"), CloudError),
        (("INTERNAL_ERROR", "PERMISSIONS_ERROR"), AuthError),
        (("VM_MIN_COUNT_NOT_REACHED",), NoCapacityError),
    ],
)
def test_the_most_specific_of_several_errors_counts(
    codes: tuple[str, ...], kind: type[CloudError]
) -> None:
    errors = [{"code": code, "message": "no"} for code in codes]
    with pytest.raises(CloudError) as told:
        raise_failed({"operation_type": "bulkInsert", "error": {"errors": errors}})
    assert type(told.value) is kind


@given(st.text(max_size=30), st.sampled_from([404, 500, 503]))
def test_an_unknown_reason_is_never_read_as_no_capacity(reason: str, status: int) -> None:
    error = translate(refusal(status, f"our.{reason}"), "launching")
    assert not isinstance(error, NoCapacityError)


def test_a_throttling_error_has_the_retry_delay() -> None:
    error = translate(refusal(429, "", Retry_After="17"), "listing")
    assert isinstance(error, ThrottledError)
    assert error.retry_after_s == 17
    error = translate(refusal(403, "rateLimitExceeded"), "listing")
    assert isinstance(error, ThrottledError)
    assert error.retry_after_s > 0


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (auth.DefaultCredentialsError("none"), LoginExpiredError),
        (auth.RefreshError("expired"), LoginExpiredError),
        (auth.TransportError("lost"), CloudError),
        (requests.ConnectionError("two\nlines"), CloudError),
        (requests.ReadTimeout("slow"), CloudError),
        (google.RetryError("tired", requests.ConnectionError("lost")), CloudError),
        (google.RetryError("tired", refusal(429, "")), ThrottledError),
    ],
)
def test_a_lost_connection_is_explained(raised: Exception, kind: type[CloudError]) -> None:
    with pytest.raises(CloudError) as told, translating_errors("listing"):
        raise raised
    assert type(told.value) is kind
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (requests.ConnectionError(), True),
        (requests.ReadTimeout(), True),
        (refusal(429, ""), True),
        (refusal(403, "rateLimitExceeded"), True),
        (refusal(500, "internalError"), True),
        (refusal(503, "backendError"), True),
        (refusal(503, "resourcesExhausted"), False),
        (refusal(403, "quotaExceeded"), False),
        (refusal(400, "invalid"), False),
        (refusal(401, "authError"), False),
    ],
)
def test_transient_errors_are_retried(error: Exception, again: bool) -> None:
    assert is_transient(error) is again
