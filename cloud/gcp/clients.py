"""The SDK's clients, created on first use: importing it takes seconds."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from spottrain.cloud.gcp import translate
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.http import PriceSourceError
from spottrain.cloud.port.errors import CloudError, MisconfiguredError
from spottrain.errors import one_line

Message = dict[str, Any]
"""An answer, with the SDK's field names; 64-bit numbers are text."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_USER_URL = "https://openidconnect.googleapis.com/v1/userinfo"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_POOL = 32
"""Connections per client: one for each thread of the manager."""


class GcpClients:
    """The clients of one project, shared between threads.

    The SDK itself retries throttled and failed calls: every call that changes something
    is idempotent. Calls are about our own project unless the request names another.

    Args:
        settings: Uses ``project``, ``endpoint``, ``patience_s`` and ``answer_s``.
    """

    def __init__(self, settings: GcpSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._made: dict[str, Any] = {}

    def call(self, service: str, method: str, request: Message, answer_s: float = 0.0) -> Message:
        """Return the answer to one call.

        Args:
            service: Such as ``instances``.
            method: Such as ``get``.
            request: With the SDK's field names.
            answer_s: Timeout, if not the default one.

        Raises:
            CloudError: or the SDK's errors, inside ``translating_errors``.
        """
        return _plain(self._ask(service, method, request, answer_s))

    def find(self, service: str, method: str, request: Message) -> Message | None:
        """Return the answer to one call, None if the resource does not exist.

        Raises:
            CloudError: as ``call``.
        """
        from google.api_core.exceptions import NotFound

        try:
            return self.call(service, method, request)
        except NotFound:
            return None

    def all(self, service: str, method: str, request: Message) -> Iterator[Message]:
        """Yield all items of a paginated call."""
        for item in self._ask(service, method, request):
            yield _plain(item)

    def scopes(self, method: str, request: Message) -> Iterator[tuple[str, Message]]:
        """Yield (zone or region, content) of an aggregated list.

        Raises:
            CloudError: a zone or region did not answer.
        """
        for scope, item in self._ask(method, "aggregated_list", request):
            content = _plain(item)
            if content.get("warning", {}).get("code", "") == "UNREACHABLE":
                raise CloudError(f"GCP: {scope} does not answer; will be retried")
            yield scope.rpartition("/")[2], content

    def principal(self) -> str:
        """Return the email of who the credentials are, empty if nothing says it.

        Raises:
            CloudError: there are no credentials.
        """
        with self._lock, translate.translating_errors("asking who rents here"):
            credentials = self._login()
            email = getattr(credentials, "service_account_email", "")
            if email not in ("", "default"):
                return str(email)
            from google.auth.transport.requests import AuthorizedSession

            if not getattr(credentials, "account", ""):
                with AuthorizedSession(credentials) as session:  # the login of a person
                    answer = session.get(_USER_URL, timeout=self._settings.answer_s)
                    return str(answer.json().get("email", "")) if answer.ok else ""
            return str(credentials.account)

    def _login(self) -> Any:
        """Return the credentials that the SDK finds."""
        try:
            import google.auth
        except ImportError as error:
            raise CloudError(translate.EXTRA_MISSING) from error
        if self._credentials is None:
            self._credentials, _ = google.auth.default()
        return self._credentials

    def finish(self, operation: Message, within_s: float) -> Message:
        """Wait for an operation and return it, failed or not; by long polling.

        Raises:
            CloudError: it takes longer.
        """
        kind, scope = _scope_of(operation)
        until_s = time.monotonic() + within_s
        while operation["status"] != "DONE":
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise CloudError(
                    f"GCP: {operation.get('operation_type')} takes longer than "
                    f"{within_s:g} s; will be polled again"
                )
            named = {**scope, "operation": operation["name"]}
            operation = self.call(kind, "wait", named, answer_s=left_s)
        return operation

    def insert(self, service: str, request: Message) -> bool:
        """Create a resource and wait for it; False if it already exists.

        Raises:
            CloudError: as ``call``.
        """
        from google.api_core.exceptions import Conflict

        once = {"request_id": str(uuid.uuid4())}  # the SDK may repeat it
        try:
            operation = self.call(service, "insert_unary", request | once)
        except Conflict as error:
            if translate.code_of(error) != translate.ALREADY_EXISTS:
                raise
            return False
        translate.raise_failed(self.finish(operation, self._settings.launch_s))
        return True

    def patch(self, service: str, request: Message) -> None:
        """Change a resource and wait until it is changed.

        Raises:
            CloudError: as ``call``.
        """
        once = {"request_id": str(uuid.uuid4())}  # the SDK may repeat it
        operation = self.call(service, "patch_unary", request | once)
        translate.raise_failed(self.finish(operation, self._settings.launch_s))

    def delete(self, service: str, request: Message) -> None:
        """Delete a resource and wait until it is deleted; a missing one is not an
        error.

        Raises:
            CloudError: as ``call``.
        """
        operation = self.find(service, "delete_unary", request)
        if operation is not None:
            translate.raise_failed(self.finish(operation, self._settings.launch_s))

    def _ask(self, service: str, method: str, request: Message, answer_s: float = 0.0) -> Any:
        client = self._client(service)
        return getattr(client, method)(
            request={"project": self._settings.project, **request},
            retry=self._retry(),
            timeout=answer_s or self._settings.answer_s,
        )

    def _retry(self) -> Any:
        from google.api_core.retry import Retry

        if not self._settings.patience_s:
            return None
        return Retry(
            predicate=translate.is_transient,
            initial=_FIRST_WAIT_S,
            maximum=_LONGEST_WAIT_S,
            timeout=self._settings.patience_s,
        )

    def _client(self, service: str) -> Any:
        with self._lock, translate.translating_errors(f"setting up {service}"):
            if service not in self._made:
                self._made[service] = self._make(service)
            return self._made[service]

    def _make(self, service: str) -> Any:
        try:
            from google.api_core.client_options import ClientOptions
            from google.cloud import compute_v1
            from requests.adapters import HTTPAdapter
        except ImportError as error:
            raise CloudError(translate.EXTRA_MISSING) from error
        made: Callable[..., Any] = getattr(compute_v1, _CLIENTS[service])
        options = ClientOptions(api_endpoint=self._settings.endpoint or None)
        client: Any = made(credentials=self._login(), client_options=options)
        adapter = HTTPAdapter(pool_maxsize=_POOL)
        for scheme in ("https://", "http://"):
            client.transport._session.mount(scheme, adapter)
        return client


def default_project() -> str:
    """Return the project of the credentials that the SDK finds.

    Raises:
        CloudError: there are no credentials, or they name no project.
    """
    with translate.translating_errors("looking for a project"):
        try:
            import google.auth
        except ImportError as error:
            raise CloudError(translate.EXTRA_MISSING) from error
        _, project = google.auth.default()
    if not project:
        raise MisconfiguredError(
            "GCP: the credentials name no project; give gcp.project or run 'gcloud auth "
            "application-default set-quota-project'"
        )
    return str(project)


_CLIENTS = {
    "accelerator_types": "AcceleratorTypesClient",
    "advice": "AdviceClient",
    "firewalls": "FirewallsClient",
    "global_operations": "GlobalOperationsClient",
    "images": "ImagesClient",
    "instances": "InstancesClient",
    "machine_types": "MachineTypesClient",
    "networks": "NetworksClient",
    "projects": "ProjectsClient",
    "region_operations": "RegionOperationsClient",
    "regions": "RegionsClient",
    "subnetworks": "SubnetworksClient",
    "zone_operations": "ZoneOperationsClient",
}


def _plain(message: Any) -> Message:
    made: Message = type(message).to_dict(
        message,
        use_integers_for_enums=False,
        always_print_fields_with_no_presence=False,
    )
    return made


def _scope_of(operation: Message) -> tuple[str, Message]:
    """Return the service of an operation, and its zone or region."""
    for scope in ("zone", "region"):
        if url := operation.get(scope):
            return f"{scope}_operations", {scope: url.rpartition("/")[2]}
    return "global_operations", {}


def authorization(url: str) -> dict[str, str]:
    """Return headers with the credentials that Google's SDK finds.

    Args:
        url: Of the API that is to be asked.

    Raises:
        PriceSourceError: There are no credentials.
    """
    try:
        import google.auth
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import Request
    except ImportError as error:
        raise PriceSourceError(
            "no credentials; pip install google-cloud-compute, or set GOOGLE_API_KEY"
        ) from error
    headers: dict[str, str] = {}
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
        # Adds the token, and for a user's own credentials the project that pays.
        credentials.before_request(Request(), "GET", url, headers)
    except GoogleAuthError as error:
        why = one_line(error).partition(". ")[0]
        raise PriceSourceError(
            "no credentials; run 'gcloud auth application-default login', or set "
            f"GOOGLE_API_KEY: {why}"
        ) from error
    return headers
