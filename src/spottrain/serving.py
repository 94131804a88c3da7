"""HTTP servers within a process of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn


class Server(uvicorn.Server):
    """Serves an ASGI application until ``should_exit``; ``serve(sockets=[…])`` runs it.

    Signals are left to the process.

    Args:
        grace_s: How long requests may go on once it is to exit, in seconds.
        options: Further ones of ``uvicorn.Config``.
    """

    def __init__(self, app: Any, grace_s: int, **options: Any) -> None:
        quiet = {"lifespan": "off", "ws": "none", "log_config": None, "access_log": False}
        config = uvicorn.Config(
            app, server_header=False, timeout_graceful_shutdown=grace_s, **quiet | options
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signal."""
        yield
