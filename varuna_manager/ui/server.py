"""The server of ``spottrain ui``: on loopback only, for whoever knows the token in the address.

The token is the first part of every path, so that there is no cookie that servers on other
ports would get, and nothing that another page could send along. It stays the same from one
start to the next, in a file of its owner's alone: a tab stays usable. A request must name a
loopback host, as a name that others resolve to this machine does not, and one that changes
something must come from a page of ours.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spottrain.errors import ConfigError
from spottrain.eventlog.folder import home

PORT = 8765
"""By default, so that an address stays the same."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine under which a browser reaches it, over a tunnel too."""
STATIC = Path(__file__).with_name("static")
_TOKEN_BYTES = 24
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def own_token() -> str:
    """Return the token of this user, made when it is asked for first.

    Raises:
        OSError: The state directory cannot be written.
    """
    file = home() / "ui.token"
    if file.exists() and (token := file.read_text().strip()):
        return token
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(token)
    return token


def listen(port: int) -> socket.socket:
    """Return a socket that listens on loopback.

    Args:
        port: 0: any that is free.

    Raises:
        ConfigError: The port is in use.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK[0], port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port: {port} cannot be used: {error.strerror}; the panel may run already, in "
            "which case its address still holds; else give another port"
        ) from error
    listener.listen()
    return listener


def app(token: str, routes: Callable[[str], list[BaseRoute]]) -> ASGIApp:
    """Return the ASGI application.

    Args:
        token: What addresses must begin with.
        routes: Returns the pages, given the path that leads to them.
    """
    base = f"/{token}"
    static = Mount("/static", StaticFiles(directory=STATIC))
    return _Guard(Starlette(routes=[Mount(base, routes=[static, *routes(base)])]), token)


class _Guard:
    """Refuses what does not come from the user's own browser; forbids pages everything that
    they do without."""

    def __init__(self, inner: ASGIApp, token: str) -> None:
        self._inner = inner
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if refusal := self._refusal(Request(scope)):
            await PlainTextResponse(f"{refusal}\n", status_code=403)(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._inner(scope, receive, send_safely)

    def _refusal(self, request: Request) -> str:
        """Return why a request is refused; empty if it is not."""
        host = request.headers.get("host", "")
        if _host_name(host) not in LOOPBACK:
            return "this panel answers to localhost and 127.0.0.1 only"
        given = request.url.path.partition("/")[2].partition("/")[0]
        if not secrets.compare_digest(given.encode(), self._token):
            return "this is not the panel's address: 'spottrain ui' prints it"
        is_read = request.method in ("GET", "HEAD")
        if not is_read and request.headers.get("origin") != f"http://{host}":
            return "only the panel's own pages may change something"
        return ""


def _host_name(host: str) -> str | None:
    """Return the name in a Host header; None: it is not one."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
