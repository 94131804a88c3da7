"""Every error of AWS becomes one that a caller can act on."""

from __future__ import annotations

from pathlib import Path
from string import Formatter

import pytest
from botocore import exceptions as boto
from hypothesis import given
from hypothesis import strategies as st

from spottrain.aws_login import open_session
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
def test_a_lost_connection_is_explained(raised: Exception, kind: type[CloudError]) -> None:
    with pytest.raises(CloudError) as told, translating_errors("listing"):
        raise raised
    assert type(told.value) is kind
    assert "\n" not in str(told.value)


def every_class() -> list[type[boto.BotoCoreError]]:
    kinds = [x for x in vars(boto).values() if isinstance(x, type)]
    return [x for x in kinds if issubclass(x, boto.BotoCoreError)]


@pytest.mark.parametrize("kind", every_class(), ids=lambda kind: kind.__name__)
def test_only_what_passes_by_itself_is_retried(kind: type[boto.BotoCoreError]) -> None:
    fields = [name for _, name, _, _ in Formatter().parse(kind.fmt) if name]
    if kind is boto.WaiterError:
        fields.append("last_response")
    error = translate(kind(**dict.fromkeys(fields, "x")), "listing")

    passes = issubclass(
        kind,
        boto.HTTPClientError
        | boto.ConnectionError
        | boto.ChecksumError
        | boto.FlexibleChecksumError
        | boto.AwsChunkedWrapperError
        | boto.IncompleteReadError
        | boto.WaiterError
        | boto.PaginationError
        | boto.MetadataRetrievalError
        | boto.CapacityNotAvailableError,
    )
    assert ("will be retried" in str(error)) == passes
    assert isinstance(error, AuthError | MisconfiguredError) != passes


@pytest.mark.parametrize(
    "raised",
    [
        boto.LoginRefreshRequired(),
        boto.SSOError(),
        boto.RefreshWithMFAUnsupportedError(),
        boto.LoginTokenLoadError(error_msg="x"),
    ],
)
def test_a_login_that_has_expired_is_one(raised: boto.BotoCoreError) -> None:
    assert isinstance(translate(raised, "listing"), LoginExpiredError)


def test_a_role_with_mfa_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[profile mfa]\nrole_arn = arn:aws:iam::123456789012:role/r\n"
        "source_profile = keys\nmfa_serial = arn:aws:iam::123456789012:mfa/me\n"
        "[profile keys]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(LoginExpiredError, match="MFA"), translating_errors("listing"):
        open_session("mfa").get_credentials().get_frozen_credentials()


def test_a_configuration_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[default\nregion = x\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(MisconfiguredError, match="config"), translating_errors("x"):
        open_session().get_credentials()
