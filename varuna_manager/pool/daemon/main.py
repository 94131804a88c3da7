"""A pool's process: ``python -m spottrain.varuna_manager.pool.daemon.main <pool_dir>``.

It holds ``daemon.lock`` while it runs, so that a pool never has two. SIGTERM ends it as a
crash would: jobs go on within their grants, and the next daemon continues from the journal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from spottrain.eventlog.journal import JournalError
from spottrain.eventlog.process import TERMINATED, run_process, until_terminated
from spottrain.machine import OWNER_VARIABLE
from spottrain.varuna_manager.pool.daemon.loop import PoolLoop
from spottrain.varuna_manager.pool.daemon.server import listen, make_server
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.varuna_manager.pool.store.journal import PoolJournal

logger = logging.getLogger(__name__)


async def serve(pool: PoolDir) -> bool:
    """Serve a pool to its end; return False if this process was told to exit.

    Raises:
        SpottrainError: Its journal cannot be used.
    """
    journal = PoolJournal(pool.journal)
    loop = PoolLoop(pool, journal)
    listener, server = listen(pool), make_server(loop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until_terminated(loop.run())
        return True
    except asyncio.CancelledError:
        logger.info("exiting on request: jobs go on within their grants")
        return False
    finally:
        server.should_exit = True
        await serving
        listener.close()
        pool.socket.unlink(missing_ok=True)
        journal.close()


def main(argv: Sequence[str]) -> int:
    """Run the daemon of the pool in folder ``argv[0]``."""
    pool = PoolDir(Path(argv[0]).absolute())
    os.environ[OWNER_VARIABLE] = f"pool {pool.name}"  # its jobs may share a GPU
    refusal = JournalError(
        f"pool {pool.name} already has a daemon: 'spottrain pool status {pool.name}' shows "
        "what it does"
    )
    return run_process(
        pool,
        refusal,
        lambda: 0 if uvloop.run(serve(pool)) else TERMINATED,
        lambda: [pool.log],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
