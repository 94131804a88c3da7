"""The SDK's clients, created on first use: importing them takes seconds."""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
from typing import Any

from spottrain.cloud.azure.settings import MANAGEMENT_URL, AzureSettings
from spottrain.cloud.azure.translate import EXTRA_MISSING, translating_errors
from spottrain.cloud.port.errors import CloudError, MisconfiguredError

_CONNECT_S = 5
_POOL = 32
"""Connections: one for each thread of the manager."""


class AzureClients:
    """The clients of one subscription, shared between threads.

    The SDK itself retries throttled and failed calls, with backoff.

    Args:
        settings: Subscription, endpoints, retries and timeouts.
    """

    def __init__(self, settings: AzureSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}
        self._shared: dict[str, Any] = {}

    @property
    def subscription(self) -> str:
        """Id of the subscription.

        Raises:
            MisconfiguredError: none is named.
        """
        named = self._settings.subscription or os.environ.get("AZURE_SUBSCRIPTION_ID")
        if not named:
            raise MisconfiguredError(
                "Azure: no subscription is named; give azure.subscription or set "
                "AZURE_SUBSCRIPTION_ID"
            )
        return named

    @property
    def compute(self) -> Any:
        """VMs, sizes and quotas."""
        return self._get("compute")

    @property
    def network(self) -> Any:
        """Networks, rules and addresses."""
        return self._get("network")

    @property
    def resources(self) -> Any:
        """Resource groups, and resources of any kind."""
        return self._get("resources")

    def principal(self) -> str:
        """Return object and tenant id of who the credentials are: ``oid@tid``.

        Azure's tokens are JWTs; what they claim is read, not checked: Azure checks it.

        Raises:
            CloudError: no token is given.
        """
        with self._lock, translating_errors("asking who rents here"):
            try:
                self._share()
            except ImportError as error:
                raise CloudError(EXTRA_MISSING) from error
            credential = self._shared["credential"]
        with translating_errors("asking who rents here (or give azure.owner)"):
            url = self._settings.endpoint_url.rstrip("/")
            parts = credential.get_token(f"{url}/.default").token.split(".")
        if len(parts) != 3:
            return ""
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        claims = json.loads(base64.urlsafe_b64decode(padded))
        return f"{claims.get('oid', '')}@{claims.get('tid', '')}"

    def _get(self, name: str) -> Any:
        with self._lock, translating_errors(f"setting up {name}"):
            if name not in self._made:
                self._made[name] = self._make(name)
            return self._made[name]

    def _make(self, name: str) -> Any:
        try:
            if name == "compute":
                from azure.mgmt.compute import ComputeManagementClient as Client
            elif name == "network":
                from azure.mgmt.network import NetworkManagementClient as Client
            else:
                from azure.mgmt.resource.resources import (
                    ResourceManagementClient as Client,
                )
            self._share()
        except ImportError as error:
            raise CloudError(EXTRA_MISSING) from error
        url = self._settings.endpoint_url.rstrip("/")
        return Client(
            self._shared["credential"],
            self.subscription,
            base_url=url,
            credential_scopes=[f"{url}/.default"],
            transport=self._shared["transport"],
            retry_total=self._settings.tries - 1,
            polling_interval=self._settings.poll_s,
        )

    def _share(self) -> None:
        """Create the credential and connection pool that all clients share."""
        if self._shared:
            return
        # It logs a page for each missing login; the error says what to do.
        logging.getLogger("azure.identity").setLevel(logging.ERROR)
        import requests
        from azure.core.pipeline.transport import RequestsTransport
        from azure.identity import DefaultAzureCredential
        from requests.adapters import HTTPAdapter

        settings = self._settings
        verify: Any = settings.ca_file or True
        session = requests.Session()
        session.mount("https://", HTTPAdapter(pool_maxsize=_POOL))
        login: dict[str, Any] = {"connection_verify": verify}
        if settings.authority_url:
            login["authority"] = settings.authority_url
        if settings.endpoint_url != MANAGEMENT_URL:
            # Instance discovery asks the public cloud, which knows few others.
            login["disable_instance_discovery"] = True
        self._shared = {
            "credential": DefaultAzureCredential(**login),
            "transport": RequestsTransport(
                session=session,
                session_owner=False,
                connection_verify=verify,
                connection_timeout=_CONNECT_S,
                read_timeout=settings.answer_s,
            ),
            "session": session,
        }
