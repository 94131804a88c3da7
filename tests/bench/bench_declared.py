"""What is planned for models of real size on GPUs whose times are declared.

    python -m tests.bench.bench_declared [--models gpt2_124m,gpt2_1558m] [--gpus H100,L4,T4]
    python -m tests.bench.bench_declared --box [--train] [--models gpt2_124m]
    python -m tests.bench.bench_declared --box --models gpt_8b --minibatches 32,64,128
    python -m tests.bench.bench_declared --box --models gpt_8b --sections [--sequence-parallel]

Calibration and planner are the product's; the GPU is a stand-in without numbers and with
virtual time (``tests/fakes/timed.py``), by published figures. Each model is planned on the
fewest GPUs, one a VM, on which it fits: a VM has 200 GB of memory beside an H100, and 16 GB
beside an L4 or a T4 (g2-standard-4, g4dn.xlarge); its network is 25 or 10 Gb/s.

With ``--box`` a VM has eight H100 that NVLink connects, and each model the mini-batch of public
runs: about half a million tokens. Four of its blocks are calibrated: all are equal, and have the
same declared times. So are groups of two, four and all eight that divide its matrices, a process for
each GPU, in virtual time; ``--sections`` prints what that says of its sections beside what is derived from
one GPU, instead of a plan. With ``--train`` its plan is trained as well, a process for each GPU, in
virtual time, with a mini-batch that may be shorter, and compared with what is predicted of that.
Prints a row of a table for each model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests.fakes.timed import Figures, TimedDevice
from tests.fakes.timed_links import Wire
from tests.gpu import runs
from tests.gpu.blank_jobs import SIZES
from tests.integration.declared_ranks import Trained, calibrated_together, trained

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.flops import training_use
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.tensor_groups import group_profile
from spottrain.morphing.plan.workload import Workload
from spottrain.pipeline.calibrate.calibrate import calibrate
from spottrain.pipeline.model.checks.division import can_divide
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.varuna_manager.offers.preview import workload_inputs
from spottrain.wire.messages import Calibrate
from spottrain.wire.model import (
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Precision,
    Profile,
    SectionProfile,
)
from spottrain.wire.plan import Plan

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
BOX_GPU, BOX_GPUS = "H100", 8


@dataclass(frozen=True)
class BoxCase:
    """How a model is trained in a box."""

    minibatch: int
    """Examples, for about half a million tokens."""
    microbatches: tuple[int, ...]
    trained: int
    """Examples of the mini-batch that is trained."""


BOX: dict[str, BoxCase] = {
    "gpt2_124m": BoxCase(512, (16, 32), 512),
    "gpt2_1558m": BoxCase(512, (4, 8, 16), 128),
    "gpt_8b": BoxCase(256, (1, 2), 16),
}
PLANNED = (
    "model",
    "mini-batch",
    "plan, micro-batch, state",
    "step",
    "tokens/s",
    "share of peak",
    "memory",
)
SECTIONS = (
    *("model", "GPUs", "micro-batch", "section"),
    *("forward, derived", "measured", "backward, derived", "measured"),
)
TRAINED = "trained", "predicted", "took", "error", "memory seen", "rests on"
"""Columns; the last one is the share of the time that devices spend on what each figure bounds."""


def loaded_job(
    folder: Path, model: str, gpu: str, minibatch: int, *, sequence: bool = False
) -> LoadedJob:
    """Load a model of ``blank_jobs``, whose sequences may be divided, too."""
    spec = runs.job_spec(
        folder,
        f"blank_jobs:{model}",
        reduction="fast",
        precision=VMS[gpu][0],
        minibatch_size=minibatch,
        sequence_parallel=sequence,
    )
    return load(spec, runs.WORKDIR)


def calibrated(loaded: LoadedJob, gpu: str, sizes: Sequence[int]) -> tuple[Profile, TimedDevice]:
    """Calibrate a model on a GPU; return the device, too."""
    device = TimedDevice(Figures.of(gpu), numbers=False)
    command = Calibrate(microbatch_sizes=tuple(sizes))
    profile = calibrate(loaded, command, 0, lambda report: None, device, gpu)
    assert profile is not None
    return profile, device


def deepened(profile: Profile, facts: ModelFacts) -> Profile:
    """Return the profile of a model that has more blocks, all of them equal.

    Args:
        profile: Of one with four blocks: the second one stands for those that it lacks, for the
            first one also adds positions.
        facts: Of the model.
    """

    def sections(few: Sequence[SectionProfile]) -> tuple[SectionProfile, ...]:
        more = [few[2]] * (len(facts.sections) - len(few))
        every = (*few[:2], *more, *few[2:])
        return tuple(replace(one, index=k) for k, one in enumerate(every))

    def every_size(few: Sequence[MicrobatchProfile]) -> tuple[MicrobatchProfile, ...]:
        return tuple(replace(one, sections=sections(one.sections)) for one in few)

    return replace(
        profile,
        fingerprint=facts.fingerprint,
        microbatches=every_size(profile.microbatches),
        groups=tuple(replace(g, microbatches=every_size(g.microbatches)) for g in profile.groups),
    )


def workload_of(
    loaded: LoadedJob, profile: Profile, gpu: str, within: LinkProfile | None = None
) -> Workload:
    """Return what is planned on VMs with such GPUs.

    Args:
        loaded: The job.
        profile: As it was measured on one.
        gpu: Its name.
        within: Link within a VM; not given: VMs have one GPU.
    """
    precision, host_bytes, bytes_per_s = VMS[gpu]
    between = LinkProfile(latency_s=1e-4, bandwidth_bytes_per_s=bytes_per_s)
    return Workload(
        sources=("declared",),
        facts=model_facts(loaded.job, loaded.layout),
        profile=replace(profile, within_vm=within or between, between_vms=between),
        minibatch_size=loaded.spec.minibatch_size,
        gpu_memory_bytes=Figures.of(gpu).memory_bytes,
        usd_per_hour=1.0,
        precision=precision,
        is_gpu=True,
        host_memory_bytes=host_bytes,
    )


def measure(model: str, gpu: str) -> dict[str, Any]:
    """Calibrate a model on a GPU, and plan for the fewest that it fits on."""
    began_s = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        loaded = loaded_job(Path(name), model, gpu, MINIBATCH)
        profile, device = calibrated(loaded, gpu, MICROBATCHES)
    workload = workload_of(loaded, profile, gpu)
    found = {
        "model": model,
        "gpu": gpu,
        "cpu_s": time.process_time() - began_s,
        "calibration_peak_gb": (device.peak_bytes() or 0) / 1e9,
        "calibration_s": device.clock(),
    }
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
            "shape": plan.shape,
            "microbatch": plan.microbatch_size,
            "state": plan.state,
            "recompute": plan.recompute,
            "step_s": plan.predicted_step_s,
            "tokens_per_s": tokens / plan.predicted_step_s,
            "peak_gb": (best.stage_bytes or 0) / 1e9,
        }
    return {**found, "why_not": choice.why_not}


@dataclass(frozen=True)
class Boxed:
    """What is planned for a model in a box."""

    loaded: LoadedJob
    inputs: PlanInputs
    plan: Plan
    stage_bytes: int
    """Predicted, of the device that takes most."""


@dataclass(frozen=True)
class Run:
    """How that went with a mini-batch that may be shorter."""

    plan: Plan
    took: Trained

    @property
    def error(self) -> float:
        """Share by which its time was predicted too long."""
        return self.plan.predicted_step_s / self.took.step_s - 1


def measured_in_box(
    folder: Path, model: str, *, sequence: bool = False
) -> tuple[LoadedJob, PlanInputs]:
    """Calibrate a model for a box; its sequences may be divided, too."""
    case = BOX[model]
    loaded, shallow = (
        loaded_job(folder, one, BOX_GPU, case.minibatch, sequence=sequence)
        for one in (model, f"shallow_{model}")
    )
    measured, _ = calibrated(shallow, BOX_GPU, case.microbatches)
    sizes = tuple(
        n for n in (2, 4, 8) if can_divide(shallow.job, shallow.layout, n, sequence=sequence)
    )
    if sizes:
        together = calibrated_together(
            shallow,
            Figures.of(BOX_GPU),
            BOX_GPUS,
            tensor_sizes=sizes,
            microbatch_sizes=case.microbatches,
            numbers=False,
        )
        measured = replace(measured, groups=together.groups)
    profile = deepened(measured, model_facts(loaded.job, loaded.layout))
    return loaded, box_inputs(loaded, profile, sizes)


def planned(loaded: LoadedJob, inputs: PlanInputs) -> Boxed:
    """Plan a model in a box."""
    choice = choose_plan(inputs)
    assert choice.plan is not None, choice.why_not
    return Boxed(loaded, inputs, choice.plan, choice.candidates[0].stage_bytes or 0)


def run(boxed: Boxed, examples: int) -> Run:
    """Train a plan in virtual time.

    Args:
        boxed: The plan.
        examples: Of the mini-batch that is trained.
    """
    figures = Figures.of(BOX_GPU)
    shorter = shorter_plan(boxed.inputs, boxed.plan, examples)
    wire = Wire(figures.peer_latency_s, figures.peer_bytes_per_s, on_devices=True)
    return Run(shorter, trained(boxed.loaded, shorter, figures, wire, numbers=False))


def box_rows(model: str, chosen: argparse.Namespace) -> Iterator[str]:
    """Return a row for each mini-batch of a model.

    Args:
        model: Its name.
        chosen: As ``main`` reads it.
    """
    with tempfile.TemporaryDirectory() as name:
        loaded, inputs = measured_in_box(Path(name), model, sequence=chosen.sequence_parallel)
        if chosen.sections:
            yield from section_rows(model, inputs)
            return
        if chosen.tensor_parallel:
            inputs = replace(inputs, tensor_parallel=chosen.tensor_parallel)
        for minibatch in map(int, (chosen.minibatches or f"{BOX[model].minibatch}").split(",")):
            boxed = planned(loaded, replace(inputs, minibatch_size=minibatch))
            yield box_row(model, boxed, min(minibatch, BOX[model].trained) if chosen.train else 0)


def section_rows(model: str, inputs: PlanInputs) -> Iterator[str]:
    """Return a row for each kind of section, in groups of each size.

    Args:
        model: What is planned.
        inputs: Its profile is measured in groups.
    """
    profile, facts = inputs.profile, inputs.facts
    names = "embedding", "block", "last"
    for size in (1, *facts.tensor_sizes):
        derived, measured = (
            group_profile(one, facts, size, inputs.compute).microbatches
            for one in (replace(profile, groups=()), profile)
        )
        for before, after in zip(derived, measured, strict=True):
            for name, index in zip(names, (0, 2, -1), strict=True):
                pair = before.sections[index], after.sections[index]
                cells = [
                    *(model, f"{size}", f"{before.microbatch_size}", name),
                    *(f"{one.forward_s * 1e3:.3f} ms" for one in pair),
                    *(f"{one.backward_s * 1e3:.3f} ms" for one in pair),
                ]
                yield f"| {' | '.join(cells)} |"


def box_row(model: str, boxed: Boxed, examples: int) -> str:
    """Return the row of a plan.

    Args:
        model: What is planned.
        boxed: The plan.
        examples: To be trained; 0: none are.
    """
    ran = run(boxed, examples) if examples else None
    step_s, minibatch = boxed.plan.predicted_step_s, boxed.inputs.minibatch_size
    peak = catalogue().gpus[BOX_GPU].peak_flops[VMS[BOX_GPU][0]]
    use = training_use(boxed.inputs.facts, minibatch, step_s, [peak] * BOX_GPUS)
    assert use is not None
    cells = [
        model,
        f"{minibatch}",
        _in_words(boxed.plan),
        f"{step_s:.4f} s",
        f"{minibatch * SIZES[model].sequence / step_s:,.0f}",
        f"{use.utilisation:.0%}",
        f"{boxed.stage_bytes / 1e9:.1f} GB",
    ]
    if ran is not None:
        rests = (f"{kind} {share:.0%}" for kind, share in sorted(ran.took.spent.items()))
        cells += [
            f"{examples}",
            f"{ran.plan.predicted_step_s:.4f} s",
            f"{ran.took.step_s:.4f} s",
            f"{ran.error:+.1%}",
            f"{ran.took.peak_bytes / 1e9:.1f} GB",
            ", ".join(rests),
        ]
    return f"| {' | '.join(cells)} |"


def box_inputs(loaded: LoadedJob, profile: Profile, sizes: tuple[int, ...]) -> PlanInputs:
    """Return what a plan in one box is made from; how many GPUs divide matrices is left open.

    Args:
        loaded: The job.
        profile: Of its model.
        sizes: Numbers of GPUs that can divide matrices.
    """
    figures = Figures.of(BOX_GPU)
    within = LinkProfile(
        latency_s=figures.peer_latency_s,
        bandwidth_bytes_per_s=figures.peer_bytes_per_s,
        on_devices=True,
    )
    workload = workload_of(loaded, profile, BOX_GPU, within)
    inputs = workload_inputs(workload, BOX_GPUS, BOX_GPUS)
    return replace(inputs, facts=replace(inputs.facts, tensor_sizes=sizes), tensor_parallel=None)


def shorter_plan(inputs: PlanInputs, plan: Plan, examples: int) -> Plan:
    """Return the same plan for a mini-batch of fewer examples, with its predicted time."""
    asked = replace(
        inputs,
        minibatch_size=examples,
        microbatch_size=plan.microbatch_size,
        pipeline_depth=plan.pipeline_depth,
        tensor_parallel=plan.devices_per_stage_replica,
        schedule=plan.schedule,
        recompute=plan.recompute,
        state=plan.state,
    )
    shorter = choose_plan(asked).plan
    assert shorter is not None
    assert shorter.shape == plan.shape
    return shorter


def _in_words(plan: Plan) -> str:
    size = plan.devices_per_stage_replica
    words = [
        f"{plan.pipeline_depth}x{plan.data_parallel_width}",
        *([f"{size} a stage"] if size > 1 else []),
        f"{plan.microbatch_size}",
        f"`{plan.state}`" + (", shared" if plan.shared_state else ""),
        *(["recompute"] if plan.recompute else []),
        *([f"`{plan.schedule}`"] if plan.pipeline_depth > 1 else []),
    ]
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="")
    parser.add_argument("--gpus", default=",".join(VMS))
    parser.add_argument("--box", action="store_true", help="of eight H100, instead of one a VM")
    parser.add_argument("--train", action="store_true", help="the plan of a box, too")
    parser.add_argument("--minibatches", default="", help="such as 32,64 in a box; else as public")
    parser.add_argument("--tensor-parallel", type=int, default=0, help="0: left to the planner")
    parser.add_argument("--sequence-parallel", action="store_true", help="divided, too")
    parser.add_argument("--sections", action="store_true", help="times in groups, not plans")
    parser.add_argument("--one", action="store_true", help="in this process")
    chosen = parser.parse_args()
    models = chosen.models.split(",") if chosen.models else [*(BOX if chosen.box else MODELS)]
    gpus = [BOX_GPU] if chosen.box else chosen.gpus.split(",")
    if chosen.one:
        torch.set_num_threads(1)
        if chosen.box:
            for row in box_rows(models[0], chosen):
                print(row, flush=True)
        else:
            print(json.dumps(measure(models[0], gpus[0])))
        return
    command = [sys.executable, "-m", "tests.bench.bench_declared", "--one"]
    if chosen.box:
        columns = (*PLANNED, *(TRAINED if chosen.train else ()))
        columns = SECTIONS if chosen.sections else columns
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
        flags = ("train", "sequence_parallel", "sections")
        given = [name for name in flags if getattr(chosen, name)]
        command += ["--box", *(f"--{name.replace('_', '-')}" for name in given)]
        command += [f"--minibatches={chosen.minibatches}"]
        command += [f"--tensor-parallel={chosen.tensor_parallel}"]
    for model in models:
        for gpu in gpus:
            subprocess.run([*command, "--models", model, "--gpus", gpu], check=True)


if __name__ == "__main__":
    main()
