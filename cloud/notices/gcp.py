"""Compute Engine's notices: half a minute before a spot VM is switched off.

The metadata server keeps a question open until what it asks for changes. Standard library
only; the agent carries this module.
"""

from __future__ import annotations

from spottrain.cloud.notices.source import (
    Metadata,
    NoAnswerError,
    PreemptionNotice,
    VmOutlook,
)

URL = "http://metadata.google.internal"
LONG_POLL_S = 30.0
"""How long one question stays open."""
LEAD_S = 30.0
"""From the notice to the end, at best; the server does not tell."""
_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_FLAVOR = {"Metadata-Flavor": "Google"}
_WORDS = {"TRUE": True, "FALSE": False}


class GcpSource:
    """A VM of Compute Engine.

    Args:
        metadata: Its metadata server.
    """

    every_s = 1.0

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._etag = ""

    def ask(self) -> VmOutlook:
        """Return what the server says, at once or when it has changed; see ``Source``."""
        target, wait_s = _PREEMPTED, 0.0
        if self._etag:  # without one a change between two questions would go unheard
            wait_s = LONG_POLL_S
            target += f"?wait_for_change=true&last_etag={self._etag}"
            target += f"&timeout_sec={wait_s:.0f}"
        self._etag, etag = "", self._etag  # after an error nothing is taken for known
        answer = self._metadata.ask("GET", target, _FLAVOR, wait_s=wait_s)
        if answer.headers["Metadata-Flavor"] != "Google":
            raise NoAnswerError("not Google's metadata server")
        preempted = _WORDS.get(word := answer.text().strip())
        if preempted is None:
            raise NoAnswerError(f"instance/preempted: got {word[:200]!r}")
        self._etag = _plain(answer.headers["ETag"] or etag)
        return VmOutlook(PreemptionNotice("preempted", LEAD_S) if preempted else None)

    def acknowledge(self) -> None:
        """Google does not want to know."""


def _plain(etag: str) -> str:
    """Return an etag that can stand in a query, else none."""
    return etag if etag.isascii() and etag.isalnum() else ""
