"""Families of models: are they cut, with which bits, killed and exported?

Each is inspected, and stages are compared with one. Then it trains in exact mode for four
mini-batches: at 1x1, and on two workers (2x1; 1x2 where it is one section) with one
of them killed; the checkpoint is exported, and loaded
by a new model. Libraries that are not installed are skipped. Arguments choose rows by
name; ``--no-training`` leaves out what takes longest.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from contextlib import closing, nullcontext
from pathlib import Path

import torch
from tests.families import FAMILIES
from tests.integration.family_runs import outcome_of
from tests.integration.fleet import Zygote

_HEAD = (
    "model",
    "inspect, s of CPU",
    "sections",
    "stages = one stage",
    "2 workers, a kill = 1x1",
    "export",
)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    training = "--no-training" not in sys.argv
    rows = [name for name in sys.argv[1:] if name != "--no-training"] or [*FAMILIES]
    print(f"| {' | '.join(_HEAD)} |\n|---|---:|---:|---|---|---|")
    wrong, reasons = 0, []
    with closing(Zygote()) if training else nullcontext() as zygote:
        for name in rows:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    found = outcome_of(name, zygote, Path(folder))
            except ImportError as error:
                cells = ["", "", f"skipped: {error}", "", ""]
            else:
                wrong += found.is_wrong
                last = [found.stages, found.trained, found.exported]
                if reason := found.refused or found.uncut:
                    reasons.append((name, reason))
                if found.refused:
                    last = ["refused", "", ""]
                cells = [f"{found.inspect_s:.1f}", str(found.sections or ""), *last]
            print(f"| {' | '.join([name, *cells])} |", flush=True)
    for name, reason in reasons:
        print(f"\n{name}: {reason}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
