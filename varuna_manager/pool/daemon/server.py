"""What commands ask of a pool: JSON over a socket that only its owner may open.

    POST /v1/ping    {} -> {"pid": int}
    POST /v1/submit  {"request": JobRequest, "secrets": {name: value}} -> {"job", "starts"}
    POST /v1/plan    {"request": JobRequest} -> what would come of it
    POST /v1/set     {"changes": {key: value}} -> {}
    POST /v1/pause   {"job": str, "is_paused": bool} -> {}
    POST /v1/down    {} -> {}
    409 {"error": class, "reason": str}: refused

Requests are decided on in the order in which they come: of two people who submit at once the
second finds the first one's job.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spottrain.cloud.unix_http import address
from spottrain.codec import from_data
from spottrain.errors import ConfigError, SpottrainError, WireError
from spottrain.serving import Server
from spottrain.varuna_manager.pool.core.model import JobRequest
from spottrain.varuna_manager.pool.daemon.loop import PoolLoop
from spottrain.varuna_manager.pool.store.folder import PoolDir


def app(pool: PoolLoop) -> Starlette:
    """Return the ASGI application."""

    async def ping(body: dict[str, Any]) -> Any:
        return {"pid": os.getpid()}

    async def submit(body: dict[str, Any]) -> Any:
        return await pool.submit(_request(body), body.get("secrets", {}))

    async def plan(body: dict[str, Any]) -> Any:
        return pool.plan(_request(body))

    async def change(body: dict[str, Any]) -> Any:
        await pool.set(body["changes"])

    async def pause(body: dict[str, Any]) -> Any:
        await pool.pause(body["job"], is_paused=body["is_paused"])

    async def down(body: dict[str, Any]) -> Any:
        await pool.close()

    handlers: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
        "ping": ping,
        "submit": submit,
        "plan": plan,
        "set": change,
        "pause": pause,
        "down": down,
    }
    return Starlette(
        routes=[
            Route(f"/v1/{name}", _answering(handler), methods=["POST"])
            for name, handler in handlers.items()
        ]
    )


def _answering(handler: Callable[[dict[str, Any]], Awaitable[Any]]) -> Any:
    async def answer(request: Request) -> Response:
        body = await request.json()
        try:
            return JSONResponse(await handler(body) or {})
        except SpottrainError as error:
            refusal = {"error": type(error).__name__, "reason": str(error)}
            return JSONResponse(refusal, status_code=409)

    return answer


def _request(body: dict[str, Any]) -> JobRequest:
    try:
        request: JobRequest = from_data(JobRequest, body["request"])
    except (WireError, KeyError) as error:
        raise ConfigError(
            f"not a request of this version: {error}; use the daemon's spottrain"
        ) from error
    return request


def make_server(pool: PoolLoop) -> Server:
    """Return the server of a pool."""
    return Server(app(pool), grace_s=1)


def listen(pool: PoolDir) -> socket.socket:
    """Return a socket that listens where commands reach the pool; its owner's alone."""
    pool.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with address(str(pool.socket)) as here:
            listener.bind(here)
    finally:
        os.umask(before)
    listener.listen()
    return listener
