"""Logs of processes that run for long: bounded, whatever is printed.

Standard library only: agents use it.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

LOG_BYTES = 8 * 1024**2
"""Size of a log that is rotated; the part before it is kept once."""
LOG_CHECK_S = 1.0
"""Time between checks of the sizes of logs."""


def rotate(log: Path, max_bytes: int = LOG_BYTES) -> None:
    """Move what a log holds to ``NAME.1.log`` if it is larger than ``max_bytes``.

    It is copied, then emptied, as by copytruncate of logrotate(8): processes that append
    to it keep it open. What they write in between is lost.
    """
    if not log.exists() or log.stat().st_size <= max_bytes:
        return
    try:
        shutil.copyfile(log, log.with_name(f"{log.stem}.1.log"))
    except OSError as error:  # the disk is full, or the older part is no file
        logger.warning("%s is emptied without a copy: %s", log.name, error)
    os.truncate(log, 0)
