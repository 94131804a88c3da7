"""The process of one that decides: alone with its folder, until it is over or told to exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import TypeVar

from spottrain.errors import SpottrainError, causes
from spottrain.eventlog.folder import Folder
from spottrain.logs import LOG_BYTES, LOG_CHECK_S, log_to_stderr, rotate

logger = logging.getLogger(__name__)

TERMINATED = 143
"""Exit code of one that was told to exit."""
T = TypeVar("T")


def run_process(
    folder: Folder,
    refusal: SpottrainError,
    work: Callable[[], int],
    logs: Callable[[], Iterable[Path]],
) -> int:
    """Hold a folder's lock, keep logs short, work; return the exit code.

    Args:
        folder: Whose process this is.
        refusal: Why it is not, where another one runs.
        work: Returns the exit code.
        logs: Of this process and those that it starts.
    """
    log_to_stderr()
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with folder.locked(refusal):
            threading.Thread(target=_rotate, args=(logs,), daemon=True).start()
            return work()
    except SpottrainError as error:
        for line in (f"error: {error}", *causes(error)):
            logger.error("%s", line)
        return error.exit_code
    except OSError as error:
        reason = f"{error.filename or folder.path}: {error.strerror or error}"
        logger.error("error: %s %s cannot be managed: %s", folder.KIND, folder.name, reason)
        return 1


def _rotate(logs: Callable[[], Iterable[Path]]) -> None:
    while True:
        with contextlib.suppress(OSError):  # the folder is gone, or read-only
            bound(logs())
        time.sleep(LOG_CHECK_S)


def bound(logs: Iterable[Path], max_bytes: int = LOG_BYTES) -> None:
    """Rotate logs that are too long."""
    for log in logs:
        if not log.match("*.1.log"):
            rotate(log, max_bytes)


async def until_terminated(
    work: Coroutine[object, object, T], on_exit: Callable[[], object] = lambda: None
) -> T:
    """Return what ``work`` returns, or cancel it when this process is told to exit.

    Args:
        work: What to do.
        on_exit: Called when this process is told to exit.

    Raises:
        CancelledError: It was told to exit.
    """
    running = asyncio.ensure_future(work)

    def leave() -> None:
        running.cancel()
        on_exit()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, leave)
    return await running
