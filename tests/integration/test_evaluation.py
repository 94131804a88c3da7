"""Metrics, evaluation of several sets, best checkpoints and early stopping."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.faults import Action, environment_of
from tests.integration.fleet import Fleet, Zygote, make_plan, read_weights
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.manifest import list_checkpoints, read_manifest
from spottrain.pipeline.base.faults import Hook
from spottrain.storage.open import open_store
from spottrain.wire import messages
from spottrain.wire.messages import EvaluationSpec, JobSpec

NAMES = "abcd"


def spec_of(folder: Path, entrypoint: str = "measured_jobs:job", **changes: Any) -> JobSpec:
    every_two = EvaluationSpec(every_steps=2, metric="far/accuracy", goal="max")
    changes = {"evaluation": every_two, "steps": 6, **changes}
    return replace(job_spec(folder, entrypoint=entrypoint), **changes)


def train(
    zygote: Zygote,
    folder: Path,
    spec: JobSpec,
    shape: tuple[int, int] = (1, 1),
    kills: tuple[dict[str, Any], ...] = (),
    environment: dict[str, str] | None = None,
) -> Fleet:
    folder.mkdir(exist_ok=True)
    names = NAMES[: shape[0] * shape[1]]
    script = [
        {"action": Action.KILL_WORKER, "mark": str(folder / f"mark-{n}"), **kill}
        for n, kill in enumerate(kills)
    ]
    environment = environment_of(script) | (environment or {})
    with Fleet(spec, names, folder / "log", zygote, environment) as fleet:
        fleet.ready()
        plan = make_plan(spec, *shape, names, NUM_SECTIONS)
        fleet.train(lambda _: plan, fleet.initialise())
    assert all((folder / f"mark-{n}").exists() for n in range(len(kills)))
    return fleet


def steps_of(fleet: Fleet) -> dict[int, Any]:
    """What was reported of every step, by whoever did; all must say the same."""
    found: dict[int, Any] = {}
    for _, r in fleet.history:
        if isinstance(r, messages.MinibatchCommitted | messages.MinibatchAdopted):
            said = r.loss, r.grad_norm, r.weight, r.learning_rate, r.metrics, r.skipped
            assert found.setdefault(r.step, said) == said
    return found


def evaluations_of(fleet: Fleet) -> dict[tuple[int, str], Any]:
    found: dict[tuple[int, str], Any] = {}
    for _, r in fleet.history:
        if isinstance(r, messages.Evaluated):
            said = r.loss, r.metrics, r.is_best
            assert found.setdefault((r.step, r.name), said) == said
    return found


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(zygote, folder, spec_of(folder))


def test_metrics_are_means_over_the_minibatch(undisturbed: Fleet) -> None:
    steps = steps_of(undisturbed)
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    for _, _, weight, _, metrics, skipped in steps.values():
        assert [m.name for m in metrics] == ["accuracy", "even/accuracy"]
        assert all(0 <= m.value <= 1 for m in metrics)
        assert float(metrics[0].value * weight).is_integer()
        assert weight == 8 * 8
        assert skipped == ""
    assert [steps[k][3] for k in (1, 2, 3, 4)] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])


def test_every_set_is_evaluated_as_often_as_asked(undisturbed: Fleet) -> None:
    found = evaluations_of(undisturbed)
    assert list(found) == [(s, n) for s in (2, 4, 6) for n in ("near", "far")]
    for loss, metrics, _ in found.values():
        assert loss > 0
        names = [m.name for m in metrics]
        assert names == ["accuracy", "even/accuracy", "perplexity"]


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("shape", "kill"),
    [
        ((2, 2), None),
        ((4, 1), {"hook": Hook.APPLIED, "rank": 3, "step": 3}),
        ((1, 2), {"hook": Hook.EVALUATED, "rank": 1, "step": 3}),
        ((2, 1), {"hook": Hook.DECIDED, "rank": 0, "step": 3}),
    ],
)
def test_they_are_the_same_for_every_shape_and_after_a_kill(
    zygote: Zygote, undisturbed: Fleet, tmp_path: Path, shape: Any, kill: Any
) -> None:
    fleet = train(zygote, tmp_path, spec_of(tmp_path), shape, (kill,) if kill else ())

    assert steps_of(fleet) == steps_of(undisturbed)
    assert evaluations_of(fleet) == evaluations_of(undisturbed)


def test_the_best_checkpoint_is_kept_beside_the_newest(zygote: Zygote, tmp_path: Path) -> None:
    # Measured in evaluations alone.
    evaluation = EvaluationSpec(every_steps=1, metric="near/perplexity")
    spec = spec_of(
        tmp_path,
        entrypoint="measured_jobs:stuck_job",
        evaluation=evaluation,
        checkpoint_every_steps=4,
        checkpoint_keep=1,
    )

    fleet = train(zygote, tmp_path, spec, (2, 1))

    found = evaluations_of(fleet)
    best = max(step for (step, _), (_, _, is_best) in found.items() if is_best)
    store = open_store(spec.checkpoint_path)
    kept = list_checkpoints(store)
    assert [entry.step for entry in kept] == [6, best]
    assert read_manifest(store, kept[0].name).best_step == best


@pytest.mark.rotated
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_training_stops_early_without_improvement(
    zygote: Zygote, tmp_path: Path, shape: tuple[int, int]
) -> None:
    evaluation = EvaluationSpec(every_steps=1, metric="near/loss", patience=2)
    spec = spec_of(tmp_path, "measured_jobs:stuck_job", evaluation=evaluation, steps=50)

    kill = {"hook": Hook.EVALUATED, "rank": 0, "step": 3}
    fleet = train(zygote, tmp_path, spec, shape, (kill,))

    found = [s for (s, name), (_, _, is_best) in evaluations_of(fleet).items() if is_best]
    stopped = [r for _, r in fleet.history if isinstance(r, messages.GenerationStopped)]
    assert {r.done for r in stopped} == {True}
    assert {r.step for r in stopped} == {max(found) + 2}
    assert all("near/loss has not improved in 2" in r.early for r in stopped)
    assert list_checkpoints(open_store(spec.checkpoint_path))[0].step == max(found) + 2


# --- Losses that are not finite ---------------------------------------------------------------


@pytest.mark.rotated
def test_what_is_not_finite_is_skipped_by_all_stages_alike(zygote: Zygote, tmp_path: Path) -> None:
    poisoned = " ".join(map(str, range(0, 50, 17)))  # 3 of 50 examples
    seen = []
    for shape in ((1, 1), (2, 2)):
        folder = tmp_path / f"{shape[0]}x{shape[1]}"
        spec = spec_of(
            folder,
            "measured_jobs:exploding_job",
            evaluation=EvaluationSpec(),
            checkpoint_every_steps=1,
            checkpoint_keep=20,
        )
        fleet = train(zygote, folder, spec, shape, environment={"TINY_POISONED": poisoned})
        steps = steps_of(fleet)
        saved = {r.step for _, r in fleet.history if isinstance(r, messages.CheckpointSaved)}
        seen.append(
            (
                {k: (repr(v[0]), v[5]) for k, v in steps.items()},
                read_weights(Path(spec.checkpoint_path)),
            )
        )
        bad = {step for step, (loss, *_, skipped) in steps.items() if skipped}
        assert {steps[step][5] for step in bad} == {"loss"}
        assert all(math.isnan(steps[step][0]) == (step in bad) for step in steps)
        assert bad
        assert bad < set(steps)
        # The last one is saved whatever it is.
        assert saved.isdisjoint(bad - {6})
    assert seen[0] == seen[1]
