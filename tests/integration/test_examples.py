"""The examples are what they say: accepted, planned on a cloud, and trained to their end."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.faults import Action, environment_of
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.jobs import SPOTTRAIN
from tests.integration.struck_runs import NUM_SECTIONS, job_spec
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spottrain.datasets import variable
from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.model.checks.trial import try_optimizer
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.tracer import trace
from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.launch.preflight import check_build
from spottrain.wire.plan import Plan

EXAMPLES = Path(__file__).parents[2] / "examples"
CLOUDS = ("aws", "azure", "gcp")


SMALL = {
    "nanogpt": {},
    "finetune_hf": {"CONTEXT": "16"},
    "lora": {"CONTEXT": "16"},
    "pretrain": {"CONTEXT": "16", "LAYERS": "4", "HEADS": "2", "WIDTH": "16"},
    "bert_large": {"CONTEXT": "16", "LAYERS": "4", "HEADS": "2", "WIDTH": "16"},
    "vit": {"SIZE": "16", "PATCH": "8", "LAYERS": "4", "HEADS": "2", "WIDTH": "16"},
}
"""What makes an example tiny: variables that its job file, or a reader, may set."""
HAS_AWS = ("finetune_hf", "pretrain", "vit")


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader of the examples brings along: a model, text, its tokens, images."""
    folder = tmp_path_factory.mktemp("material")
    (folder / "text").mkdir()
    for module in (argparse, ast):
        file = folder / "text" / f"{module.__name__}.txt"
        file.write_text(inspect.getsource(module))
    command = (sys.executable, EXAMPLES / "pretrain.py", folder / "text", folder / "tokens")
    small = {**os.environ, "VOCABULARY": "512"}
    subprocess.run(command, env=small, check=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokens" / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder / "model")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
        )
    ).save_pretrained(folder / "model")
    for kind in ("dark", "light"):
        (folder / "images" / kind).mkdir(parents=True)
        for number in range(60):
            shade = number if kind == "dark" else 255 - number
            image = Image.new("RGB", (24, 20), (shade, shade, 128))
            image.save(folder / "images" / kind / f"{number}.png")
    return folder


@pytest.fixture
def at_hand(material: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The material, where examples that are looked at on this machine find it."""
    for name in ("model", "text", "tokens", "images"):
        monkeypatch.setenv(variable(name), str(material / name))
    return material


def set_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**SMALL[name], "VOCABULARY": "512"}.items():
        monkeypatch.setenv(key, value)


@pytest.mark.rotated
@pytest.mark.usefixtures("at_hand")
@pytest.mark.filterwarnings("default::FutureWarning")  # of peft
@pytest.mark.parametrize(
    ("name", "sections", "metrics"),
    [
        ("nanogpt", 8, ()),
        ("finetune_hf", 4, ("accuracy",)),
        ("lora", 4, ("accuracy",)),
        ("pretrain", 4, ()),
        ("bert_large", 4, ()),
        ("vit", 4, ("accuracy",)),
    ],
)
def test_an_example_is_accepted(
    name: str, sections: int, metrics: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(EXAMPLES / f"{name}.yaml")
    monkeypatch.setenv("SPOTTRAIN_STEPS", str(config.steps))
    set_small(name, monkeypatch)
    job = load_job(config.entrypoint, EXAMPLES)
    layout = trace(job)
    facts = model_facts(job, layout)
    assert (layout.num_sections, facts.metrics) == (sections, metrics)
    assert facts.dataset_len > 100
    assert facts.heldout_len > 0
    try_optimizer(job, layout)
    assert job.lr_schedule is not None
    assert job.lr_schedule(0) < 0.1
    assert job.lr_schedule(config.steps) < 0.2


@pytest.mark.rotated
@pytest.mark.parametrize("name", HAS_AWS)
def test_an_example_trains_to_its_end_on_this_machine(
    name: str, material: Path, tmp_path: Path
) -> None:
    command = [
        *("launch", EXAMPLES / f"{name}.yaml", "--steps", "4", "-o", "json"),
        *("--set", "minibatch_size=4", "--set", "evaluation.every_steps=2"),
        *(x for key, value in SMALL[name].items() for x in ("--env", f"{key}={value}")),
        *("--env", "VOCABULARY=512"),
    ]
    data = load_config(EXAMPLES / f"{name}.yaml").data
    command += [x for key in data for x in ("--set", f"data.{key}.path={material / key}")]
    report = spottrain(tmp_path, *map(str, command))
    assert report["state"] == "succeeded"
    assert report["steps_done"] == 4


@pytest.mark.rotated
@pytest.mark.usefixtures("at_hand")
@pytest.mark.parametrize("name", HAS_AWS)
def test_an_example_on_a_cloud_has_a_plan_without_an_account(name: str, tmp_path: Path) -> None:
    assert spottrain(tmp_path, "plan", f"{EXAMPLES / name}_aws.yaml", "-o", "json")["plan"]


def spottrain(home: Path, *arguments: str) -> dict[str, Any]:
    """Run a command as a reader would; return its JSON."""
    environment = {**os.environ, "SPOTTRAIN_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*SPOTTRAIN, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


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
@pytest.mark.usefixtures("at_hand")
def test_the_fine_tune_in_bf16_ends_with_the_same_bits_at_2x1_with_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_small("finetune_hf", monkeypatch)
    weights = {}
    with contextlib.closing(Zygote()) as zygote:  # one that knows where the data is
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
            with Fleet(
                *(spec, names, folder / "log", zygote, environment), workdir=EXAMPLES
            ) as fleet:
                fleet.ready()
                plan = make_plan(spec, depth, 1, names, NUM_SECTIONS)
                weights[depth] = fleet.train(always(plan), fleet.initialise())
    assert (tmp_path / "2" / "mark").exists()
    assert weights[1] == weights[2]
