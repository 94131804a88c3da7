from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders import model_facts
from tests.tiers import first_always

from spottrain.errors import ConfigError, UserCodeError
from spottrain.varuna_manager.config.job import JobConfig, load_config
from spottrain.varuna_manager.launch.inspect import inspect_model
from spottrain.varuna_manager.reporting.text import model_lines

TRAIN = """
import torch
from torch import nn
from spottrain import TrainingJob

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def loss(model, batch):
    total = model(batch).square().sum()
    metric = "drift" if model.training else "accuracy"
    return total, len(batch), {metric: (1.0, 1.0)}

def job():
    data = [torch.ones(4)] * 8
    return TrainingJob(
        model=Model, dataset=data, heldout={"near": data}, loss=loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    write_code(folder, TRAIN)
    return folder


def write_code(folder: Path, code: str) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text(code)


COUNTING = TRAIN.replace(
    "total = model(batch).square().sum()",
    "loss.calls = getattr(loss, 'calls', 0) + 1; total = model(batch).square().sum() / loss.calls",
)


def test_state_that_results_depend_on_is_refused_in_exact_mode_alone(tmp_path: Path) -> None:
    write_code(tmp_path, COUNTING)
    fast = config(tmp_path, "near/loss")

    facts = inspect_model(fast)
    assert facts.carried == "loss.calls"
    assert any("loss.calls" in line for line in model_lines(facts, 1))
    with pytest.raises(UserCodeError, match=r"loss\.calls"):
        inspect_model(fast.model_copy(update={"reduction": "exact"}))


def config(folder: Path, metric: str) -> JobConfig:
    # Not among the code: a model is inspected anew when that changes.
    path = folder / "job.yaml"
    path.write_text(
        "name: x\nentrypoint: train:job\nworkdir: code\nminibatch_size: 2\nsteps: 4\n"
        f"evaluation: {{every_steps: 2, metric: {metric}}}\n"
        "local: {zones: [{slots: 1, capacity: 1, spot_usd_per_hour: 1, "
        "on_demand_usd_per_hour: 2}]}\n"
    )
    return load_config(path)


@pytest.mark.rotated
def test_what_evaluations_measure_chooses_the_best_weights_and_nothing_else_does(
    folder: Path,
) -> None:
    facts = inspect_model(config(folder, "near/accuracy"))
    assert (facts.metrics, facts.evaluated) == (("drift",), ("near/accuracy",))
    inspect_model(config(folder, "near/loss"))
    known = "there are near/loss, near/accuracy"
    with pytest.raises(ConfigError, match=f"no metric drift .* near: .*{known}"):
        inspect_model(config(folder, "near/drift"))
    with pytest.raises(ConfigError, match="no held-out set far"):
        inspect_model(config(folder, "far/accuracy"))


@pytest.mark.parametrize("seeded", first_always([False, True]))
def test_a_helper_model_must_be_the_same_in_every_process(tmp_path: Path, seeded: bool) -> None:
    seed = "torch.manual_seed(3)" if seeded else ""
    helped = TRAIN.replace("model(batch).square()", "(model(batch) - TEACHER(batch))")
    teacher = f"{seed}\nTEACHER = nn.Linear(4, 4).requires_grad_(False)\ndef loss("
    write_code(tmp_path, helped.replace("def loss(", teacher))
    asked = config(tmp_path, "near/loss")
    if seeded:
        assert inspect_model(asked).helper_bytes == 4 * (16 + 4)
        return
    with pytest.raises(UserCodeError, match=r"another model.* call torch\.manual_seed"):
        inspect_model(asked)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("schedule", "highest"),
    [("0.01 * min(1, (step + 1) / 3)", "0.01"), ("25.0", "25"), ("0.0", "0")],
)
def test_a_schedule_of_rates_is_refused_with_the_line_to_write(
    tmp_path: Path, schedule: str, highest: str
) -> None:
    scheduled = TRAIN.replace("lr=0.1),", "lr=0.1), lr_schedule=get_lr,")
    write_code(tmp_path, f"{scheduled}\ndef get_lr(step): return {schedule}\n")
    asked = config(tmp_path, "near/loss")
    with pytest.raises(UserCodeError, match=f"at most {highest} in 4 steps") as caught:
        inspect_model(asked)
    assert "lr_schedule=lambda step: get_lr(step) / 0.1;" in str(caught.value)
    meant = asked.model_copy(update={"lr_schedule_is": "factor"})
    assert inspect_model(meant).learning_rates is not None


@pytest.mark.rotated
def test_learning_rates_are_those_of_all_steps_of_the_job(tmp_path: Path) -> None:
    code = TRAIN.replace("lr=0.1),", "lr=0.1), lr_schedule=schedules.linear(warmup_steps=2),")
    write_code(tmp_path, f"from spottrain import schedules\n{code}")
    asked = config(tmp_path, "near/loss")
    rates = inspect_model(asked).learning_rates
    assert rates is not None
    assert (rates.base, rates.first_factor, rates.highest_factor) == (0.1, 0.0, 1.0)
    assert rates.last_factor == 0.5
    longer = asked.model_copy(update={"steps": 102})
    rates = inspect_model(longer).learning_rates
    assert rates is not None
    assert rates.last_factor == pytest.approx(0.01)
    lines = list(model_lines(inspect_model(asked), None))
    assert lines == ["learning rate: 0 at first, at most 0.1, 0.05 at last"]


@pytest.mark.rotated
def test_of_a_model_that_cannot_be_cut_it_is_said_what_one_section_means(tmp_path: Path) -> None:
    write_code(tmp_path, TRAIN.replace("in self.blocks:", "in [*self.blocks, self.blocks[0]]:"))
    facts = inspect_model(config(tmp_path, "near/loss"))
    assert len(facts.sections) == 1
    (line,) = (line for line in model_lines(facts, 1) if line.startswith("warning"))
    assert "every worker trains a replica of all of it, with 240 B of" in line
    assert line.endswith(facts.uncut)


def test_of_a_model_with_batch_norm_it_is_said_that_the_planner_would_choose_its_results() -> None:
    facts = replace(model_facts(), normalises_batches="blocks.0.norm")
    (line,) = model_lines(facts, None)
    assert line.startswith("warning: blocks.0.norm normalises by the micro-batch")
    assert line.endswith("set microbatch_size to have the same results on other machines")
    assert not list(model_lines(facts, 4))


KEPT_ALIVE = """
import subprocess, threading
threading.Thread(target=threading.Event().wait, name="poller").start()
subprocess.Popen(["sleep", "1000"])
"""


@pytest.mark.rotated
def test_code_that_leaves_threads_and_processes_behind_is_inspected(tmp_path: Path) -> None:
    write_code(tmp_path, KEPT_ALIVE + TRAIN)

    assert inspect_model(config(tmp_path, "near/loss")).dataset_len == 8
