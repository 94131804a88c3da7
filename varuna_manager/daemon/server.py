"""The HTTPS server of the control channel: agents and the command line call it.

    POST /v1/register     Registration -> {}           503 another software version
    POST /v1/heartbeat    Heartbeat -> HeartbeatAnswer (a long poll)      409 stale
    POST /v1/reports      ReportBatch -> ReportAnswer     409 facts are missing
    POST /v1/logs         LogTails -> {}
    POST /v1/traces       ?trace=TraceWritten, its file -> {}   410 it is not expected
    GET  /v1/job          -> JobSpec
    GET  /v1/workdir      -> the user's workdir, packed       410 it cannot be read
    POST /v1/admin/stop   {"checkpoint": bool, "now": bool, "by": str} -> {}
    POST /v1/admin/limits {"limits": [Limit], "sure": bool, "by": str} -> {}
                                                          409 it would end the job
    POST /v1/admin/grant  PoolGrant, its VMs as [{kind, number}] -> {}
    POST /v1/admin/profile {"minibatches": int, "content": TraceContent} -> TraceSet
                                                               409 nothing trains now
    GET  /metrics         -> Prometheus' text format
    GET  /healthz         -> one line: 200, or 503 with what is wrong

The last two take the token for metrics, or the admin token.
Each request has a token; an unknown or revoked one is answered 403. An error's body is
``{"error": one line}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import json
import math
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spottrain.codec import decode, encode
from spottrain.errors import SpottrainError, WireError
from spottrain.serving import Server
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant
from spottrain.varuna_manager.daemon.metrics import CONTENT_TYPE
from spottrain.varuna_manager.daemon.requests import Requests
from spottrain.varuna_manager.daemon.sessions import AgentSessions, OutOfStepError
from spottrain.varuna_manager.jobs.folder import try_to_write_text
from spottrain.varuna_manager.jobs.traces import TracesRefusedError
from spottrain.varuna_manager.launch.limits import LimitsRefusedError
from spottrain.version import software_version
from spottrain.wire.messages import (
    MAX_BATCH_BYTES,
    MAX_LOGS_BYTES,
    MAX_TRACE_BYTES,
    Heartbeat,
    HeartbeatAnswer,
    JobSpec,
    LogTails,
    Registration,
    ReportBatch,
    TraceContent,
    TraceWritten,
)

PORTS = range(20000, 30000)
"""Below the ephemeral range, so that no outgoing connection takes a job's port."""
REQUEST_S = 30.0
"""A connection whose request is not whole this long after it began is closed: uvicorn
would keep it, and its file descriptor, for ever."""
_LARGEST_BODY_BYTES = 64 * 1024
"""Of every message but reports, logs and traces."""
_NOTHING = Response(encode(HeartbeatAnswer(commands=())), media_type="application/json")
"""The answer to nearly all heartbeats."""
_GRACE_S = 1


class PortError(SpottrainError):
    """The manager cannot listen."""


@dataclass(frozen=True, slots=True)
class ControlChannel:
    """The application behind the server."""

    requests: Requests
    sessions: AgentSessions
    spec: JobSpec
    workdir: Path
    admin_token: str
    metrics_token: str

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routed = Starlette(
            routes=[
                Route("/v1/heartbeat", self._heartbeat, methods=["POST"]),
                Route("/v1/reports", self._reports, methods=["POST"]),
                Route("/v1/register", self._register, methods=["POST"]),
                Route("/v1/job", self._job),
                Route("/v1/workdir", self._workdir),
                Route("/v1/admin/stop", self._stop, methods=["POST"]),
                Route("/v1/admin/limits", self._limits, methods=["POST"]),
                Route("/v1/admin/grant", self._grant, methods=["POST"]),
                Route("/v1/logs", self._logs, methods=["POST"]),
                Route("/v1/traces", self._traces, methods=["POST"]),
                Route("/v1/admin/profile", self._trace, methods=["POST"]),
                Route("/metrics", self._metrics),
                Route("/healthz", self._healthz),
            ],
            exception_handlers={HTTPException: _answer_error},
        )

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            is_beat = scope.get("path") == "/v1/heartbeat" and scope["method"] == "POST"
            if not is_beat:
                await routed(scope, receive, send)
                return
            # Nearly all calls are these: routing is a tenth of what one costs.
            request = Request(scope, receive)
            try:
                response = await self._heartbeat(request)
            except HTTPException as error:
                response = await _answer_error(request, error)
            await response(scope, receive, send)

        return app

    def _caller(self, request: Request) -> str:
        """Return the VM that is calling; 403 for any other caller."""
        vm_id = self.sessions.vm_of(_bearer(request))
        if vm_id is None:
            raise HTTPException(403, "token is unknown or revoked: this VM must end")
        return vm_id

    async def _message(
        self, cls: Any, request: Request, max_bytes: int = _LARGEST_BODY_BYTES
    ) -> Any:
        """Return the body as ``cls``, sent by the VM that it names."""
        self._caller(request)  # before its body is read
        message = _decode(cls, await _body(request, max_bytes))
        vm_id = self._caller(request)  # the VM may have been fenced meanwhile
        if message.vm_id != vm_id:
            raise HTTPException(403, f"token of {vm_id} cannot speak for another VM")
        return message

    async def _heartbeat(self, request: Request) -> Response:
        beat = await self._message(Heartbeat, request)
        try:
            answer = await self.sessions.heartbeat(beat, self.spec.heartbeat_s)
        except OutOfStepError as error:
            raise HTTPException(409, str(error)) from error
        if not answer.commands:
            return _NOTHING
        return Response(encode(answer), media_type="application/json")

    async def _reports(self, request: Request) -> Response:
        batch = await self._message(ReportBatch, request, MAX_BATCH_BYTES)
        try:
            answer = await self.requests.receive(batch)
        except OutOfStepError as error:
            raise HTTPException(409, str(error)) from error
        return Response(encode(answer), media_type="application/json")

    async def _register(self, request: Request) -> Response:
        vm_id = self._caller(request)
        if theirs := _other_version(await _body(request)):
            await self.requests.refuse(vm_id, theirs)
            # Not for good: one of an earlier manager's is replaced, and its VM stays.
            raise HTTPException(
                503,
                f"agent runs spottrain {theirs}, manager {software_version()}: the "
                "manager will start an agent of its own version",
            )
        await self.requests.register(await self._message(Registration, request))
        return JSONResponse({})

    async def _job(self, request: Request) -> Response:
        self._caller(request)
        return Response(encode(self.spec), media_type="application/json")

    async def _workdir(self, request: Request) -> Response:
        self._caller(request)
        try:
            self.workdir.open("rb").close()
        except OSError as error:
            raise HTTPException(
                410, f"the job's code, {self.workdir}, cannot be read: {error.strerror}"
            ) from error
        return FileResponse(self.workdir)

    def _check_admin(self, request: Request) -> None:
        if not _has_token(request, self.admin_token):
            raise HTTPException(403, "not the admin token of this job")

    def _check_reader(self, request: Request) -> None:
        if not _has_token(request, self.metrics_token):
            self._check_admin(request)

    async def _metrics(self, request: Request) -> Response:
        self._check_reader(request)
        return Response(self.requests.metrics_text(), media_type=CONTENT_TYPE)

    async def _healthz(self, request: Request) -> Response:
        self._check_reader(request)
        trouble = await self.requests.trouble()
        return PlainTextResponse(f"{trouble or 'ok'}\n", 503 if trouble else 200)

    async def _stop(self, request: Request) -> Response:
        self._check_admin(request)
        wanted = _decode(_StopRequest, await _body(request))
        by, now = wanted.by, wanted.now
        await self.requests.stop(by=by, checkpoint=wanted.checkpoint, now=now)
        return JSONResponse({})

    async def _limits(self, request: Request) -> Response:
        self._check_admin(request)
        wanted = _decode(_LimitsRequest, await _body(request))
        if not all(math.isfinite(limit.value or 0.0) for limit in wanted.limits):
            raise HTTPException(400, "message.limits must be finite")
        try:
            await self.requests.change_limits(by=wanted.by, limits=wanted.limits, sure=wanted.sure)
        except LimitsRefusedError as error:
            raise HTTPException(409, str(error)) from error
        return JSONResponse({})

    async def _grant(self, request: Request) -> Response:
        self._check_admin(request)
        grant = _decode(PoolGrant, await _body(request))
        await self.requests.receive_grant(grant)
        return JSONResponse({})

    async def _logs(self, request: Request) -> Response:
        tails = await self._message(LogTails, request, MAX_LOGS_BYTES)
        await self.requests.receive_logs(tails)
        return JSONResponse({})

    async def _traces(self, request: Request) -> Response:
        vm_id, sent = self._caller(request), request.query_params.get("trace", "")
        trace = _decode(TraceWritten, sent.encode())
        try:
            content = await _body(request, MAX_TRACE_BYTES)
            await self.requests.receive_trace(vm_id, trace, content)
        except TracesRefusedError as error:
            raise HTTPException(410, str(error)) from error
        return JSONResponse({})

    async def _trace(self, request: Request) -> Response:
        self._check_admin(request)
        wanted = _decode(_TraceRequest, await _body(request))
        try:
            begun = await self.requests.trace(wanted.minibatches, wanted.content)
        except TracesRefusedError as error:
            raise HTTPException(409, str(error)) from error
        return Response(encode(begun), media_type="application/json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceRequest:
    minibatches: int
    content: TraceContent = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StopRequest:
    checkpoint: bool
    now: bool
    by: str = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LimitsRequest:
    limits: tuple[Limit, ...]
    sure: bool
    by: str = "command line"


def _has_token(request: Request, token: str) -> bool:
    return hmac.compare_digest(_digest(_bearer(request)), _digest(token))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _bearer(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


async def _body(request: Request, max_bytes: int = _LARGEST_BODY_BYTES) -> bytes:
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or int(length) > max_bytes:
        raise HTTPException(413, f"content-length is refused: got {length!r}")
    return await request.body()


def _decode(cls: Any, body: bytes) -> Any:
    try:
        return decode(cls, body, trusted=False)
    except WireError as error:
        raise HTTPException(400, str(error)) from error


def _other_version(body: bytes) -> str:
    """Return the software version of an agent that registers, if it is not ours.

    Its message is not decoded: that of another version may be of another form.
    """
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(body)
        theirs = data.get("software_version") if isinstance(data, dict) else None
        if isinstance(theirs, str) and theirs != software_version():
            return theirs
    return ""


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


class _PatientProtocol(HttpToolsProtocol):
    """Closes a connection whose request does not become whole within ``REQUEST_S``."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._expect_request()

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of a request."""
        super().on_message_begin()
        self._expect_request()

    def on_message_complete(self) -> None:
        """Stop waiting: the answer may take as long as it takes."""
        self._forget_deadline()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the connection go."""
        self._forget_deadline()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._close)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self.transport.abort()


class _ManagerServer(Server):
    """Closes every connection in the end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections that agents keep open: TLS would wait long for a silent one."""
        await super().shutdown(sockets)
        for connection in tuple(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def tune_for_many_agents() -> None:
    """Collect garbage less often, and raise the limit of open files.

    With thousands of agents, Python's default of one collection per 700 new objects takes
    a quarter of the time of a heartbeat. An agent that calls over SSH needs eight files.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def make_server(channel: ControlChannel, identity_path: Path) -> Server:
    """Return the HTTPS server."""
    return _ManagerServer(
        channel.app(),
        _GRACE_S,
        http=_PatientProtocol,
        proxy_headers=False,
        ssl_certfile=identity_path,
        ssl_keyfile=identity_path,
        timeout_keep_alive=75,
    )


def listen(job_dir: Path, address: str) -> socket.socket:
    """Return a socket that listens on the job's port.

    The port is chosen once and kept in the job's folder: agents that outlived a manager
    find the next one there. Another port is chosen only if it is in use.

    Raises:
        PortError: the address is not of this machine, or no port is free.
    """
    stored = job_dir / "port"
    seed = int(hashlib.sha256(str(job_dir).encode()).hexdigest(), 16)
    ports = [PORTS[(seed + i) % len(PORTS)] for i in range(len(PORTS))]
    if stored.exists() and stored.read_text().isdecimal():
        ports.insert(0, int(stored.read_text()))
    reason = ""
    for port in ports:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(2048)
        except OSError as error:
            listener.close()
            reason = str(error.strerror)
            continue
        try_to_write_text(stored, str(port))
        return listener
    raise PortError(f"no port of {PORTS.start}-{PORTS.stop - 1} is free on {address}: {reason}")
