"""Logins that expire while a manager runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.fakes.aws import KIND, REGION, FakeAws
from tests.fakes.http_server import running, url_of

from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.port.errors import LoginExpiredError
from spottrain.cloud.process import child
from spottrain.cloud.process.child import ChildProvider
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


def aws_in_child(aws: FakeAws) -> ChildProvider:
    settings = AwsSettings(instance_types=(KIND,), regions=(REGION,), endpoint_url=aws.url, tries=1)
    return child.in_child("spottrain.varuna_manager.launch.providers:make_aws", asdict(settings))


@pytest.mark.rotated
def test_a_login_that_a_person_renewed_is_found(
    aws: FakeAws, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "RENEW_S", 0.0)
    log_in(profile, "MORNING")
    provider = aws_in_child(aws)
    try:
        assert provider.list_vms("job") == ()
        aws.ask("expire_key", key_id="MORNING")
        with pytest.raises(LoginExpiredError, match="log in again"):
            provider.list_vms("job")
        log_in(profile, "EVENING")
        assert provider.list_vms("job") == ()
    finally:
        provider.close()


class Imds(BaseHTTPRequestHandler):
    """EC2's metadata service, as far as a VM's role goes ("IAM roles for Amazon EC2")."""

    def do_PUT(self) -> None:
        self._answer("a token")

    def do_GET(self) -> None:
        where = "/latest/meta-data/iam/security-credentials/"
        assert self.path.startswith(where)
        if self.headers["X-aws-ec2-metadata-token"] != "a token":
            self.send_error(401)
        elif self.path == where:
            self._answer("spottrain-manager")
        else:
            assert isinstance(self.server, Role)
            self._answer(json.dumps(self.server.credentials()))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Role(ThreadingHTTPServer):
    """The role of a manager's VM."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Imds)
        self.key_id = "FIRST"
        self.given: list[str] = []

    def credentials(self) -> dict[str, str]:
        """Return the keys of now, for six hours."""
        self.given.append(self.key_id)
        ends = datetime.now(UTC) + timedelta(hours=6)
        return {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "AccessKeyId": self.key_id,
            "SecretAccessKey": "secret",
            "Token": "session",
            "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


@pytest.fixture
def role(profile: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    with running(Role()) as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url_of(server))
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        yield server


@pytest.mark.rotated
def test_keys_of_a_managers_vm_that_expired_early_are_read_anew_from_its_role(
    aws: FakeAws, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 asks for the next keys minutes before these end; a revoked session, or a clock
    that jumped, leaves it with keys that AWS refuses."""
    monkeypatch.setattr(child, "RENEW_S", 0.0)
    provider = aws_in_child(aws)
    try:
        assert provider.list_vms("job") == ()
        aws.ask("expire_key", key_id="FIRST")
        role.key_id = "SECOND"
        with pytest.raises(LoginExpiredError):
            provider.list_vms("job")
        assert provider.list_vms("job") == ()
        assert role.given[-1] == "SECOND"
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
