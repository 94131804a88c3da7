"""Logins that expire while a manager runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from tests.fakes.aws import KIND, REGION, FakeAws

from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.port.errors import LoginExpiredError
from spottrain.cloud.process import child
from spottrain.storage.objects import _boto3_credentials


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a tool that logs in for some hours, such as ``aws sso login``'s."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path / "credentials"


def log_in(profile: Path, key_id: str) -> None:
    profile.write_text(
        f"[default]\naws_access_key_id = {key_id}\n"
        "aws_secret_access_key = secret\naws_session_token = session\n"
    )


def test_a_login_that_a_person_renewed_is_found(
    aws: FakeAws, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "RENEW_S", 0.0)
    log_in(profile, "MORNING")
    settings = AwsSettings(
        instance_types=(KIND,), regions=(REGION,), endpoint_url=aws.url, tries=1
    )
    provider = child.in_child(
        "spottrain.varuna_manager.launch.providers:make_aws", asdict(settings)
    )
    try:
        assert provider.list_vms("job") == ()
        aws.ask("expire_key", key_id="MORNING")
        with pytest.raises(LoginExpiredError, match="log in again"):
            provider.list_vms("job")
        log_in(profile, "EVENING")
        assert provider.list_vms("job") == ()
    finally:
        provider.close()


def test_a_bucket_is_opened_with_the_keys_that_the_profile_has_now(
    aws: FakeAws, profile: Path
) -> None:
    log_in(profile, "MORNING")
    give, _ = _boto3_credentials()
    assert give is not None
    assert give()["access_key_id"] == "MORNING"
    log_in(profile, "EVENING")
    assert give()["access_key_id"] == "EVENING"
