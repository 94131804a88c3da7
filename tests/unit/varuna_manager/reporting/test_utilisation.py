"""TFLOP/s and the share of peak that a job's mini-batches come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.varuna_manager.reporting.test_documents import RUNNING, text_of
from tests.unit.varuna_manager.story import FACTS, SETTINGS, SPEC, Story

from spottrain.varuna_manager.core.model.records import GenerationSummary
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.reporting import documents, tables, text
from spottrain.varuna_manager.reporting.history import JobHistory
from spottrain.varuna_manager.reporting.utilisation import (
    minibatch_use,
    plan_use,
    total_use,
    use_line,
    use_view,
)
from spottrain.wire.model import ModelFacts, Precision

TERA = 10**12
A100, T4, CPU = "NVIDIA A100-SXM4-40GB", "Tesla T4", "Intel(R) Xeon(R), 1 thread"


def facts_of(forward_flops: int | None, param_bytes: int = 4) -> ModelFacts:
    """A model of two sections, of one parameter each."""
    section = replace(FACTS.sections[0], flops_per_example=forward_flops, param_bytes=param_bytes)
    sections = (section, replace(section, index=1))
    return replace(FACTS, sections=sections, num_parameters=2)


def job(forward_flops: int | None = TERA, **spec: Any) -> JobSettings:
    facts = facts_of(forward_flops)
    return replace(SETTINGS, facts=facts, spec=replace(SPEC, **spec))


def ran(devices: tuple[str, ...], steps: int = 10, **changes: Any) -> GenerationSummary:
    summary = GenerationSummary(
        generation=1,
        pipeline_depth=1,
        data_parallel_width=len(devices),
        num_slots=len(devices),
        from_step=5,
        to_step=5 + steps,
        reason="start",
        predicted_step_s=9.0,
        measured_step_s=2.0,
        started_at_s=0.0,
        ended_at_s=99.0,
        devices=devices,
    )
    return replace(summary, **changes)


@pytest.mark.parametrize(
    ("precision", "param_bytes", "devices", "mfu"),
    [
        ("bf16", 4, (A100, A100), 12 / 312),
        ("fp16", 4, (A100, T4), 12 / ((312 + 65) / 2)),
        ("fp32", 4, (A100, A100), 12 / 19.5),
        ("fp32", 2, (A100, A100), 12 / 312),  # the user's own cast of the parameters
        ("bf16", 4, (f"{A100}, 1/2 each",) * 2, 12 / 156),
        ("bf16", 4, (T4, T4), None),
        ("bf16", 4, (A100, CPU), None),
        (None, 4, (A100, A100), None),
    ],
)
def test_the_share_is_of_the_peaks_at_the_job_s_precision(
    precision: Precision | None,
    param_bytes: int,
    devices: tuple[str, ...],
    mfu: float | None,
) -> None:
    """8 examples of 6 TFLOP in 2 s on 2 devices: 12 TFLOP/s each."""
    use = minibatch_use(facts_of(TERA, param_bytes), precision, 8, 2.0, devices)
    view = use_view(use)
    assert view["tflops_per_gpu"] == pytest.approx(12.0)
    assert view["mfu"] == (None if mfu is None else pytest.approx(mfu))


def test_what_is_not_known_is_null() -> None:
    nothing = {"tflops_per_gpu": None, "mfu": None}
    for use in (
        plan_use(job(None, precision="bf16"), ran((A100,))),
        plan_use(job(precision="bf16"), ran((A100,), measured_step_s=None)),
        plan_use(job(precision="bf16"), ran(())),
        total_use(job(precision="bf16"), []),
        total_use(job(precision="bf16"), [ran((A100,), from_step=None)]),
        total_use(job(precision="bf16"), [ran((A100,), steps=0)]),
    ):
        assert use_view(use) == nothing
    assert use_line(nothing) == ""


def test_a_job_s_share_weighs_its_plans_by_their_mini_batches() -> None:
    settings = job(precision="bf16")
    plans = [ran((A100,), 10), ran((A100, A100), 30, measured_step_s=1.0)]
    use = total_use(settings, [*plans, ran((A100,), from_step=None)])
    assert use is not None
    flops, gpu_s = 40 * 8 * 6, 10 * 2.0 + 30 * 1.0 * 2
    assert use.flops_per_s == pytest.approx(flops / gpu_s * TERA)
    assert use.utilisation == pytest.approx(flops / gpu_s / 312)
    assert use_line(use_view(use)) == "24.0 TFLOP/s per GPU, 8 % of peak"


def test_a_job_s_devices_are_those_that_its_vms_reported() -> None:
    """Through the core, up to the documents and to what people see."""
    settings = job(precision="fp16")
    story = Story(spec=settings.spec, facts=settings.facts)
    story.devices = {"a": A100, "b": T4}
    story.training("a", "b", steps=3)
    assert story.generation.devices == (A100, T4)
    tflops, mfu = 8 * 6 / 2, 8 * 6 / (312 + 65)
    status = documents.status(story.state, True, story.now_s)
    report = documents.report(story.state, JobHistory(), True, story.now_s)
    (plan,) = report["plans"]
    for document in (status, report, plan):
        assert document["tflops_per_gpu"] == pytest.approx(tflops)
        assert document["mfu"] == pytest.approx(mfu)
    line = "24.0 TFLOP/s per GPU, 13 % of peak"
    assert f"8.0 examples/s · {line}" in text_of(tables.live_panel(status, None))
    assert f"{line}, while training" in text_of(*tables.summary(report))
    assert ("utilisation", "13%", line) in text.tiles(report)


def test_a_job_on_cpus_shows_no_share() -> None:
    facts = facts_of(TERA)
    cpus = replace(RUNNING, settings=replace(RUNNING.job, facts=facts))
    status = documents.status(cpus, True, 1100.0)
    assert status["mfu"] is None
    assert "TFLOP" not in text_of(tables.live_panel(status, None))
