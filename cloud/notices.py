"""Hears that the cloud is about to take this VM away; standard library only.

Runs in the agent. Each kind of source is one function in ``_WATCHERS``; the metadata
services of further clouds get their own entry there.
"""

from __future__ import annotations

import http
import http.client
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from spottrain.cloud import unix_http
from spottrain.cloud.errors import CloudError

LONG_POLL_S = 5.0
"""How long one question stays open, and so how long ``stop`` may take to be seen."""

_ANSWER_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0


def watch(
    source: Mapping[str, Any],
    on_notice: Callable[[float], None],
    stop: threading.Event,
) -> None:
    """Listen until ``stop`` is set; meant for a thread of its own.

    Args:
        source: Where to listen, as the provider wrote it in ``agent.json``: its
            ``kind``, and what that kind needs (local: ``socket`` and ``vm_id``).
        on_notice: Called with the seconds left, once for each distinct notice.
        stop: Ends the listening, within ``LONG_POLL_S``.

    Raises:
        CloudError: the kind is unknown.
    """
    kind = source.get("kind")
    if kind not in _WATCHERS:
        raise CloudError(
            f"notices.kind must be one of {', '.join(_WATCHERS)}: got {kind!r}"
        )
    _WATCHERS[kind](source, on_notice, stop)


def _watch_local(
    source: Mapping[str, Any],
    on_notice: Callable[[float], None],
    stop: threading.Event,
) -> None:
    """Long-poll the local cloud; while it is away, try again ever more slowly."""
    seen = 0
    backoff_s = _FIRST_BACKOFF_S
    while not stop.is_set():
        target = (
            f"/metadata/{source['vm_id']}/interruption"
            f"?wait_s={LONG_POLL_S}&after={seen}"
        )
        try:
            notice = _ask_local(source["socket"], target)
        except (OSError, http.client.HTTPException):
            stop.wait(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            continue
        backoff_s = _FIRST_BACKOFF_S
        if notice is not None:
            seen = notice["id"]
            on_notice(notice["lead_s"])


def _ask_local(socket_path: str, target: str) -> dict[str, Any] | None:
    """Return the notice, ``None`` if there is none so far.

    Raises:
        OSError: the local cloud is away, or knows this VM no more.
        http.client.HTTPException: its answer is not whole.
    """
    timeout_s = LONG_POLL_S + _ANSWER_TIMEOUT_S
    status, body = unix_http.request(socket_path, "GET", target, timeout_s=timeout_s)
    if status == http.HTTPStatus.NO_CONTENT:
        return None
    if status != http.HTTPStatus.OK:
        raise OSError(f"GET {target}: {status}")
    notice: dict[str, Any] = json.loads(body)
    return notice


def _watch_nothing(
    source: Mapping[str, Any],
    on_notice: Callable[[float], None],
    stop: threading.Event,
) -> None:
    """Nobody gives notice on a machine that nobody rents out."""


_WATCHERS = {"local": _watch_local, "none": _watch_nothing}
