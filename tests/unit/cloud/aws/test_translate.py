"""Every error of AWS becomes one that a caller can act on."""

from __future__ import annotations

import pytest
from botocore import exceptions as boto
from hypothesis import given
from hypothesis import strategies as st

from spottrain.cloud.aws.translate import translate, translating_errors
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


def refusal(code: str, status: int = 400, **headers: str) -> boto.ClientError:
    response = {
        "Error": {"Code": code, "Message": "two\nlines"},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }
    return boto.ClientError(response, "RunInstances")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InsufficientInstanceCapacity", NoCapacityError),
        ("Unsupported", NoCapacityError),
        ("MaxSpotInstanceCountExceeded", QuotaExceededError),
        ("VcpuLimitExceeded", QuotaExceededError),
        ("VpcLimitExceeded", QuotaExceededError),
        ("RulesPerSecurityGroupLimitExceeded", QuotaExceededError),
        ("AccountProblem", AuthError),
        ("UnsupportedOperation", MisconfiguredError),
        ("InvalidGroup.NotFound", CloudError),  # made a moment ago, or to be made again
        ("SpotMaxPriceTooLow", PriceTooHighError),
        ("RequestExpired", LoginExpiredError),
        ("UnauthorizedOperation", AuthError),
        ("InvalidAMIID.NotFound", MisconfiguredError),
        ("RequestLimitExceeded", ThrottledError),
        ("InternalError", CloudError),
    ],
)
def test_error_codes_map_to_error_classes(code: str, kind: type[CloudError]) -> None:
    error = translate(refusal(code), "launching 1 g5.xlarge in us-east-1a")
    assert type(error) is kind
    assert "\n" not in str(error)
    assert "us-east-1a" in str(error)
    assert code in str(error)


@given(st.text(max_size=30))
def test_an_unknown_code_is_never_read_as_no_capacity(code: str) -> None:
    error = translate(refusal(f"Our.{code}"), "launching")
    assert type(error) is CloudError


def test_a_throttling_error_has_the_retry_delay() -> None:
    error = translate(refusal("RequestLimitExceeded", 503), "listing")
    assert isinstance(error, ThrottledError)
    assert error.retry_after_s > 0
    told = translate(refusal("SlowDown", 429, **{"retry-after": "17"}), "listing")
    assert isinstance(told, ThrottledError)
    assert told.retry_after_s == 17


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (boto.NoCredentialsError(), LoginExpiredError),
        (boto.ProfileNotFound(profile="x"), LoginExpiredError),
        (boto.ReadTimeoutError(endpoint_url="https://ec2"), CloudError),
        (boto.EndpointConnectionError(endpoint_url="https://ec2"), CloudError),
        (boto.InvalidRegionError(region_name="no such"), MisconfiguredError),
    ],
)
def test_a_lost_connection_is_explained(
    raised: Exception, kind: type[CloudError]
) -> None:
    with pytest.raises(CloudError) as told, translating_errors("listing"):
        raise raised
    assert type(told.value) is kind
    assert "\n" not in str(told.value)
