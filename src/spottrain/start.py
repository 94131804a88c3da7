"""Runs a module's main function: ``python -P -m spottrain.start MODULE [ARGUMENT ...]``.

What modules define stays for the life of the process. Collecting garbage while it grows
takes a fifth of the time that importing torch or the manager takes.
"""

from __future__ import annotations

import gc
import importlib
import sys


def main() -> None:
    """Import the module that the first argument names, then run its ``main``."""
    gc.disable()
    del sys.argv[0]
    module = importlib.import_module(sys.argv[0])
    gc.freeze()
    gc.enable()
    sys.exit(module.main())


if __name__ == "__main__":
    main()
