"""Requests to price APIs over HTTP, with retries and one-line errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import tenacity

from spottrain.cloud.port.errors import CloudError

TIMEOUT = httpx.Timeout(20.0, connect=5.0)
_TRIES, _PATIENCE_S = 4, 30.0
_MAX_WAIT_S = 20.0


class PriceSourceError(CloudError):
    """A price API is down, refuses, or gives an unreadable answer."""


class _RetryableError(Exception):
    """A failure that may pass."""

    def __init__(self, why: str, wait_s: float | None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


def get_json(
    client: httpx.Client,
    url: str,
    params: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the JSON object at ``url``.

    Throttling (429, with its Retry-After), 5xx and broken connections are tried again.

    Raises:
        PriceSourceError: the request failed; names the host and the reason.
    """
    host = httpx.URL(url).host
    try:
        response = _retrying()(
            lambda: _checked(client.get(url, params=params, headers=headers))
        )
    except (httpx.HTTPError, _RetryableError) as error:
        why = str(error) or type(error).__name__
        raise PriceSourceError(f"request to {host} failed: {why}") from error
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise PriceSourceError(f"{host} did not answer with a JSON object")
    return document


def _checked(response: httpx.Response) -> httpx.Response:
    status = response.status_code
    why = f"HTTP {status} {response.reason_phrase}".rstrip()
    if status == httpx.codes.TOO_MANY_REQUESTS or status >= 500:
        after = response.headers.get("Retry-After", "")
        raise _RetryableError(why, float(after) if after.isdigit() else None)
    if not response.is_success:
        raise PriceSourceError(f"{response.url.host} refused the request: {why}")
    return response


def _retrying() -> tenacity.Retrying:
    backoff = tenacity.wait_exponential(0.5, max=8.0) + tenacity.wait_random(0, 0.5)

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, _RetryableError) and error.wait_s is not None:
            return min(error.wait_s, _MAX_WAIT_S)
        return backoff(state)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((httpx.TransportError, _RetryableError)),
        stop=tenacity.stop_after_attempt(_TRIES)
        | tenacity.stop_after_delay(_PATIENCE_S),
        wait=wait,
        reraise=True,
    )
