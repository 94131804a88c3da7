"""The rendezvous store of a generation: a small process of its own.

A store's server threads must not live in a process that forks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from spottrain.pipeline.comm.links import open_store

_TIMEOUT_S = 300.0


def serve_store(host: str, announce: Callable[[int], None]) -> None:
    """Serve a store on a free port of ``host`` until killed.

    Args:
        host: Address to listen on.
        announce: Called with the port once the store listens.
    """
    store = open_store(host, 0, is_server=True, timeout_s=_TIMEOUT_S)
    announce(store.port)  # type: ignore[attr-defined]
    while True:
        signal.pause()
