"""The example that the quickstart trains is what it says, and learns."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.tracer import trace

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def job() -> TrainingJob:
    return load_job("byte_gpt:training_job", EXAMPLES)


def test_it_has_8_sections_2_million_parameters_and_a_tied_embedding(
    job: TrainingJob,
) -> None:
    layout = trace(job)
    sizes = [spec.num_bytes // 4 for spec in layout.specs.values()]
    assert layout.num_sections == 8
    assert 1.9e6 < sum(sizes) < 2.1e6
    assert [(t.name, t.sections) for t in layout.tied] == [("embedding.weight", (0, 7))]


def test_held_out_text_is_16_kb_of_other_files(job: TrainingJob) -> None:
    text, heldout = job.dataset.text, job.heldout.text  # type: ignore[attr-defined, union-attr]
    assert len(heldout) == 16 * 1024
    assert len(text) > 5e6
    assert bytes(heldout[:2000].tolist()) not in bytes(text.tolist())
    library = Path(sysconfig.get_path("stdlib"))
    assert (library / "json" / "decoder.py").read_bytes() in bytes(text.tolist())


def test_an_example_is_a_window_and_its_next_bytes(job: TrainingJob) -> None:
    (tokens, targets), (following, _) = job.dataset[7], job.dataset[8]
    assert tokens.shape == targets.shape == (64,)
    assert torch.equal(tokens[1:], targets[:-1])
    assert targets[-1] == following[0]
    last = job.dataset[len(job.dataset) - 1]
    assert last[1].shape == (64,)


def test_the_learning_rate_warms_up_and_falls_to_nothing_with_the_jobs_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPOTTRAIN_STEPS", "130")
    schedule = load_job("byte_gpt:training_job", EXAMPLES).lr_schedule
    assert schedule is not None
    factors = [schedule(step) for step in range(130)]
    assert factors[0] == pytest.approx(1 / 30)
    assert factors[30] == 1.0
    assert factors[129] == pytest.approx(0.01)
    assert factors[30:] == sorted(factors[30:], reverse=True)


@pytest.mark.rotated
def test_it_learns(job: TrainingJob) -> None:
    model = materialise(job, seed=0)
    optimizer = job.optimizer(list(model.named_parameters()))
    dice = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(12):
        picked = torch.randint(len(job.dataset), (16,), generator=dice).tolist()
        loss, weight, *_ = job.loss(model, job.collate([job.dataset[i] for i in picked]))
        optimizer.zero_grad()
        torch.autograd.backward(loss / weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item() / weight)
    assert losses[0] > 5.3
    assert losses[-1] < 4.3
