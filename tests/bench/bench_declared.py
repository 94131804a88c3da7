"""What is planned for models of real size on GPUs whose times are declared.

    python -m tests.bench.bench_declared [--models gpt2_124m,gpt2_1558m] [--gpus H100,L4,T4]

Calibration and planner are the product's; the GPU is a stand-in without numbers and with
virtual time (``tests/fakes/timed.py``), by the figures of its data sheet. Each model is planned
on the fewest GPUs, one a VM, on which it fits: a VM has 200 GB of memory beside an H100, and
16 GB beside an L4 or a T4 (g2-standard-4, g4dn.xlarge); its network is 25 or 10 Gb/s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.fakes.timed import Figures, TimedDevice
from tests.gpu import runs
from tests.gpu.blank_jobs import SIZES

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.workload import Workload
from spottrain.pipeline.calibrate.calibrate import calibrate
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.loaded import load
from spottrain.varuna_manager.offers.preview import workload_inputs
from spottrain.wire.messages import Calibrate
from spottrain.wire.model import LinkProfile, Precision

MODELS = tuple(SIZES)
MINIBATCH = 128
MICROBATCHES = (1, 2, 4)
"""Sizes that are measured."""
VMS: dict[str, tuple[Precision, int, float]] = {
    "H100": ("bf16", 200_000_000_000, 25e9 / 8),
    "L4": ("bf16", 16_000_000_000, 10e9 / 8),
    "T4": ("fp16", 16_000_000_000, 10e9 / 8),
}
"""Precision that ``auto`` takes, memory of a VM, bytes per second between two."""
MOST_GPUS = 32


def measure(model: str, gpu: str) -> dict[str, Any]:
    """Calibrate a model on a GPU, and plan for the fewest that it fits on."""
    precision, host_bytes, bytes_per_s = VMS[gpu]
    device = TimedDevice(Figures.of(gpu), numbers=False)
    began_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        spec = runs.job_spec(
            Path(folder),
            f"blank_jobs:{model}",
            reduction="fast",
            precision=precision,
            minibatch_size=MINIBATCH,
        )
        loaded = load(spec, runs.WORKDIR)
        profile = calibrate(
            loaded, Calibrate(microbatch_sizes=MICROBATCHES), 0, lambda report: None, device, gpu
        )
    assert profile is not None
    calibrated = {
        "calibration_peak_gb": (device.peak_bytes() or 0) / 1e9,
        "calibration_s": device.clock(),
    }
    link = LinkProfile(latency_s=1e-4, bandwidth_bytes_per_s=bytes_per_s)
    workload = Workload(
        sources=("declared",),
        facts=model_facts(loaded.job, loaded.layout),
        profile=replace(profile, within_vm=link, between_vms=link),
        minibatch_size=MINIBATCH,
        gpu_memory_bytes=device.figures.memory_bytes,
        usd_per_hour=1.0,
        precision=precision,
        is_gpu=True,
        host_memory_bytes=host_bytes,
    )
    found = {"model": model, "gpu": gpu, "cpu_s": time.process_time() - began_s, **calibrated}
    for count in range(1, MOST_GPUS + 1):
        choice = choose_plan(workload_inputs(workload, count))
        if choice.plan is None:
            continue
        plan = choice.plan
        best = next(one for one in choice.candidates if one.step_s == plan.predicted_step_s)
        tokens = MINIBATCH * SIZES[model].sequence
        return {
            **found,
            "gpus": count,
            "shape": f"{plan.pipeline_depth}x{plan.data_parallel_width}",
            "microbatch": plan.microbatch_size,
            "state": plan.state,
            "recompute": plan.recompute,
            "step_s": plan.predicted_step_s,
            "tokens_per_s": tokens / plan.predicted_step_s,
            "peak_gb": (best.stage_bytes or 0) / 1e9,
        }
    return {**found, "why_not": choice.why_not}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--gpus", default=",".join(VMS))
    parser.add_argument("--one", action="store_true", help="in this process")
    chosen = parser.parse_args()
    models, gpus = chosen.models.split(","), chosen.gpus.split(",")
    if chosen.one:
        torch.set_num_threads(1)
        print(json.dumps(measure(models[0], gpus[0])))
        return
    command = [sys.executable, "-m", "tests.bench.bench_declared", "--one"]
    for model in models:
        for gpu in gpus:
            subprocess.run([*command, "--models", model, "--gpus", gpu], check=True)


if __name__ == "__main__":
    main()
