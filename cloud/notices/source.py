"""Sources of preemption notices, and the client of metadata services.

Standard library only; the agent carries this module.
"""

from __future__ import annotations

import email.utils
import http
import http.client
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from urllib.parse import urlsplit

from spottrain.cloud.port.errors import CloudError

ANSWER_S = 10.0
"""Timeout of a metadata service, in addition to the requested wait."""
_MAX_BYTES = 1 << 20


class NoAnswerError(CloudError):
    """A service gave no usable answer; the request is retried.

    Args:
        message: One line.
        retry_after_s: Time before the next request, if the service demands it.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """A notice that this VM will be preempted."""

    key: str
    """A new key means that the notice has changed."""
    lead_s: float
    """Seconds left when it was received."""


@dataclass(frozen=True, slots=True)
class VmOutlook:
    """The current state of a VM's notices."""

    notice: PreemptionNotice | None = None
    at_risk: bool = False
    """True at elevated risk of preemption."""


class NoticeSource(ABC):
    """A source of preemption notices."""

    every_s: float
    """Minimum time between two requests."""

    @abstractmethod
    def ask(self) -> VmOutlook:
        """Return the current state; may wait for a change.

        Raises:
            NoAnswerError: the state is unknown now.
        """

    def acknowledge(self) -> None:  # noqa: B027  most have none
        """Acknowledge the notice, where the cloud supports that.

        Raises:
            NoAnswerError: the service did not answer.
        """


@dataclass(frozen=True, slots=True)
class Answer:
    """A service's HTTP response."""

    status: int
    headers: Message
    body: bytes

    @property
    def at_s(self) -> float:
        """Time of the response (seconds since the epoch), by the service's clock.

        So lead times are right even if the VM's own clock is wrong.
        """
        try:
            return http_date_s(self.headers["Date"])
        except ValueError:
            return time.time()

    def text(self) -> str:
        """Return the body.

        Raises:
            NoAnswerError: the body is not text.
        """
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise NoAnswerError(f"metadata service: {error}") from error


class Metadata:
    """Client of a VM's metadata service, over plain HTTP without proxies.

    Args:
        url: URL without a trailing slash.

    Raises:
        CloudError: the URL is invalid.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            parts, self._host = urlsplit(""), ""
        if parts.scheme != "http" or not self._host.isascii() or not self._host:
            raise CloudError(f"metadata service: got {url!r}, must be http://HOST[:PORT]")
        self._path = parts.path.rstrip("/")

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        body: bytes | None = None,
        wait_s: float = 0.0,
        expected: tuple[int, ...] = (http.HTTPStatus.OK,),
    ) -> Answer:
        """Return the response to one request.

        Args:
            target: Path and query.
            body: Sent as JSON.
            wait_s: How long the service may wait for a change.
            expected: Statuses that the caller can use.

        Raises:
            NoAnswerError: no response in time, or another status.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_S + wait_s)
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
        try:
            connection.request(method, self._path + target, body, dict(headers))
            response = connection.getresponse()
            answer = Answer(response.status, response.msg, response.read(_MAX_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"{method} {target}: {error!r}") from error
        finally:
            connection.close()
        if answer.status not in expected:
            raise NoAnswerError(
                f"{method} {target}: status {answer.status}", _retry_after_s(answer)
            )
        return answer


def _retry_after_s(answer: Answer) -> float:
    """Return the Retry-After of a response in seconds, 0 if it has none."""
    text = answer.headers["Retry-After"] or ""
    return float(text) if text.isascii() and text.isdecimal() else 0.0


def http_date_s(text: str | None) -> float:
    """Return the time (seconds since the epoch) of an HTTP date.

    Raises:
        ValueError: the text is no date.
    """
    try:
        at = email.utils.parsedate_to_datetime(text or "")
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"not a date: {text!r}") from error
    return _seconds(at)


def iso_date_s(text: str) -> float:
    """Return the time (seconds since the epoch) of a date such as 2026-01-02T03:04:05Z.

    Raises:
        ValueError: the text is no date.
    """
    return _seconds(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def _seconds(at: datetime) -> float:
    aware = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    try:
        return aware.timestamp()
    except OverflowError as error:
        raise ValueError(str(error)) from error
