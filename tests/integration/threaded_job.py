"""A user's module that starts a thread when it is imported: forking it is unsafe."""

from __future__ import annotations

import importlib
import threading

WAITING = threading.Event()
threading.Thread(target=WAITING.wait, daemon=True).start()

job = importlib.import_module("tiny_job").job
