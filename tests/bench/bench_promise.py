"""The table of the promise on seeded markets: ``python -m tests.bench.bench_promise [TRACE ...]``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from spottrain.varuna_manager.cli_promise import promise


def main() -> None:
    """Print the table, and how long it took."""
    started_s = time.perf_counter()
    promise(trace=[Path(name) for name in sys.argv[1:]])
    print(f"{time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
