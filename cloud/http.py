"""Requests over HTTP, with one-line errors: to price APIs, and what time it is."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
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
        response = _retrying()(lambda: _checked(client.get(url, params=params, headers=headers)))
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


def time_at(url: str, ca_file: str = "") -> float:
    """Return what time it is by a server's clock, in seconds since the epoch.

    Every answer says it (RFC 9110, section 6.6.1), a refusal too. So none is signed: where
    this machine's clock is wrong, clouds refuse credentials, and SDKs take them for expired.

    Args:
        url: Of the server.
        ca_file: CA certificates (PEM) instead of the default ones.

    Raises:
        CloudError: it does not answer, or does not say it.
    """
    host = httpx.URL(url).host
    try:
        verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
        date = httpx.get(url, verify=verify, timeout=TIMEOUT).headers.get("Date", "")
        return parsedate_to_datetime(date).timestamp()
    except (httpx.HTTPError, OSError) as error:
        why = str(error) or type(error).__name__
        raise CloudError(f"{host} does not say what time it is: {why}") from error
    except ValueError as error:
        raise CloudError(f"{host} does not say what time it is") from error


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
        stop=tenacity.stop_after_attempt(_TRIES) | tenacity.stop_after_delay(_PATIENCE_S),
        wait=wait,
        reraise=True,
    )
