"""Logs of processes that run for long: bounded, whatever is printed.

Standard library only: agents use it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

from spottrain.redaction import redacted

logger = logging.getLogger(__name__)

LOG_BYTES = 8 * 1024**2
"""Size of a log that is rotated; the end of the part before it is kept once, at most
twice as much."""
LOG_CHECK_S = 1.0
"""Time between checks of the sizes of logs."""


def rotate(log: Path, max_bytes: int = LOG_BYTES) -> None:
    """Move what a log holds to ``NAME.1.log`` if it is larger than ``max_bytes``.

    Its end is copied, then it is emptied, as by copytruncate of logrotate(8): processes that append
    to it keep it open. What they write in between is lost.
    """
    if not log.exists() or log.stat().st_size <= max_bytes:
        return
    try:
        with (
            log.open("rb") as source,
            log.with_name(f"{log.stem}.1.log").open("wb") as older,
        ):
            source.seek(max(0, log.stat().st_size - 2 * max_bytes))
            shutil.copyfileobj(source, older)
    except OSError as error:  # the disk is full, or the older part is no file
        logger.warning("%s is emptied without a copy: %s", log.name, error)
    os.truncate(log, 0)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Log what spottrain says from ``level`` on, and warnings of libraries: what these say
    besides may hold URLs and headers. Secrets are hidden.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Plain("%(asctime)s %(message)s"))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])
    for ours in ("spottrain", "__main__"):
        logging.getLogger(ours).setLevel(level)


class _Plain(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        # With the offset: the machines of a job may be in several time zones.
        local = datetime.fromtimestamp(record.created, UTC).astimezone()
        return local.isoformat(timespec="milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class JsonLines(logging.Formatter):
    """One JSON object a line, for programs that collect logs.

    ``time`` (RFC 3339), ``level``, ``logger``, ``message``, then ``fields``, then those of
    ``FIELDS`` that were given to the call as ``extra``.

    Args:
        fields: The same on every line.
    """

    FIELDS = ("generation", "event", "reason")

    def __init__(self, **fields: str) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        given = {name: getattr(record, name, None) for name in self.FIELDS}
        line |= {name: value for name, value in given.items() if value is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({k: redacted(v) if isinstance(v, str) else v for k, v in line.items()})
