"""Runs a module's main function: ``python -P -m spottrain.start MODULE [ARGUMENT ...]``.

What modules define stays for the life of the process. Collecting garbage while it grows
takes a fifth of the time that importing torch or the manager takes.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import threading

from spottrain.children import WHERE_SIGNAL

LEAVE_S = 5.0
"""How long threads and exit handlers of user code may go on after ``main``."""
_RUNS_USER_CODE = "spottrain.pipeline."


def main() -> None:
    """Import the module that the first argument names, then run its ``main``."""
    gc.disable()
    del sys.argv[0]
    runs_user_code = sys.argv[0].startswith(_RUNS_USER_CODE)
    if runs_user_code:
        faulthandler.register(WHERE_SIGNAL, all_threads=False)
    module = importlib.import_module(sys.argv[0])
    gc.freeze()
    gc.enable()
    code = 1
    try:
        code = module.main() or 0
    finally:
        if runs_user_code:
            _end_soon(code)
    sys.exit(code)


def _end_soon(code: int) -> None:
    """End this process after ``LEAVE_S`` with ``code``, whatever keeps it."""

    def end() -> None:
        threads = (x.name for x in threading.enumerate() if not x.daemon)
        others = [name for name in threads if name != threading.main_thread().name]
        kept = f"threads {', '.join(others)}" if others else "exit handlers"
        sys.stderr.write(f"ended after {LEAVE_S:g} s: {kept} of user code went on\n")
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(LEAVE_S, end)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
