"""The child process that runs a cloud's SDK; see ``child.in_child``.

It reads one line of JSON for each call and answers with one line, in any order. It ends
with its parent.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import CloudProvider
from spottrain.cloud.process.calls import call_of, pack_error
from spottrain.errors import SpottrainError, one_line
from spottrain.logs import log_to_stderr

logger = logging.getLogger(__name__)

_THREADS = 32
_LOOK_FOR_GARBAGE_AFTER = 100_000
"""New objects. An SDK makes a million as it is imported, and all stay; with Python's 700 it
takes a fifth longer."""


class _Replies:
    """Writes whole answers from many threads."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, number: int, **answer: Any) -> None:
        with self._lock:
            self._stream.write(json.dumps({"number": number, **answer}) + "\n")
            self._stream.flush()


def _own_streams() -> tuple[IO[str], IO[str]]:
    """Return (calls, answers); SDKs no longer read from or print to these streams."""
    calls, answers = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    return os.fdopen(calls), os.fdopen(answers, "w")


def _make(recipe: dict[str, Any]) -> CloudProvider:
    module, _, function = recipe["factory"].partition(":")
    make = getattr(importlib.import_module(module), function)
    provider: CloudProvider = make(recipe["settings"])
    return provider


def _serve_call(
    provider: CloudProvider,
    request: dict[str, Any],
    answers: _Replies,
) -> None:
    number, method = request["number"], request["method"]
    try:
        call = call_of(getattr(CloudProvider, method))
        result = getattr(provider, method)(**call.unpack(request["arguments"]))
        data = call.pack_result(result)
    except SpottrainError as error:
        answers.send(number, error=pack_error(error))
    except Exception as error:
        logger.exception("%s.%s", provider.name, method)
        what = one_line(f"{type(error).__name__}: {error}")
        bug = CloudError(f"{provider.name}: {method} failed unexpectedly: {what}")
        answers.send(number, error=pack_error(bug))
    else:
        answers.send(number, result=data)


def main() -> None:
    """Create the provider that the first line describes, then serve calls."""
    gc.set_threshold(_LOOK_FOR_GARBAGE_AFTER)
    log_to_stderr(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    calls, stream = _own_streams()
    answers = _Replies(stream)
    try:
        provider = _make(json.loads(calls.readline()))
    except SpottrainError as error:
        answers.send(0, error=pack_error(error))
        sys.exit(1)
    own = [name for name, it in vars(CloudProvider).items() if callable(it) and provider.can(it)]
    answers.send(0, result={"name": provider.name, "abilities": own})
    pool = ThreadPoolExecutor(_THREADS, "call")
    for line in calls:
        pool.submit(_serve_call, provider, json.loads(line), answers)
    os._exit(0)  # nobody waits for the calls in flight


if __name__ == "__main__":
    main()
