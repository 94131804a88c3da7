"""Optimizers of torch and of libraries: which are accepted, and do they keep their bits?

Each is inspected, then trains the tiny job in exact mode for six mini-batches: at 1x1, and
at 4x1 stopped after three, its machines gone, resumed from the checkpoint by others.
Libraries that are not installed are skipped. Arguments choose rows by name. ``--bytes`` prints
what state takes instead.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import torch
from tests.integration import tiny_job
from tests.integration.fleet import Zygote
from tests.integration.optimizer_jobs import ROWS
from tests.integration.optimizer_runs import outcome_of

from spottrain.pipeline.model.optimizer import optimizer_state_spec
from spottrain.pipeline.model.sections import TensorSpec

BYTES = (
    "adamw",
    "adamw_masters",
    "bnb_adamw_8bit",
    "ao_adamw_8bit",
    "bnb_adamw_8bit_masters",
    "ao_adamw_8bit_masters",
    "ao_adamw_4bit_masters",
)
SHAPE = (1024, 1024)


def print_bytes(name: str) -> None:
    """Print the bytes that an element of a large parameter takes."""
    dtype = torch.bfloat16 if "masters" in name else torch.float32
    job = dataclasses.replace(tiny_job.job(), optimizer=ROWS[name])
    spec = TensorSpec(shape=SHAPE, dtype=dtype, requires_grad=True)
    state = optimizer_state_spec(job, [("weight", spec)]).num_bytes / torch.Size(SHAPE).numel()
    own = dtype.itemsize
    print(f"| `{name}` | {own} | {own} | {state:.2f} | {2 * own + state:.2f} |", flush=True)


def main() -> None:
    if sys.argv[1:] == ["--bytes"]:
        print("| optimizer | parameter | gradient | state | together |\n|---|---:|---:|---:|---:|")
        for name in BYTES:
            print_bytes(name)
        return
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
