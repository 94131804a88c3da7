"""A user's module that starts a thread when it is imported: forking it is unsafe."""

from __future__ import annotations

import threading

from tiny_job import job

WAITING = threading.Event()
threading.Thread(target=WAITING.wait, daemon=True).start()

__all__ = ["job"]
