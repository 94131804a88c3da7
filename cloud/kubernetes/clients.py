"""The API server, by the official client; its errors as ours."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import urllib3
import websocket
from kubernetes import client, config, stream
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from spottrain.cloud.kubernetes.settings import KubernetesSettings
from spottrain.cloud.port import errors
from spottrain.errors import one_line

_CORE = client.CoreV1Api
_ANSWER_S = 30.0
"""Time limit of an answer."""
_SILENT_S = 30
"""An API server that acknowledges nothing for so long is given up by port-forwards."""


# Or a dial waits for as long as TCP does. No other library here uses it.
websocket.setdefaulttimeout(_ANSWER_S)


class Clients:
    """One namespace of a cluster; thread-safe.

    Credentials are read at the first call, and again when the API server refuses them: tokens
    expire, and whoever issues them has put others into the kubeconfig since.
    """

    def __init__(self, settings: KubernetesSettings) -> None:
        self._context = settings.context
        self._namespace = settings.namespace
        self._lock = threading.Lock()
        self._api: client.ApiClient | None = None

    def create(self, pod: Mapping[str, Any], *, dry_run: bool = False) -> None:
        """Create a pod; one of its name that exists is ours.

        Args:
            dry_run: Only ask whether it would be accepted.

        Raises:
            CloudError: as ``refusal``.
        """
        options = {"dry_run": "All"} if dry_run else {}
        with contextlib.suppress(AlreadyExistsError):
            self._ask(_CORE, "create_namespaced_pod", self._namespace, pod, **options)

    def pods(self, selector: str) -> list[Any]:
        """Return the pods with some labels."""
        found: list[Any] = self._ask(
            _CORE, "list_namespaced_pod", self._namespace, label_selector=selector
        )["items"]
        return found

    def delete(self, name: str, grace_s: int) -> None:
        """Have a pod end, at most so long after it is told; one that is gone is no error."""
        with contextlib.suppress(errors.VmNotFoundError):
            where = name, self._namespace
            self._ask(_CORE, "delete_namespaced_pod", *where, grace_period_seconds=grace_s)

    def nodes(self, selector: str) -> list[Any]:
        """Return the nodes with some labels.

        Raises:
            AuthError: we may not read nodes.
        """
        found: list[Any] = self._ask(_CORE, "list_node", label_selector=selector)["items"]
        return found

    def may(self, verb: str, resource: str) -> bool:
        """Return whether we may do something (SelfSubjectAccessReview).

        Args:
            verb: Such as ``create``.
            resource: Such as ``pods/portforward``; nodes are in no namespace.
        """
        name, _, part = resource.partition("/")
        where = {} if name == "nodes" else {"namespace": self._namespace}
        asked = {"verb": verb, "resource": name, "subresource": part, **where}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        call = "create_self_subject_access_review"
        return bool(self._ask(client.AuthorizationV1Api, call, review)["status"]["allowed"])

    def user(self) -> str:
        """Return the name that the API server knows us by; empty before Kubernetes 1.28."""
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        try:
            found = self._ask(client.AuthenticationV1Api, "create_self_subject_review", review)
        except errors.VmNotFoundError:
            return ""
        return str(found["status"]["userInfo"].get("username", ""))

    def forward(self, name: str, port: int) -> socket.socket:
        """Return a connection to a port on a pod's loopback.

        Raises:
            CloudError: there is none; as ``refusal``.
        """

        def ask(api: client.ApiClient) -> Any:
            # A client of its own: ``portforward`` changes it while it connects.
            core = client.CoreV1Api(client.ApiClient(api.configuration))
            call = core.connect_get_namespaced_pod_portforward
            try:
                return stream.portforward(call, name, self._namespace, ports=str(port))
            except AttributeError as error:
                # The client decodes the body of an answer that has none (36.0).
                if isinstance(error.__context__, ApiException):
                    raise error.__context__ from None
                raise

        forwarded = self._call(ask)
        carrier = forwarded.websocket.sock
        with contextlib.suppress(OSError):  # it may be closed already
            forwarded.websocket.settimeout(None)
            if carrier is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                carrier.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                carrier.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S)
        connection: socket.socket = forwarded.socket(port)
        return connection

    def _ask(self, group: Any, call: str, *arguments: Any, **options: Any) -> Any:
        """Return the JSON that a call of the client answers."""
        limits = {"_preload_content": False, "_request_timeout": _ANSWER_S}
        answer = self._call(lambda api: getattr(group(api), call)(*arguments, **options, **limits))
        return json.loads(answer.data)

    def _call(self, call: Callable[[client.ApiClient], Any]) -> Any:
        used = self._client()
        try:
            return _translated(call, used)
        except errors.LoginExpiredError:
            with self._lock:
                if self._api is used:
                    self._api = None
            return _translated(call, self._client())

    def _client(self) -> client.ApiClient:
        with self._lock:
            if self._api is None:
                self._api = client.ApiClient(_read(self._context))
            return self._api


def _translated(call: Callable[[client.ApiClient], Any], api: client.ApiClient) -> Any:
    try:
        return call(api)
    except ApiException as error:
        raise refusal(error) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise errors.CloudError(f"kubernetes: {one_line(error)}") from error


def is_inside() -> bool:
    """Return whether this process is in a pod, with a service account of its own."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _read(context: str) -> client.Configuration:
    """Return the cluster's address and our credentials.

    Raises:
        MisconfiguredError: there are none.
    """
    found = client.Configuration()
    try:
        if is_inside() and not context:
            config.load_incluster_config(client_configuration=found)
        else:
            file = os.environ.get("KUBECONFIG")  # the client reads it only once
            config.load_kube_config(file, context or None, found)
    except (ConfigException, OSError) as error:
        raise errors.MisconfiguredError(
            f"kubernetes: {one_line(error)}; 'kubectl config get-contexts' lists what "
            "kubernetes.context may be"
        ) from error
    return found


class AlreadyExistsError(errors.CloudError):
    """A pod has that name already."""


def refusal(error: ApiException) -> errors.CloudError:
    """Return the error for an answer of the API server.

    Its reasons are those of ``metav1.StatusReason`` (apimachinery, meta/v1/types.go).
    """
    status, said = error.status or 0, _message(error)
    if handshake := re.match(r"Handshake status (\d+)", said):
        status, said = int(handshake[1]), f"port-forward: {said.partition(' -+-+-')[0]}"
    message = f"kubernetes: {said}"
    match status:
        case 401:
            return errors.LoginExpiredError(f"{message}; log in to the cluster anew")
        case 403 if "exceeded quota" in said:
            return errors.QuotaExceededError(message)
        case 403 if re.search(r"cannot \w+ resource", said) or handshake:
            return errors.AuthError(f"{message}; see docs/clouds/kubernetes.md, Permissions")
        case 403 | 400 | 422:  # policies of admission, and what the API does not accept
            return errors.MisconfiguredError(message)
        case 404 if "namespaces" in said:
            return errors.MisconfiguredError(message)
        case 404:
            return errors.VmNotFoundError(message)
        case 409 if _reason(error) == "AlreadyExists":
            return AlreadyExistsError(message)
        case 429:
            return errors.ThrottledError(message, _retry_after_s(error))
    return errors.CloudError(message)


def _message(error: ApiException) -> str:
    told = _body(error).get("message") or error.reason or f"status {error.status}"
    return " ".join(str(told).split())[:500]


def _reason(error: ApiException) -> str:
    return str(_body(error).get("reason", ""))


def _body(error: ApiException) -> Mapping[str, Any]:
    try:
        found = json.loads(error.body or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _retry_after_s(error: ApiException) -> float:
    text = str((error.headers or {}).get("Retry-After", ""))
    return float(text) if text.isdecimal() else 1.0
