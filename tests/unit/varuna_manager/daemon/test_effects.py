from __future__ import annotations

import pytest

from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    MisconfiguredError,
    NoCapacityError,
    ThrottledError,
)
from spottrain.varuna_manager.daemon.effects import RETRY_S, refusal_of, retry_after_s


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoCapacityError("none left"), "no_capacity"),
        (AuthError("who are you"), "auth"),
        (MisconfiguredError("no such image"), "misconfigured"),
        (ThrottledError("slowly", retry_after_s=7.0), "throttled"),
        (CloudError("something"), "unknown"),
    ],
)
def test_an_error_of_a_cloud_becomes_a_kind_of_refusal(error: CloudError, kind: str) -> None:
    assert refusal_of(error) == kind


def test_a_throttling_cloud_says_when_to_ask_again() -> None:
    assert retry_after_s(ThrottledError("slowly", retry_after_s=7.0)) == 7.0
    assert retry_after_s(CloudError("something")) == RETRY_S
