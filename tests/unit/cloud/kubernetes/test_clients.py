"""The API server's refusals, as our errors; the cluster's address and credentials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kubernetes.client.exceptions import ApiException

from spottrain.cloud.kubernetes.clients import AlreadyExistsError, Clients, refusal
from spottrain.cloud.kubernetes.settings import KubernetesSettings
from spottrain.cloud.port import errors


def refused(code: int, message: str, reason: str = "") -> errors.CloudError:
    error = ApiException(status=code, reason="what HTTP says")
    error.body = json.dumps({"kind": "Status", "message": message, "reason": reason})
    return refusal(error)


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (400, "strict decoding error: unknown field", errors.MisconfiguredError),
        (401, "Unauthorized", errors.LoginExpiredError),
        (403, 'User "me" cannot create resource "pods"', errors.AuthError),
        (403, "exceeded quota: few, requested: pods=1", errors.QuotaExceededError),
        (403, 'violates PodSecurity "restricted:latest"', errors.MisconfiguredError),
        (404, 'namespaces "none" not found', errors.MisconfiguredError),
        (404, 'pods "x" not found', errors.VmNotFoundError),
        (409, "Operation cannot be fulfilled on resourcequotas", errors.CloudError),
        (410, "too old resource version", errors.CloudError),
        (422, 'Pod "x" is invalid', errors.MisconfiguredError),
        (429, "too many requests", errors.ThrottledError),
        (500, "etcdserver: leader changed", errors.CloudError),
    ],
)
def test_refusals_are_told_by_what_can_be_done_about_them(
    code: int, message: str, kind: type[errors.CloudError]
) -> None:
    error = refused(code, message)
    assert type(error) is kind
    assert str(error).startswith(f"kubernetes: {message}")


def test_a_name_that_is_taken_is_told_apart_from_another_conflict() -> None:
    taken = refused(409, 'pods "x" already exists', "AlreadyExists")
    assert isinstance(taken, AlreadyExistsError)


def test_an_answer_without_a_body_is_told_by_its_status() -> None:
    assert str(refusal(ApiException(status=503, reason="Unavailable"))) == "kubernetes: Unavailable"


def test_a_refused_port_forward_is_told_like_any_request() -> None:
    said = "Handshake status 403 Forbidden -+-+- {'date': 'today'} -+-+- b'...'"
    error = refusal(ApiException(status=0, reason=said))
    assert isinstance(error, errors.AuthError)
    assert "port-forward: Handshake status 403 Forbidden; see" in str(error)


def test_without_a_kubeconfig_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(errors.MisconfiguredError, match=r"kubernetes\.context"):
        Clients(KubernetesSettings(slot_memory_bytes=1)).user()
