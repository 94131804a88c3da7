"""The examples are what they say: cut, accepted, and one trained on another shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.faults import Action, environment_of
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.model.checks.trial import try_optimizer
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.tracer import trace
from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.launch.preflight import check_build
from spottrain.wire.model import Plan

EXAMPLES = Path(__file__).parents[2] / "examples"
CLOUDS = ("aws", "azure", "gcp")


@pytest.mark.rotated
@pytest.mark.filterwarnings("default::FutureWarning")  # of peft
@pytest.mark.parametrize(
    ("name", "sections", "metrics"),
    [
        ("nanogpt", 8, ()),
        ("finetune_hf", 4, ("accuracy",)),
        ("vit", 4, ("accuracy",)),
        ("lora", 4, ("accuracy",)),
    ],
)
def test_an_example_is_accepted(
    name: str, sections: int, metrics: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    config = load_config(EXAMPLES / f"{name}.yaml")
    monkeypatch.setenv("SPOTTRAIN_STEPS", str(config.steps))
    job = load_job(config.entrypoint, EXAMPLES)
    layout = trace(job)
    facts = model_facts(job, layout)
    assert (layout.num_sections, facts.metrics) == (sections, metrics)
    assert facts.dataset_len > 10_000
    assert facts.heldout_len > 0
    try_optimizer(job, layout)
    assert job.lr_schedule is not None
    assert job.lr_schedule(0) == 0
    assert job.lr_schedule(config.steps) < 0.2


@pytest.mark.rotated
def test_the_first_jobs_on_clouds_are_accepted_and_their_vms_have_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.setenv(name, "given")
    configs = [load_config(EXAMPLES / f"{name}.yaml") for name in sorted(CLOUDS)]
    assert [config.clouds[0].cloud for config in configs] == sorted(CLOUDS)
    for config in configs:
        lines = check_build(config)
        assert lines
        assert not any("WARNING" in line for line in lines), lines
    (entrypoint,) = {config.entrypoint for config in configs}
    job = load_job(entrypoint, EXAMPLES)
    layout = trace(job)
    assert layout.num_sections == 8
    try_optimizer(job, layout)


def always(plan: Plan) -> Callable[[Sequence[str]], Plan]:
    return lambda _: plan


@pytest.mark.rotated
def test_the_fine_tune_in_bf16_ends_with_the_same_bits_at_2x1_with_a_kill(
    zygote: Zygote, tmp_path: Path
) -> None:
    weights = {}
    for depth in (1, 2):
        folder = tmp_path / str(depth)
        folder.mkdir()
        spec = job_spec(folder, precision="bf16", entrypoint="finetune_hf:training_job")
        fault = {
            "hook": Hook.UPDATED,
            "rank": 1,
            "action": Action.KILL_WORKER,
            "step": 3,
            "mark": str(folder / "mark"),
        }
        environment = environment_of([fault])
        names = "ab"[:depth]
        with Fleet(*(spec, names, folder / "log", zygote, environment), workdir=EXAMPLES) as fleet:
            fleet.ready()
            plan = make_plan(spec, depth, 1, names, NUM_SECTIONS)
            weights[depth] = fleet.train(always(plan), fleet.initialise())
    assert (tmp_path / "2" / "mark").exists()
    assert weights[1] == weights[2]
