"""Model FLOP/s of each GPU, and their share of its published peak (MFU).

Model FLOPs alone: what recompute adds is not counted, so that only useful work is
(Varuna, section 7.1).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spottrain.machine import gpu_share
from spottrain.morphing.plan.flops import ComputeUse, training_use
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.gpu_speed import peak_flops
from spottrain.varuna_manager.core.model.records import GenerationSummary
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.wire.model import ModelFacts, Precision


def minibatch_use(
    facts: ModelFacts,
    precision: Precision | None,
    minibatch_size: int,
    step_s: float | None,
    devices: Sequence[str],
) -> ComputeUse | None:
    """Return what one mini-batch makes of its devices.

    Args:
        precision: Of its matrix multiplications, as in ``JobSpec``; None: unknown.
        minibatch_size: Examples of it.
        step_s: Its time.
        devices: Of the plan's slots, as in ``Profile``.

    Returns:
        None if the time or the model's FLOPs are not known.
    """
    if not step_s:
        return None
    peaks: dict[str, float | None] = dict.fromkeys(devices)
    for device in peaks:
        gpu = catalogue().gpu_of(device)
        if gpu is not None and gpu.compute_capability and precision is not None:
            peak = peak_flops(gpu, facts, precision)
            peaks[device] = None if peak is None else peak * gpu_share(device)
    return training_use(facts, minibatch_size, step_s, [peaks[d] for d in devices])


def plan_use(job: JobSettings, plan: GenerationSummary) -> ComputeUse | None:
    """Return what a mini-batch of a plan that has run made of its devices, as measured."""
    return minibatch_use(
        job.facts,
        job.spec.precision,
        job.spec.minibatch_size,
        plan.measured_step_s,
        plan.devices,
    )


def total_use(job: JobSettings, plans: Iterable[GenerationSummary]) -> ComputeUse | None:
    """Return what all mini-batches made of their devices while plans trained.

    Time between plans does not count.

    Returns:
        None if none was measured, or the model's FLOPs are not known.
    """
    uses = [
        use.times(plan.to_step - plan.from_step)
        for plan in plans
        if plan.from_step is not None and plan.to_step > plan.from_step
        if (use := plan_use(job, plan)) is not None
    ]
    return functools.reduce(operator.add, uses) if uses else None


def use_view(use: ComputeUse | None) -> dict[str, float | None]:
    """Return the fields of a document: ``tflops_per_gpu`` and ``mfu``, a share of 1.

    Of each slot, where workers compute on CPUs; these have no ``mfu``, nor have GPUs
    that the catalogue does not know.
    """
    return {
        "tflops_per_gpu": None if use is None else use.flops_per_s / 1e12,
        "mfu": None if use is None else use.utilisation,
    }


def use_line(document: Mapping[str, Any]) -> str:
    """Return FLOP/s for people; empty where the share of peak is not known.

    Args:
        document: With the fields of ``use_view``.
    """
    if document["mfu"] is None:
        return ""
    tflops, percent = document["tflops_per_gpu"], 100 * document["mfu"]
    return f"{tflops:.1f} TFLOP/s per GPU, {percent:.0f} % of peak"
