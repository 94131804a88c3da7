"""Launches of models of real size over stand-ins, from the command to the tenth step.

    python -m tests.bench.bench_launches [--models gpt2_124m,gpt2_1558m] [--gpus H100,L4,T4]

Prints a row of a table for each. Models have no numbers (``tests/gpu/blank_jobs.py``). What is
planned, and the memory of a GPU, are the product's, over GPUs whose times are declared
(``tests/fakes/timed.py``) and VMs as in ``bench_declared``, one GPU each; the memory of all
processes and the times at which steps come are this machine's. A job is stopped after its tenth
step: a last checkpoint of the largest model would be 79 GB.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.bench_declared import VMS
from tests.gpu.launched import launch, stand_ins, with_memory

STEPS = 10
CASES: dict[str, tuple[int, dict[str, int]]] = {
    "gpt2_124m": (8, {"H100": 1, "L4": 1, "T4": 1}),
    "gpt2_1558m": (8, {"H100": 1, "L4": 2, "T4": 3}),
    "gpt2_7b": (8, {"H100": 2, "L4": 8, "T4": 17}),
}
"""Examples of a mini-batch, and how many GPUs there are."""
HEADER = """\
| model | GPUs | plan, micro-batch, state | step expected | peak expected | peak seen | host | \
first step | tenth step |
|---|---|---|---|---|---|---|---|---|"""


def row(model: str, gpu: str, count: int) -> str:
    """Launch a model, and return its row."""
    minibatch, _ = CASES[model]
    chosen = argparse.Namespace(
        job=f"blank_jobs:{model}",
        minibatch=minibatch,
        microbatch=0,
        steps=100 * STEPS,
        gpus=count,
        vms=0,
        kills="",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, more = stand_ins(folder, gpu, count)
        more = with_memory(more, count * VMS[gpu][1])
        found = launch(folder, chosen, more, STEPS)
    head = f"| {model} | {count} {gpu} |"
    if "first_step_s" not in found:
        return f"{head} {' '.join(found.get('error', found.get('reason', '')).split())} |"
    best = _chosen(found["plans"][-1])
    cells = (
        f"{best['shape']}, {best['microbatch_size']}, `{best['state']}`",
        f"{best['step_s']:.3f} s",
        f"{best['stage_bytes'] / 1e9:.1f} GB",
        f"{found['peak_bytes'] / 1e9:.1f} GB",
        f"{found['host_peak_bytes'] / 1e9:.1f} GB",
        f"{found['first_step_s']:.0f} s",
        f"{found['last_step_s']:.0f} s",
    )
    return f"{head} {' | '.join(cells)} |"


def _chosen(plan: dict[str, Any]) -> dict[str, Any]:
    candidates: list[dict[str, Any]] = plan["decision"]["candidates"]
    return next(one for one in candidates if not one["why_not"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--gpus", default=",".join(VMS))
    parser.add_argument("--count", type=int, default=0, help="GPUs there are; 0: as many as needed")
    given = parser.parse_args()
    print(HEADER)
    for model in given.models.split(","):
        for gpu in given.gpus.split(","):
            print(row(model, gpu, given.count or CASES[model][1][gpu]), flush=True)


if __name__ == "__main__":
    main()
