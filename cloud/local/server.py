"""The local cloud's own process: HTTP on a Unix socket in its folder.

    GET  /offers    GET /time           POST /launch      POST /agents
    GET  /vms                           POST /terminate   POST /shutdown
    GET  /metadata/{vm_id}/interruption POST /market
    POST /clear      POST /give         POST /receive

An error is 409 with ``{"error": class name, "message": one line}``; 503 means that the
process is ending: retry with the next one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spottrain.cloud.local.folder import LocalFolder
from spottrain.cloud.local.market import MarketEvent
from spottrain.cloud.local.state import AgentSoftware, LocalCloud
from spottrain.cloud.local.vms import LocalVms
from spottrain.cloud.port.provider import AgentBootstrap, LaunchRequest, Vm
from spottrain.cloud.unix_http import address
from spottrain.codec import decode, from_data, to_data
from spottrain.errors import SpottrainError
from spottrain.serving import Server

_GRACE_S = 2
"""Time for requests in flight when the process ends."""


def run(folder: LocalFolder, ready_fd: int | None) -> None:
    """Serve the cloud of ``folder`` until nobody needs it.

    Args:
        folder: Contains the settings.
        ready_fd: A pipe; one byte is written to it when clients can connect.
    """
    folder.lock_for_life()
    record = folder.recover()
    cloud = LocalCloud(folder.load_settings(), record.vms, record.tokens)
    listener = _listen(folder)
    try:
        if ready_fd is not None:
            os.write(ready_fd, b"1")
            os.close(ready_fd)
        asyncio.run(_serve(folder, cloud, listener))
    finally:
        listener.close()
        folder.socket.unlink(missing_ok=True)


def _listen(folder: LocalFolder) -> socket.socket:
    """Return a listening socket; its path may be longer than a socket address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with address(str(folder.socket)) as here:
        listener.bind(here)
    folder.socket.chmod(0o600)
    listener.listen()
    return listener


async def _serve(folder: LocalFolder, cloud: LocalCloud, listener: socket.socket) -> None:
    """Serve and play the market until idle or shut down."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        vms = LocalVms(folder, cloud, tasks)
        loop.add_signal_handler(
            signal.SIGTERM, lambda: tasks.create_task(vms.close(), name="SIGTERM")
        )
        # A handler, unlike "ignore", is not inherited by the VMs' processes.
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        server = Server(application(vms), _GRACE_S)
        serving = tasks.create_task(server.serve(sockets=[listener]))
        tasks.create_task(vms.play())
        await vms.until_idle()
        server.should_exit = True
        await serving
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # the market and timers of ended VMs
        vms.image.close()


class _Api:
    """The HTTP API: one method per route, each returning what ``to_data`` takes."""

    def __init__(self, vms: LocalVms) -> None:
        self._vms = vms

    async def offers(self, _: Request) -> Any:
        return self._vms.cloud.offers(self._vms.now_s())

    async def launch(self, request: Request) -> Any:
        return self._vms.launch(decode(LaunchRequest, await request.body()))

    async def time(self, _: Request) -> Any:
        return self._vms.now_s()

    async def list_vms(self, _: Request) -> Any:
        return tuple(self._vms.cloud.vms.values())

    async def terminate(self, request: Request) -> Any:
        await self._vms.terminate(await request.json())

    async def clear(self, request: Request) -> Any:
        await self._vms.clear(**await request.json())

    async def give(self, request: Request) -> Any:
        return self._vms.give(**await request.json())

    async def receive(self, request: Request) -> Any:
        body = await request.json()
        return self._vms.receive(from_data(Vm, body["vm"]), body["order"], body["until_s"])

    async def start_agent(self, request: Request) -> Any:
        body = await request.json()
        bootstrap = from_data(AgentBootstrap, body["bootstrap"])
        software = from_data(AgentSoftware, body["software"])
        await self._vms.start_agent(body["vm_id"], bootstrap, software)

    async def market(self, request: Request) -> Any:
        return await self._vms.apply(decode(MarketEvent, await request.body()))

    async def shutdown(self, _: Request) -> Any:
        await self._vms.close()

    async def interruption(self, request: Request) -> Any:
        notice = await self._vms.interruption(
            request.path_params["vm_id"],
            after=int(request.query_params.get("after", 0)),
            wait_s=float(request.query_params.get("wait_s", 0)),
        )
        if notice is None:
            return None
        lead_s = max(0.0, notice.kill_at_s - self._vms.now_s())
        return {"id": notice.number, "lead_s": lead_s}


def application(vms: LocalVms) -> Starlette:
    """Return the HTTP application."""

    def route(path: str, method: str, answer: Callable[[Request], Awaitable[Any]]) -> Route:
        async def endpoint(request: Request) -> Response:
            if vms.closing:
                return Response(status_code=503)
            vms.touch()
            body = await answer(request)
            return Response(status_code=204) if body is None else JSONResponse(to_data(body))

        return Route(path, endpoint, methods=[method])

    api = _Api(vms)
    return Starlette(
        routes=[
            route("/offers", "GET", api.offers),
            route("/launch", "POST", api.launch),
            route("/time", "GET", api.time),
            route("/vms", "GET", api.list_vms),
            route("/terminate", "POST", api.terminate),
            route("/clear", "POST", api.clear),
            route("/give", "POST", api.give),
            route("/receive", "POST", api.receive),
            route("/agents", "POST", api.start_agent),
            route("/market", "POST", api.market),
            route("/shutdown", "POST", api.shutdown),
            route("/metadata/{vm_id}/interruption", "GET", api.interruption),
        ],
        exception_handlers={SpottrainError: _refuse},
    )


async def _refuse(_: Request, error: Exception) -> Response:
    body = {"error": type(error).__name__, "message": str(error)}
    return JSONResponse(body, status_code=409)
