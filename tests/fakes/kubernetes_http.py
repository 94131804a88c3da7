"""The API server of the fake cluster: HTTP, and port-forwards over WebSockets."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import select
import socket
import ssl
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.http_server import Handler, Server
from tests.fakes.kubernetes import NAMESPACE, USER, FakeCluster
from tests.fakes.kubernetes_rules import RefusedError, check_schema, selected
from websocket import ABNF
from websocket._abnf import frame_buffer

_PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods(?:/([^/]+)(?:/(portforward))?)?")
_KEY = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455, 1.3."""
_PROTOCOLS = ("v4.channel.k8s.io", "v5.channel.k8s.io")
_CHUNK_BYTES = 1 << 16
_VERBS = {"GET": "get", "POST": "create", "DELETE": "delete"}


class _ApiServer(Server):
    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.cluster = cluster
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(cluster.identity.path)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Shake hands in the thread of the connection."""
        plain, address = super().get_request()
        wrapped = self._tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        return wrapped, address


def server_of(cluster: FakeCluster) -> Server:
    """Return the API server of a cluster."""
    return _ApiServer(cluster)


class _Request(Handler):
    server: _ApiServer

    def _handle(self) -> None:
        verb = _VERBS[self.command]
        raw = self.body()
        if raw is None:
            return
        cluster, parts = self.server.cluster, urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        cluster.requests.append(f"{verb} {parts.path}")
        is_change = (verb, parts.path.endswith("/pods")) == ("create", True) or verb == "delete"
        done, answered = cluster.breaks() if is_change and "dryRun" not in query else (True, True)
        if not done:
            self.break_off()
            return
        try:
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or token != cluster.token:  # RFC 9110, 11.1
                raise RefusedError(401, "Unauthorized", "Unauthorized")
            answer = self._answer(verb, parts.path, query, json.loads(raw) if raw else {})
        except RefusedError as refused:
            status = {
                "apiVersion": "v1",
                "kind": "Status",
                "status": "Failure",
                "code": refused.code,
                "reason": refused.reason,
                "message": refused.message,
            }
            self._send(refused.code, status)
            return
        if not answered:
            self.break_off()
        elif answer is not None:
            self._send(201 if verb == "create" else 200, answer)

    do_GET = do_POST = do_DELETE = _handle  # noqa: N815 - http.server's names

    def _send(self, code: int, answer: Any) -> None:
        self.send(code, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _answer(self, verb: str, path: str, query: dict[str, str], body: Any) -> Any:
        """Return the answer; None: the connection has become a WebSocket's."""
        cluster = self.server.cluster
        if verb == "create" and path == "/apis/authentication.k8s.io/v1/selfsubjectreviews":
            check_schema(body)
            return {**body, "status": {"userInfo": {"username": USER}}}
        if verb == "create" and path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews":
            check_schema(body)
            asked = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
            allowed = (asked["verb"], resource) not in cluster.forbidden
            if resource != "nodes":
                allowed &= asked["namespace"] == NAMESPACE
            return {**body, "status": {"allowed": allowed}}
        if verb == "get" and path == "/api/v1/nodes":
            self._allow("list", "nodes", query, "labelSelector")
            chosen = query.get("labelSelector", "")
            with cluster.lock:
                nodes = list(cluster.nodes.values())
            items = [n for n in nodes if selected(chosen, n["metadata"]["labels"])]
            return {"apiVersion": "v1", "kind": "NodeList", "metadata": {}, "items": items}
        match = _PODS.fullmatch(path)
        if match is None:
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")
        namespace, name, part = match.groups()
        if verb == "create" and name is None:
            self._allow("create", "pods", query, "dryRun")
            return cluster.create(namespace, body, dry_run=query.get("dryRun") == "All")
        if verb == "get" and name is None:
            self._allow("list", "pods", query, "labelSelector")
            items = cluster.list(query.get("labelSelector", ""))
            return {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items}
        if verb == "delete" and name is not None and part is None:
            self._allow("delete", "pods", query, "gracePeriodSeconds")
            grace = query.get("gracePeriodSeconds")
            return cluster.delete(name, None if grace is None else int(grace))
        if verb == "get" and name is not None and part is not None:
            self._allow("get", "pods/portforward", query, "ports")
            self._allow("create", "pods/portforward", {}, "")  # 1.35 and newer
            self._forward(name, int(query["ports"]))
            return None
        raise RefusedError(405, "MethodNotAllowed", "the server does not allow this method")

    def _allow(self, verb: str, resource: str, query: dict[str, str], known: str) -> None:
        """Refuse what the user may not do, and parameters that we do not know."""
        if query.keys() - {known}:
            raise RefusedError(400, "BadRequest", f"unknown parameters: {sorted(query)}")
        if (verb, resource) in self.server.cluster.forbidden:
            raise RefusedError(
                403,
                "Forbidden",
                f'{resource} is forbidden: User "{USER}" cannot {verb} resource "{resource}" in '
                f'API group "" in the namespace "{NAMESPACE}"',
            )

    def _forward(self, name: str, port: int) -> None:
        """Carry one port over a WebSocket: channel 0 is data, channel 1 errors.

        Both begin with the port (kubernetes/pkg/kubelet, portforward/websocket.go).
        """
        asked = self.headers.get("Sec-WebSocket-Protocol", "")
        spoken = [one for one in asked.split(",") if one.strip() in _PROTOCOLS]
        if self.headers.get("Upgrade", "").lower() != "websocket" or not spoken:
            raise RefusedError(400, "BadRequest", "Upgrade request required")
        cluster = self.server.cluster
        pod: socket.socket | None = None
        problem = ""
        try:
            pod = cluster.forward(name, port)
        except OSError as error:
            problem = f"error forwarding port {port} to pod {name}: {error}"
        key = self.headers["Sec-WebSocket-Key"] + _KEY
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        digest = hashlib.sha1(key.encode(), usedforsecurity=False).digest()
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(digest).decode())
        self.send_header("Sec-WebSocket-Protocol", spoken[0].strip())
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        for channel in (0, 1):
            self._frame(bytes([channel]) + port.to_bytes(2, "little"))
        if pod is None:
            self._frame(b"\x01" + problem.encode())
            return
        with contextlib.suppress(OSError, EOFError):  # either side may end in any way
            self._carry(pod)
        pod.close()

    def _carry(self, pod: socket.socket) -> None:
        """Copy in both directions; in one thread, as TLS is not for two."""
        carrier = self.connection
        assert isinstance(carrier, ssl.SSLSocket)
        frames = frame_buffer(self._receive, skip_utf8_validation=True)
        while True:
            ready = [carrier] if carrier.pending() else select.select([carrier, pod], [], [])[0]
            if carrier in ready:
                frame = frames.recv_frame()
                if frame.opcode == ABNF.OPCODE_CLOSE:
                    return
                assert frame.data[0] == 0, "only the data channel is written to"
                pod.sendall(frame.data[1:])
            elif data := pod.recv(_CHUNK_BYTES):
                self._frame(b"\0" + data)
            else:
                return

    def _receive(self, size: int) -> bytes:
        data: bytes = self.connection.recv(size)
        if not data:
            raise EOFError
        return data

    def _frame(self, data: bytes) -> None:
        self.connection.sendall(ABNF(1, 0, 0, 0, ABNF.OPCODE_BINARY, 0, data).format())
