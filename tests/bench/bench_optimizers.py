"""Optimizers of torch and of libraries: which are accepted, and do they keep their bits?

Each is inspected, then trains the tiny job in exact mode for six mini-batches: at 1x1, and
at 4x1 stopped after three, its machines gone, resumed from the checkpoint by others.
Libraries that are not installed are skipped. Arguments choose rows by name.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.integration.fleet import Zygote
from tests.integration.optimizer_jobs import ROWS
from tests.integration.optimizer_runs import outcome_of


def main() -> None:
    zygote = Zygote()
    print("| optimizer | 1x1 and 4x1 with a stop | values of groups kept, or the reason |")
    print("|---|---|---|")
    wrong = 0
    for name in sys.argv[1:] or ROWS:
        with tempfile.TemporaryDirectory() as folder:
            outcome = outcome_of(name, zygote, Path(folder))
        kept = f"`{outcome.kept}`" if outcome.kept else ""
        reason = (outcome.reason or kept).replace("|", "\\|")
        print(f"| `{name}` | {outcome.kind} | {reason} |", flush=True)
        wrong += outcome.kind == "other bits"
    zygote.close()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
