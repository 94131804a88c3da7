"""``spottrain ui``: all jobs and pools of this machine in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from typing import Annotated

import typer

from spottrain.serving import Server
from spottrain.varuna_manager.cli.console import say, show
from spottrain.varuna_manager.ui.pages import Pages
from spottrain.varuna_manager.ui.server import PORT, app, listen, own_token


def ui(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of this machine; 0: any that is free.")
    ] = PORT,
) -> None:
    """Show all jobs and pools in a browser, live; reads journals, needs no manager."""
    token = own_token()
    with contextlib.closing(listen(port)) as listener:
        here = listener.getsockname()[1]
        show(f"http://127.0.0.1:{here}/{token}/")
        say("whoever has this address can watch, stop and resume your jobs; Ctrl-C ends the panel")
        if "SSH_CONNECTION" in os.environ:
            name = socket.gethostname()
            say(
                f"from your own machine: ssh -N -L {here}:127.0.0.1:{here} {name}, then open it there"
            )
        asyncio.run(_serve(serving(token), listener))


def serving(token: str) -> Server:
    """Return the server of the panel."""
    server: Server
    server = Server(app(token, lambda base: Pages(base, lambda: server.should_exit).routes()), 1)
    return server


async def _serve(server: Server, listener: socket.socket) -> None:
    """Serve until Ctrl-C; pages that are open are let go first."""

    def end() -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    await server.serve(sockets=[listener])
