"""boto3's clients, created on first use: importing boto3 takes half a second."""

from __future__ import annotations

import threading
from typing import Any

from spottrain.aws_login import open_session
from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.aws.translate import EXTRA_MISSING, translating_errors
from spottrain.cloud.port.errors import CloudError

_CONNECT_S = 5
_POOL = 32
"""Connections per client: one for each thread of the manager."""


class AwsClients:
    """The clients of one account, shared between threads.

    boto3 itself retries throttled and failed calls, with backoff.

    Args:
        settings: Uses ``endpoint_url``, ``tries`` and ``answer_s``.
    """

    def __init__(self, settings: AwsSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._session: Any = None
        self._made: dict[tuple[str, str, int], Any] = {}

    def get(self, service: str, region: str) -> Any:
        """Return a client that retries.

        Raises:
            CloudError: boto3 is not installed or cannot be set up.
        """
        return self._client(service, region, self._settings.tries)

    def without_retries(self, service: str, region: str) -> Any:
        """Return a client that never retries.

        EC2 reports "no capacity" as a server error, which boto3 would retry for up to
        half a minute.
        """
        return self._client(service, region, 1)

    def _client(self, service: str, region: str, tries: int) -> Any:
        key = service, region, tries
        with self._lock, translating_errors(f"setting up {service} in {region}"):
            if key not in self._made:
                self._made[key] = self._make(service, region, tries)
            return self._made[key]

    def _make(self, service: str, region: str, tries: int) -> Any:
        try:
            from botocore.config import Config

            if self._session is None:
                self._session = open_session(self._settings.profile or None)
        except ImportError as error:
            raise CloudError(EXTRA_MISSING) from error
        return self._session.client(
            service,
            region_name=region,
            endpoint_url=self._settings.endpoint_url,
            config=Config(
                retries={"mode": "standard", "total_max_attempts": tries},
                connect_timeout=_CONNECT_S,
                read_timeout=self._settings.answer_s,
                max_pool_connections=_POOL,
            ),
        )
