"""What a VM can hear of its own end, and how its metadata service is asked for it.

Standard library only; the agent carries this module.
"""

from __future__ import annotations

import email.utils
import http
import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from typing import Protocol
from urllib.parse import urlsplit

from spottrain.cloud.port.errors import CloudError

ANSWER_S = 10.0
"""How long a metadata service may take to answer, beyond what it is asked to wait."""
_MAX_BYTES = 1 << 20


class NoAnswerError(CloudError):
    """A service gave no answer that can be used; it is asked again.

    Args:
        message: One line.
        retry_after_s: How long it wants to be left alone.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """That this VM will be taken."""

    key: str
    """Another one means that something has changed; then it is told again."""
    lead_s: float
    """Seconds left when it was heard."""


@dataclass(frozen=True, slots=True)
class VmOutlook:
    """What a cloud says now of this VM's end."""

    notice: PreemptionNotice | None = None
    at_risk: bool = False
    """It is likelier than others to be taken."""


class NoticeSource(Protocol):
    """Where a VM hears of its end."""

    every_s: float
    """Least time from one question to the next."""

    def ask(self) -> VmOutlook:
        """Return what is said now; may wait for a change.

        Raises:
            NoAnswerError: nothing is known now.
        """

    def acknowledge(self) -> None:
        """Tell the cloud, where it wants to know, that it may take this VM now.

        Raises:
            NoAnswerError: it did not hear.
        """


@dataclass(frozen=True, slots=True)
class Answer:
    """A service's answer."""

    status: int
    headers: Message
    body: bytes

    @property
    def at_s(self) -> float:
        """Return when it was given (seconds since the epoch), by the service's clock.

        So a VM whose own clock is wrong knows how much time it has.
        """
        try:
            return http_date_s(self.headers["Date"])
        except ValueError:
            return time.time()

    def text(self) -> str:
        """Return the body.

        Raises:
            NoAnswerError: it is not text.
        """
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise NoAnswerError(f"metadata service: {error}") from error


class Metadata:
    """The service that tells a VM about itself, over plain HTTP and never by a proxy.

    Args:
        url: Where it is, without a slash at the end.

    Raises:
        CloudError: the address is none.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            parts, self._host = urlsplit(""), ""
        if parts.scheme != "http" or not self._host.isascii() or not self._host:
            raise CloudError(
                f"metadata service: got {url!r}, must be http://HOST[:PORT]"
            )
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
        """Return the answer to one request.

        Args:
            method: Of the request, as are the next two.
            target: Its path and query.
            headers: Further ones.
            body: Is sent as JSON.
            wait_s: How long the service is asked to wait for news.
            expected: Statuses of use to the caller.

        Raises:
            NoAnswerError: none in time, or another status.
        """
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=ANSWER_S + wait_s
        )
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
    """Return how long a service asks to be left alone; 0: it does not say."""
    said = answer.headers["Retry-After"] or ""
    return float(said) if said.isascii() and said.isdecimal() else 0.0


def http_date_s(text: str | None) -> float:
    """Return the time (seconds since the epoch) of an HTTP date.

    Raises:
        ValueError: it is none.
    """
    try:
        at = email.utils.parsedate_to_datetime(text or "")
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"not a date: {text!r}") from error
    return _seconds(at)


def iso_date_s(text: str) -> float:
    """Return the time (seconds since the epoch) of a date such as 2026-01-02T03:04:05Z.

    Raises:
        ValueError: it is none.
    """
    return _seconds(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def _seconds(at: datetime) -> float:
    aware = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    try:
        return aware.timestamp()
    except OverflowError as error:
        raise ValueError(str(error)) from error
