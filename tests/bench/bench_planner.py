"""Full decisions of the planner: how long they take, and in how much memory.

Each is made in a process of its own, after the imports and one small decision that loads
what is compiled. 72 sections, everything left to the planner. Fails where one takes longer
or more than it may.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from spottrain.codec import decode
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.workload import Workload
from spottrain.varuna_manager.offers.preview import workload_inputs
from spottrain.wire.model import ModelFacts

PROFILE = Path(__file__).resolve().parents[2] / "examples/profiles/gpt2-2.5b-v100.json"
SECTIONS = 72
MAX_BYTES = 300e6


@dataclass(frozen=True)
class Case:
    """A decision and the seconds of CPU that it may take."""

    gpus: int
    minibatch_size: int
    max_s: float
    vm_gpus: int = 1


CASES = (
    Case(128, 8192, 0.5),
    Case(1024, 8192, 0.6),
    Case(10_000, 1_000_000, 1.5),
    Case(1024, 8192, 2.0, vm_gpus=8),
)


def inputs_of(case: Case) -> PlanInputs:
    """Return the 2.5 billion parameter GPT-2, with layers put in until it has 72."""
    workload: Workload = decode(Workload, PROFILE.read_text())
    facts, (one,) = workload.facts, workload.profile.microbatches
    more = [1] * (SECTIONS - len(facts.sections))
    order = [0, *more, *range(1, len(facts.sections))]
    known, measured = facts.sections, one.sections
    larger: ModelFacts = replace(
        facts,
        sections=tuple(replace(known[k], index=i) for i, k in enumerate(order)),
        tied=tuple(replace(t, sections=(0, SECTIONS - 1)) for t in facts.tied),
    )
    sections = tuple(replace(measured[k], index=i) for i, k in enumerate(order))
    profile = replace(workload.profile, microbatches=(replace(one, sections=sections),))
    return workload_inputs(
        replace(
            workload,
            facts=larger,
            profile=profile,
            minibatch_size=case.minibatch_size,
        ),
        case.gpus,
        case.vm_gpus,
    )


def decide(number: int) -> None:
    """Make one decision and print what it took, as JSON."""
    case = CASES[number]
    choose_plan(inputs_of(Case(16, 64, 1.0)))
    inputs = inputs_of(case)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    choice = choose_plan(inputs)
    took_s = time.perf_counter() - begin_s
    cpu_s = time.process_time() - begin_cpu_s
    assert choice.plan is not None
    print(
        json.dumps(
            {
                "gpus": case.gpus,
                "gpus_per_vm": case.vm_gpus,
                "minibatch_size": case.minibatch_size,
                "sections": SECTIONS,
                "plan": choice.plan.shape,
                "weighed": len(choice.candidates),
                "wall_s": round(took_s, 3),
                "cpu_s": round(cpu_s, 3),
                "may_take_cpu_s": case.max_s,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


def main() -> int:
    """Run all cases; returns how many took too much."""
    failed = 0
    for number, case in enumerate(CASES):
        command = [sys.executable, "-m", "tests.bench.bench_planner", str(number)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        line = done.stdout.strip().splitlines()[-1]
        print(line, flush=True)
        took = json.loads(line)
        slow = took["cpu_s"] > case.max_s or took["peak_rss_bytes"] > MAX_BYTES
        failed += slow
    return failed


if __name__ == "__main__":
    if len(sys.argv) > 1:
        decide(int(sys.argv[1]))
    else:
        sys.exit(bool(main()))
