"""A pool's process: ``python -m spottrain.varuna_manager.pool.daemon.main <pool_dir>``.

It holds ``daemon.lock`` while it runs, so that a pool never has two. SIGTERM ends it as a
crash would: jobs go on within their grants, and the next daemon continues from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from spottrain.errors import SpottrainError, causes
from spottrain.eventlog.journal import JournalError
from spottrain.logs import LOG_CHECK_S, log_to_stderr, rotate
from spottrain.machine import OWNER_VARIABLE
from spottrain.varuna_manager.jobs.folder import held_lock
from spottrain.varuna_manager.pool.daemon.loop import PoolLoop
from spottrain.varuna_manager.pool.daemon.server import listen, make_server
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.varuna_manager.pool.store.journal import PoolJournal

logger = logging.getLogger(__name__)
TERMINATED = 143


@contextlib.contextmanager
def only_daemon(pool: PoolDir) -> Iterator[None]:
    """Hold the pool's lock, with this process's id in it.

    Raises:
        JournalError: Another daemon of the pool runs.
    """
    refusal = JournalError(
        f"pool {pool.name} already has a daemon: 'spottrain pool status {pool.name}' shows "
        "what it does"
    )
    with held_lock(pool.lock, refusal):
        yield


async def serve(pool: PoolDir) -> bool:
    """Serve a pool to its end; return False if this process was told to exit.

    Raises:
        SpottrainError: Its journal cannot be used.
    """
    journal = PoolJournal(pool.journal)
    if not journal.last_seq():
        raise JournalError(f"pool {pool.name}: its creation was not completed")
    loop = PoolLoop(pool, journal)
    listener, server = listen(pool), make_server(loop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    running = asyncio.create_task(loop.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        await running
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


def _rotate_log(pool: PoolDir) -> None:
    while True:
        rotate(pool.log)
        time.sleep(LOG_CHECK_S)


def main(argv: Sequence[str]) -> int:
    """Run the daemon of the pool in folder ``argv[0]``."""
    log_to_stderr()
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pool = PoolDir(Path(argv[0]).absolute())
    os.environ[OWNER_VARIABLE] = f"pool {pool.name}"  # its jobs may share a GPU
    try:
        with only_daemon(pool):
            threading.Thread(target=_rotate_log, args=(pool,), daemon=True).start()
            return 0 if uvloop.run(serve(pool)) else TERMINATED
    except SpottrainError as error:
        for line in (f"error: {error}", *causes(error)):
            logger.error("%s", line)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
