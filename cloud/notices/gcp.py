"""Compute Engine's notices: two minutes before a spot VM is shut down, as it was asked.

The metadata server supports long polling: it answers when the value changes. Standard
library only; the agent carries this module.
"""

from __future__ import annotations

from spottrain.cloud.notices import source

URL = "http://metadata.google.internal"
LONG_POLL_S = 30.0
"""Duration of one long poll."""
LEAD_S = 120.0
"""Maximum time from the notice to the end; the server does not report it."""
_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_FLAVOR = {"Metadata-Flavor": "Google"}
_WORDS = {"TRUE": True, "FALSE": False}


class GcpSource(source.NoticeSource):
    """Notices of a Compute Engine VM.

    Args:
        metadata: Its metadata server.
    """

    every_s = 1.0

    def __init__(self, metadata: source.Metadata) -> None:
        self._metadata = metadata
        self._etag = ""

    def ask(self) -> source.VmOutlook:
        """Return the state, at once or when it has changed; see ``NoticeSource``."""
        target, wait_s = _PREEMPTED, 0.0
        if self._etag:  # without one a change between two requests would be missed
            wait_s = LONG_POLL_S
            target += f"?wait_for_change=true&last_etag={self._etag}"
            target += f"&timeout_sec={wait_s:.0f}"
        self._etag, etag = "", self._etag  # after an error the state is unknown
        answer = self._metadata.ask("GET", target, _FLAVOR, wait_s=wait_s)
        if answer.headers["Metadata-Flavor"] != "Google":
            raise source.NoAnswerError("not Google's metadata server")
        preempted = _WORDS.get(word := answer.text().strip())
        if preempted is None:
            raise source.NoAnswerError(f"instance/preempted: got {word[:200]!r}")
        self._etag = _plain(answer.headers["ETag"] or etag)
        return source.VmOutlook(source.PreemptionNotice("preempted", LEAD_S) if preempted else None)


def _plain(etag: str) -> str:
    """Return an etag that is valid in a query, else an empty string."""
    return etag if etag.isascii() and etag.isalnum() else ""
