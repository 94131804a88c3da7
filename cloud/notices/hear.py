"""Listens for notices that the cloud will preempt this VM; standard library only.

Runs in the agent. Each cloud has its own ``NoticeSource``.
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
from spottrain.cloud.notices import aws, azure, file, gcp, source
from spottrain.cloud.port.errors import CloudError

logger = logging.getLogger(__name__)

URL_VARIABLE = "SPOTTRAIN_METADATA_URL"
"""Environment variable: URL of the metadata service, instead of the cloud's own."""
LONG_POLL_S = 5.0
"""Duration of one long poll of the local cloud."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0
MAX_RETRY_S = 60.0
"""Maximum Retry-After of a service."""


@dataclass(frozen=True, slots=True)
class PreemptionAnnounced:
    """This VM will be preempted; repeated when the time changes."""

    lead_s: float
    """Seconds left; 0: none, or unknown."""


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    """The notice was withdrawn."""


@dataclass(frozen=True, slots=True)
class AtRisk:
    """This VM is at elevated risk of preemption."""


NoticeChange = PreemptionAnnounced | NoticeWithdrawn | AtRisk


def open_source(settings: Mapping[str, Any]) -> source.NoticeSource:
    """Return the source of this VM's notices.

    Args:
        settings: ``notices`` of ``agent.json``: a ``kind`` and its parameters (local:
            ``socket`` and ``vm_id``).

    Raises:
        CloudError: the kind is unknown, or the environment's URL is invalid.
    """
    match settings.get("kind"):
        case "none":
            return _NoNotices()
        case "local":
            return LocalSource(settings["socket"], settings["vm_id"])
        case "aws":
            return aws.AwsSource(_metadata(aws.URL))
        case "azure":
            return azure.AzureSource(_metadata(azure.URL))
        case "gcp":
            return gcp.GcpSource(_metadata(gcp.URL))
        case "file":
            return file.FileSource()
        case kind:
            known = "none, local, aws, azure, gcp, file"
            raise CloudError(f"notices.kind must be one of {known}: got {kind!r}")


def _metadata(url: str) -> source.Metadata:
    return source.Metadata(os.environ.get(URL_VARIABLE) or url)


def listen(
    notices: source.NoticeSource,
    on_news: Callable[[NoticeChange], None],
    stop: threading.Event,
) -> None:
    """Listen until ``stop`` is set; runs in a thread of its own.

    If the service does not answer, it backs off; the last state remains valid.

    Args:
        notices: The source of notices.
        on_news: Called once for each change.
        stop: Ends listening once the pending request is answered.
    """
    standing, backoff_s = source.VmOutlook(), FIRST_BACKOFF_S
    while not stop.is_set():
        asked_s = time.monotonic()
        try:
            found = notices.ask()
        except source.NoAnswerError as error:
            if backoff_s == FIRST_BACKOFF_S:
                logger.info("notices are unavailable now: %s", error)
            stop.wait(max(backoff_s, min(error.retry_after_s, MAX_RETRY_S)))
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            continue
        backoff_s = FIRST_BACKOFF_S
        for one in changes_between(standing, found):
            on_news(one)
        standing = found
        stop.wait(max(0.0, asked_s + notices.every_s - time.monotonic()))


def changes_between(before: source.VmOutlook, now: source.VmOutlook) -> tuple[NoticeChange, ...]:
    """Return the changes between two states."""
    changes: list[NoticeChange] = []
    if now.notice is None and before.notice is not None:
        changes.append(NoticeWithdrawn())
    if now.notice is not None:
        known = before.notice is not None and before.notice.key == now.notice.key
        if not known:
            changes.append(PreemptionAnnounced(now.notice.lead_s))
    if now.at_risk and not before.at_risk:
        changes.append(AtRisk())
    return tuple(changes)


def acknowledge(notices: source.NoticeSource) -> None:
    """Acknowledge the notice, where the cloud supports that.

    The preemption happens anyway: errors are only logged.
    """
    try:
        notices.acknowledge()
    except source.NoAnswerError as error:
        logger.info("notice not acknowledged: %s", error)


class LocalSource(source.NoticeSource):
    """Notices of a VM of the local cloud, by long polling.

    Args:
        socket: Path of the local cloud's socket.
    """

    every_s = 0.0

    def __init__(self, socket: str, vm_id: str) -> None:
        self._socket = socket
        self._vm_id = vm_id
        self._last_id = 0
        self._current = source.VmOutlook()

    def ask(self) -> source.VmOutlook:
        """Return the newest notice; see ``NoticeSource``."""
        target = f"/metadata/{self._vm_id}/interruption?wait_s={LONG_POLL_S}&after={self._last_id}"
        timeout_s = LONG_POLL_S + source.ANSWER_S
        try:
            status, body = unix_http.request(self._socket, "GET", target, timeout_s=timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise source.NoAnswerError(f"GET {target}: {error!r}") from error
        if status == http.HTTPStatus.OK:
            notice = json.loads(body)
            self._last_id = notice["id"]
            self._current = source.VmOutlook(
                source.PreemptionNotice(str(self._last_id), notice["lead_s"])
            )
        elif status != http.HTTPStatus.NO_CONTENT:
            raise source.NoAnswerError(f"GET {target}: {status}")  # the VM has ended
        return self._current


class _NoNotices(source.NoticeSource):
    """The source of machines without notices."""

    every_s = 3600.0

    def ask(self) -> source.VmOutlook:
        return source.VmOutlook()
