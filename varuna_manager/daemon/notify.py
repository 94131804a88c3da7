"""Sends notices, in a thread of its own: no event and no decision waits for them.

A notice is noted as told in the job's folder before it is sent. So none is told twice,
whenever the manager dies; one that was just being sent then is lost. If the answer of a
webhook is lost, a try that follows carries the same ``id``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import queue
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import tenacity

from spottrain import children
from spottrain.errors import SpottrainError
from spottrain.files import PRIVATE, write_whole
from spottrain.redaction import hide
from spottrain.varuna_manager.config.notify import NotifyConfig, address, webhook_url
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.reporting.notices import Notice, notices

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the state."""
TRY_S = 10.0
"""How long a command or a webhook may take."""
TRIES = 4
_MAX_PAUSE_S = 8.0


class _DeliveryError(SpottrainError):
    """A notice was not taken; trying again may help."""


class _RefusedNoticeError(SpottrainError):
    """A notice will never be taken."""


class Notifier:
    """Tells people what happens to one job.

    Args:
        job: The job; its folder keeps what has been told.
        notify: Whom to tell what.
        pause_s: Before the second try; twice as long before each further one.
    """

    def __init__(self, job: JobDir, notify: NotifyConfig, pause_s: float = 1.0) -> None:
        self._job = job
        self._notify = notify
        self._pause_s = pause_s
        self._sent_file = job.path / "notices.json"
        self._sent: dict[str, None] | None = self._load()
        self._queue = queue.SimpleQueue[dict[str, Any] | None]()
        self._leaving = threading.Event()
        self._sender: threading.Thread | None = None

    def look(self, state: State, now_s: float) -> None:
        """Send what is new. What a job had before anybody was to be told is not."""
        if not self._notify.asked or state.settings is None:
            return
        found = {one.key: one for one in notices(state, self._notify, now_s)}
        if self._sent is None:
            self._sent = dict.fromkeys(found) if state.history.progress.highest_step else {}
            self._save()
        new = [one for key, one in found.items() if key not in self._sent]
        if not new:
            return
        self._sent |= dict.fromkeys(one.key for one in new)
        for one in new:
            self._queue.put(self._document(one, state, now_s))
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, daemon=True)
            self._sender.start()

    async def watch(self, state: Callable[[], State], now_s: Callable[[], float]) -> None:
        """Look at the state until cancelled."""
        while True:
            self.look(state(), now_s())
            await asyncio.sleep(LOOK_S)

    def finish(self, limit_s: float) -> None:
        """Wait until all is sent; give up what takes too long."""
        if self._sender is None:
            return
        self._queue.put(None)
        self._sender.join(limit_s)
        self._leaving.set()

    def _document(self, notice: Notice, state: State, now_s: float) -> dict[str, Any]:
        job = self._job.name
        unique = f"{state.job.uid} {notice.key}".encode()
        return {
            "id": hashlib.sha256(unique).hexdigest()[:16],
            "job": job,
            "notice": notice.notice,
            "text": f"{job}: {notice.text}",
            "step": state.history.progress.step,
            "at_s": now_s,
        }

    # --- What has been sent -----------------------------------------------------------

    def _load(self) -> dict[str, None] | None:
        try:
            return dict.fromkeys(json.loads(self._sent_file.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _save(self) -> None:
        try:
            write_whole(self._sent_file, json.dumps(list(self._sent or ())), mode=PRIVATE)
        except OSError as error:
            logger.warning("notices may be told again: %s", error)

    # --- The sender's thread ------------------------------------------------------------

    def _send_all(self) -> None:
        while (document := self._queue.get()) is not None:
            self._save()
            if self._notify.command:
                self._try(f"command {self._notify.command[0]}", self._run, document)
            if self._notify.webhook:
                self._try("webhook", self._post, document)
            for given in self._notify.apprise:
                way = f"apprise {given.partition('://')[0]}"
                self._try(way, partial(_send_by_apprise, given), document)

    def _try(
        self,
        way: str,
        send: Callable[[dict[str, Any]], None],
        document: dict[str, Any],
    ) -> None:
        try:
            tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(_DeliveryError),
                stop=tenacity.stop_after_attempt(TRIES)
                | tenacity.stop_when_event_set(self._leaving),
                wait=tenacity.wait_exponential(self._pause_s, max=_MAX_PAUSE_S),
                sleep=tenacity.sleep_using_event(self._leaving),
                reraise=True,
            )(send, document)
        except SpottrainError as error:
            what = document["notice"]
            logger.warning("notice of %s not sent: %s %s", what, way, error)

    def _run(self, document: dict[str, Any]) -> None:
        names = {f"SPOTTRAIN_{name.upper()}": document[name] for name in ("job", "notice")}
        try:
            done = children.run(
                self._notify.command,
                env={**os.environ, **names},
                given=json.dumps(document).encode(),
                timeout_s=TRY_S,
            )
        except subprocess.TimeoutExpired as error:
            raise _DeliveryError(f"took longer than {TRY_S:g} s") from error
        except OSError as error:
            raise _RefusedNoticeError(f"cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            raise _DeliveryError(f"ended with {done.returncode}")

    def _post(self, document: dict[str, Any]) -> None:
        """Post to the webhook; errors do not show its URL, which may be a secret."""
        assert self._notify.webhook is not None
        url = webhook_url(self._notify.webhook, os.environ)
        hide((), url)
        try:
            # Redirects are not followed: they could lead off the checked scheme.
            with httpx.stream("POST", url, json=document, timeout=TRY_S / 2) as answer:
                status = answer.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _DeliveryError(f"gave no answer: {type(error).__name__}") from error
        if status in (408, 429) or status >= 500:
            raise _DeliveryError(f"answered {status}")
        if status >= 300:
            raise _RefusedNoticeError(f"answered {status}")


def _send_by_apprise(given: str, document: dict[str, Any]) -> None:
    """Send to an address of apprise's, which says only whether it was taken."""
    import apprise

    apprise.logger.disabled = True  # it prints what is in an address
    people = apprise.Apprise()
    people.add(address("apprise", given, os.environ))
    if not people.notify(body=document["text"], title=f"spottrain: {document['notice']}"):
        raise _DeliveryError("was not taken")
