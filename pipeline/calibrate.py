"""Measures what planning needs: every section's times and tensors (Varuna, table 2).

Sections are run one after the other as stages of their own, in one process, so never
more than one core calibrates. Medians over repetitions, after a warm-up.

    python -m spottrain.pipeline.calibrate ENTRYPOINT WORKDIR --microbatch-size M

prints the profile as JSON.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from spottrain.pipeline.data import MicrobatchSource
from spottrain.pipeline.entrypoint import load_job
from spottrain.pipeline.inspect import model_facts
from spottrain.pipeline.job import Batch, TrainingJob
from spottrain.pipeline.optimizer import build_optimizer
from spottrain.pipeline.sections import Layout, parameter_slots
from spottrain.pipeline.skeleton import materialise
from spottrain.pipeline.stage import StageModel
from spottrain.pipeline.tool import answer
from spottrain.pipeline.tracer import trace
from spottrain.pipeline.tracking import TensorTracker
from spottrain.wire import LinkProfile, MicrobatchProfile, Profile, SectionProfile

T = TypeVar("T")

REPETITIONS = 5
LOOPBACK = LinkProfile(latency_s=3e-4, bandwidth_bytes_per_s=1e9)
"""Between processes of one machine, over gloo."""


def calibrate(
    job: TrainingJob, layout: Layout, fingerprint: str, microbatch_size: int
) -> Profile:
    """Return a profile of every section, measured here.

    Raises:
        UserCodeError: The user's code raised.
    """
    model = materialise(job, seed=0)
    values = {
        name: getattr(*slots[0]).detach()
        for name, slots in parameter_slots(model).items()
    }
    source = MicrobatchSource(job, 0, microbatch_size, microbatch_size)
    batch = source.training(0, 0)
    sections = []
    activation: torch.Tensor | None = None
    optimizer_times = []
    for section in range(layout.num_sections):
        names = layout.parameters[section]
        tensors = {section: {name: values[name] for name in names}}
        stage = StageModel(job, layout, range(section, section + 1), tensors)
        measured, activation = _measure(stage, section, batch, activation)
        sections.append(measured)
        optimizer_times.append(_optimizer_s(job, stage, section))
    total_bytes = sum(layout.param_bytes(k) for k in range(layout.num_sections))
    return Profile(
        fingerprint=fingerprint,
        device="cpu",
        software=f"torch {torch.__version__}",
        microbatches=(
            MicrobatchProfile(
                microbatch_size=microbatch_size, sections=tuple(sections)
            ),
        ),
        optimizer_s_per_byte=sum(optimizer_times) / total_bytes,
        within_vm=LOOPBACK,
        between_vms=LOOPBACK,
    )


def _measure(
    stage: StageModel, section: int, batch: Batch, activation: torch.Tensor | None
) -> tuple[SectionProfile, torch.Tensor | None]:
    """Time one section; return also what it sends to the next."""
    parameters = [parameter for _, parameter in stage.parameters_of(section)]
    tracker = TensorTracker(0, parameters)
    times: dict[str, list[float]] = {"forward": [], "recompute": [], "backward": []}
    sent: torch.Tensor | None = None
    for _ in range(1 + REPETITIONS):
        if activation is not None:
            activation = activation.detach().requires_grad_()
        run = functools.partial(stage.forward, batch, activation, int)
        with torch.no_grad():
            _timed(times["forward"], run)
        with tracker.graph(0, activation, keep=True):
            out = _timed(times["recompute"], run)
        if isinstance(out, torch.Tensor):
            sent = out.detach()
        end = out if isinstance(out, torch.Tensor) else out[0]
        if end.requires_grad:
            back = functools.partial(torch.autograd.backward, end, torch.ones_like(end))
            _timed(times["backward"], back)
        else:  # all so far is frozen
            times["backward"].append(0.0)
        tracker.release_graph(0)
    median = {what: statistics.median(values[1:]) for what, values in times.items()}
    measured = SectionProfile(
        index=section,
        forward_s=median["forward"],
        backward_s=median["backward"],
        recompute_s=median["recompute"],
        saved_bytes=tracker.peak_bytes,
        output_bytes=0 if sent is None else sent.numel() * sent.element_size(),
    )
    return measured, sent


def _optimizer_s(job: TrainingJob, stage: StageModel, section: int) -> float:
    """Time one optimizer step over a section, its state being there already."""
    optimizer = build_optimizer(job.optimizer, stage.parameters_of(section))
    if optimizer is None:
        return 0.0
    times: list[float] = []
    for _ in range(1 + REPETITIONS):
        _timed(times, optimizer.step)
    return statistics.median(times[1:])


def _timed(times: list[float], call: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - began)
    return result


def main() -> int:
    """Print the profile of a job on this machine; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spottrain.pipeline.calibrate")
    parser.add_argument("entrypoint", help="module:function")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--microbatch-size", type=int, required=True)
    chosen = parser.parse_args()

    def profile() -> Profile:
        job = load_job(chosen.entrypoint, chosen.workdir)
        layout = trace(job)
        fingerprint = model_facts(job, layout).fingerprint
        return calibrate(job, layout, fingerprint, chosen.microbatch_size)

    return answer(profile)


if __name__ == "__main__":
    sys.exit(main())
