"""Hears that the cloud is about to take this VM away; standard library only.

Runs in the agent. Each cloud's way of telling is a ``NoticeSource``; all are listened to alike.
"""

from __future__ import annotations

import http
import http.client
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spottrain.cloud import unix_http
from spottrain.cloud.notices import aws, azure, gcp
from spottrain.cloud.notices.source import (
    ANSWER_S,
    Metadata,
    NoAnswerError,
    NoticeSource,
    PreemptionNotice,
    VmOutlook,
)
from spottrain.cloud.port.errors import CloudError

logger = logging.getLogger(__name__)

URL_VARIABLE = "SPOTTRAIN_METADATA_URL"
"""Environment variable: where the metadata service is, if not where its cloud has it."""
LONG_POLL_S = 5.0
"""How long the local cloud keeps one question open."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0
MAX_RETRY_S = 60.0
"""The longest that a service may ask to be left alone."""


@dataclass(frozen=True, slots=True)
class PreemptionAnnounced:
    """This VM will be taken; told again when that changes."""

    lead_s: float
    """Seconds left; 0: it is late, or nobody says."""


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    """The notice does not stand any more."""


@dataclass(frozen=True, slots=True)
class AtRisk:
    """This VM is likelier than others to be taken."""


NoticeChange = PreemptionAnnounced | NoticeWithdrawn | AtRisk


def open_source(told: Mapping[str, Any]) -> NoticeSource:
    """Return where this VM hears of its end.

    Args:
        told: As the VM's cloud wrote it in ``agent.json``: its ``kind``, and what that
            kind needs (local: ``socket`` and ``vm_id``).

    Raises:
        CloudError: the kind is unknown, or the environment names no address.
    """
    match told.get("kind"):
        case "none":
            return _NoNotices()
        case "local":
            return LocalSource(told["socket"], told["vm_id"])
        case "aws":
            return aws.AwsSource(_metadata(aws.URL))
        case "azure":
            return azure.AzureSource(_metadata(azure.URL))
        case "gcp":
            return gcp.GcpSource(_metadata(gcp.URL))
        case kind:
            known = "none, local, aws, azure, gcp"
            raise CloudError(f"notices.kind must be one of {known}: got {kind!r}")


def _metadata(url: str) -> Metadata:
    return Metadata(os.environ.get(URL_VARIABLE) or url)


def listen(
    open_source: NoticeSource,
    on_news: Callable[[NoticeChange], None],
    stop: threading.Event,
) -> None:
    """Listen until ``stop`` is set; meant for a thread of its own.

    While nobody answers, it asks ever more rarely; what was said before stands.

    Args:
        source: Where to listen.
        on_news: Called once for each thing that has changed.
        stop: Ends the listening, once the question that is open is answered.
    """
    standing, backoff_s = VmOutlook(), FIRST_BACKOFF_S
    while not stop.is_set():
        asked_s = time.monotonic()
        try:
            found = open_source.ask()
        except NoAnswerError as error:
            if backoff_s == FIRST_BACKOFF_S:
                logger.info("no notice can be heard now: %s", error)
            stop.wait(max(backoff_s, min(error.retry_after_s, MAX_RETRY_S)))
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            continue
        backoff_s = FIRST_BACKOFF_S
        for one in changes_between(standing, found):
            on_news(one)
        standing = found
        stop.wait(max(0.0, asked_s + open_source.every_s - time.monotonic()))


def changes_between(before: VmOutlook, now: VmOutlook) -> tuple[NoticeChange, ...]:
    """Return what has changed from one answer to the next."""
    changes: list[NoticeChange] = []
    if now.notice is None and before.notice is not None:
        changes.append(NoticeWithdrawn())
    if now.notice is not None:
        told = before.notice is not None and before.notice.key == now.notice.key
        if not told:
            changes.append(PreemptionAnnounced(now.notice.lead_s))
    if now.at_risk and not before.at_risk:
        changes.append(AtRisk())
    return tuple(changes)


def acknowledge(open_source: NoticeSource) -> None:
    """Tell the cloud, where it wants to know, that it may take this VM now.

    It will take it anyway: whatever goes wrong is told to the log alone.
    """
    try:
        open_source.acknowledge()
    except NoAnswerError as error:
        logger.info("notice not acknowledged: %s", error)


class LocalSource:
    """A VM of the local cloud, which keeps a question open until there is a notice.

    Args:
        socket: Where the local cloud listens.
        vm_id: The VM.
    """

    every_s = 0.0

    def __init__(self, socket: str, vm_id: str) -> None:
        self._socket = socket
        self._vm_id = vm_id
        self._last_id = 0
        self._current = VmOutlook()

    def ask(self) -> VmOutlook:
        """Return the newest notice; see ``NoticeSource``."""
        target = (
            f"/metadata/{self._vm_id}/interruption"
            f"?wait_s={LONG_POLL_S}&after={self._last_id}"
        )
        timeout_s = LONG_POLL_S + ANSWER_S
        try:
            status, body = unix_http.request(
                self._socket, "GET", target, timeout_s=timeout_s
            )
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"GET {target}: {error!r}") from error
        if status == http.HTTPStatus.OK:
            told = json.loads(body)
            self._last_id = told["id"]
            self._current = VmOutlook(
                PreemptionNotice(str(self._last_id), told["lead_s"])
            )
        elif status != http.HTTPStatus.NO_CONTENT:
            raise NoAnswerError(f"GET {target}: {status}")  # it knows this VM no more
        return self._current

    def acknowledge(self) -> None:
        """The local cloud does not want to know."""


class _NoNotices:
    """Nobody gives notice on a machine that nobody rents out."""

    every_s = 3600.0

    def ask(self) -> VmOutlook:
        return VmOutlook()

    def acknowledge(self) -> None:
        pass
