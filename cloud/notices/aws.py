"""EC2's notices: two minutes before a spot VM is interrupted, and warnings before that.

Both come from the instance metadata service, version 2, which requires a token.
Standard library only; the agent carries this module.
"""

from __future__ import annotations

import http
import json

from spottrain.cloud.notices import source

URL = "http://169.254.169.254"
TOKEN_TTL_S = 21600
"""Lifetime of a token: the maximum of EC2."""
_TOKEN = "/latest/api/token"
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_OK, _NONE = http.HTTPStatus.OK, http.HTTPStatus.NOT_FOUND


class AwsSource(source.NoticeSource):
    """Notices of an EC2 VM.

    Args:
        metadata: Its metadata service.
    """

    every_s = 5.0  # as EC2's documentation advises

    def __init__(self, metadata: source.Metadata) -> None:
        self._metadata = metadata
        self._token = ""

    def ask(self) -> source.VmOutlook:
        """Return the current state; see ``NoticeSource``."""
        action, rebalance = self._get(_ACTION), self._get(_REBALANCE)
        notice = None
        if action.status == _OK:
            notice = read_action(action.text(), action.at_s)
        return source.VmOutlook(notice, at_risk=rebalance.status == _OK)

    def _get(self, target: str) -> source.Answer:
        """Return the answer for a path; status 404 means no value.

        Raises:
            NoAnswerError: the service gives no usable answer.
        """
        if self._token:
            expected = (_OK, _NONE, http.HTTPStatus.UNAUTHORIZED)
            answer = self._get_with_token(target, expected)
            if answer.status != http.HTTPStatus.UNAUTHORIZED:
                return answer
            self._token = ""  # it has expired
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        token = self._metadata.ask("PUT", _TOKEN, ttl).text().strip()
        if not (token.isascii() and token.isprintable()):
            raise source.NoAnswerError(f"PUT {_TOKEN}: got {token[:200]!r}")
        self._token = token
        return self._get_with_token(target, (_OK, _NONE))

    def _get_with_token(self, target: str, expected: tuple[int, ...]) -> source.Answer:
        headers = {"X-aws-ec2-metadata-token": self._token}
        return self._metadata.ask("GET", target, headers, expected=expected)


def read_action(text: str, now_s: float) -> source.PreemptionNotice:
    """Return the notice for an instance action of any kind.

    Args:
        text: Such as ``{"action": "terminate", "time": "2026-01-02T03:04:05Z"}``.
        now_s: Seconds since the epoch.

    Raises:
        NoAnswerError: the text is invalid.
    """
    try:
        content = json.loads(text)
        action, at = str(content["action"]), content["time"]
        lead_s = max(0.0, source.iso_date_s(at) - now_s)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise source.NoAnswerError(f"instance-action: got {text[:200]!r}") from error
    return source.PreemptionNotice(f"{action} {at}", lead_s)
