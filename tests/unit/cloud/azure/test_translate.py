"""Every error of Azure becomes one that a caller can act on."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from azure.core import exceptions as azure
from azure.core.exceptions import HttpResponseError
from azure.identity import (
    ChainedTokenCredential,
    CredentialUnavailableError,
    EnvironmentCredential,
)
from hypothesis import given
from hypothesis import strategies as st

from spottrain.cloud.azure.translate import translate, translating_errors
from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    LoginExpiredError,
    MisconfiguredError,
    NoCapacityError,
    PriceTooHighError,
    QuotaExceededError,
    ThrottledError,
)


class Answer:
    """As much of an HTTP response as an error looks at."""

    reason = "odd"

    def __init__(self, status: int, body: Any, headers: dict[str, str]) -> None:
        self.status_code, self.headers, self.body = status, headers, body
        self.content_type = "application/json"

    def text(self, encoding: str | None = None) -> str:
        """Return the body."""
        return json.dumps(self.body)


def refusal(
    code: str, status: int = 409, message: str = "two\nlines", **headers: str
) -> HttpResponseError:
    body = {"error": {"code": code, "message": message}}
    return HttpResponseError(response=Answer(status, body, headers))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("SkuNotAvailable", NoCapacityError),
        ("ZonalAllocationFailed", NoCapacityError),
        ("OverconstrainedAllocationRequest", NoCapacityError),
        ("QuotaExceeded", QuotaExceededError),
        ("VnetCountLimitReached", QuotaExceededError),
        ("RoleAssignmentLimitExceeded", QuotaExceededError),
        ("MissingSubscriptionRegistration", AuthError),
        ("ScopeLocked", AuthError),
        ("RequestDisallowedByAzure", MisconfiguredError),
        ("ResourcePurchaseValidationFailed", MisconfiguredError),
        ("VMMarketplaceInvalidInput", MisconfiguredError),
        ("SpotPriceGreaterThanProvidedMaxPrice", PriceTooHighError),
        ("AuthorizationFailed", AuthError),
        ("ReadOnlyDisabledSubscription", AuthError),
        ("PlatformImageNotFound", MisconfiguredError),
        ("InternalServerError", CloudError),
    ],
)
@pytest.mark.parametrize("status", [200, 400, 409])
def test_error_codes_map_to_error_classes(code: str, kind: type[CloudError], status: int) -> None:
    error = translate(refusal(code, status), "launching 1 NC6 in eastus-1")
    assert type(error) is kind
    assert "\n" not in str(error)
    assert "eastus-1" in str(error)
    assert code in str(error)


@given(st.text(max_size=30))
def test_an_unknown_code_is_never_read_as_no_capacity(code: str) -> None:
    error = translate(refusal(f"Our.{code}"), "launching")
    assert type(error) is CloudError


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("exceeding approved LowPriorityCores quota", QuotaExceededError),
        ("exceeding approved standardNCFamily Cores", QuotaExceededError),
        ("Quota of 0 is too small", QuotaExceededError),
        ("The VM is marked for deletion", CloudError),
    ],
)
def test_operation_not_allowed_is_a_quota_only_if_azure_says_so(
    words: str, kind: type[CloudError]
) -> None:
    error = translate(refusal("OperationNotAllowed", message=words), "launching")
    assert type(error) is kind


def test_any_throttling_error_has_the_retry_delay() -> None:
    error = translate(refusal("OperationNotAllowed", 429, "quota"), "listing")
    assert isinstance(error, ThrottledError)
    assert error.retry_after_s > 0
    told = translate(refusal("x", 429, **{"Retry-After": "17"}), "listing")
    assert isinstance(told, ThrottledError)
    assert told.retry_after_s == 17


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (CredentialUnavailableError(message="no\nlogin"), LoginExpiredError),
        (azure.ClientAuthenticationError(message="wrong secret"), LoginExpiredError),
        (azure.ServiceRequestError("no route"), CloudError),
        (azure.ServiceResponseTimeoutError("silence"), CloudError),
        (azure.DecodeError(message="<html>"), CloudError),
        (azure.ClientAuthenticationError(response=Answer(401, {}, {})), AuthError),
        (HttpResponseError(response=Answer(502, "<html>", {})), CloudError),
    ],
)
def test_an_invalid_answer_is_explained(raised: Exception, kind: type[CloudError]) -> None:
    with pytest.raises(CloudError) as told, translating_errors("listing"):
        raise raised
    assert type(told.value) is kind
    assert "\n" not in str(told.value)
    assert "listing" in str(told.value)


def test_a_missing_login_is_told_without_a_page_on_each_kind_of_login(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    login = ChainedTokenCredential(EnvironmentCredential(), EnvironmentCredential())
    with pytest.raises(LoginExpiredError) as told, translating_errors("listing"):
        login.get_token("https://management.azure.com/.default")
    assert str(told.value) == (
        "Azure, listing: ChainedTokenCredential failed to retrieve a token from the "
        "included credentials; run 'az login'"
    )
