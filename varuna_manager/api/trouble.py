"""What is wrong with this machine, or with a job's files, where that is why something failed."""

from __future__ import annotations

import errno
import sqlite3
import time

from spottrain.eventlog.folder import home
from spottrain.varuna_manager.format import utc

_ELSEWHERE = (
    "free disk space or see to it that it can be written, or choose another state "
    "directory with SPOTTRAIN_HOME"
)
_NO_STATE = {
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
}
"""Why files cannot be used that we write ourselves."""
_CREDIBLE_S = range(1_700_000_000, 7_300_000_000)
"""Seconds since the epoch that a clock may say: from 2023 to 2201."""


def trouble_of_machine(error: Exception) -> str:
    """Return what is wrong with this machine if that is why something failed, else empty."""
    match error:
        case sqlite3.OperationalError():
            return f"a database cannot be used: {error}; {_ELSEWHERE}"
        case sqlite3.DatabaseError():
            # Measurements are read by SQL here and there, long after the file was opened.
            return (
                f"a database of the job is damaged: {error}; restore a copy of its folder, "
                "or end the job with 'spottrain down' (checkpoints are kept)"
            )
        case OSError() if error.errno in _NO_STATE or error.filename == str(home()):
            return f"{error.filename or 'a file'}: {error.strerror}; {_ELSEWHERE}"
    if says := _incredible_time():
        return (
            f"the clock of this machine says {says}, and then {type(error).__name__}: "
            f"{error}; set it right"
        )
    return ""


def _incredible_time() -> str:
    """Return what this machine's clock says if nobody can mean that, else empty."""
    try:
        now_s = time.time()
    except OverflowError:  # Python counts nanoseconds, from 1677 to 2262
        return "what is no time"
    return "" if int(now_s) in _CREDIBLE_S else utc(now_s)
