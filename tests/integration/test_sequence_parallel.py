"""Ranks that divide matrices, and between them the sequence: what one rank alone would train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.faults import environment_of
from tests.integration.fleet import FleetError, Zygote
from tests.integration.struck_runs import RUNTIMES, Runtime
from tests.integration.test_hooks import SERIES, series_of_blows
from tests.integration.test_tensor_parallel import (
    SECTIONS,
    Trained,
    shape_plan,
    tensor_spec,
    train,
)

from spottrain.pipeline.base.faults import Hook


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(zygote, tmp_path_factory.mktemp("alone"), "gpt", (1, 1, 1))


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 1, 2)], ids=str)
def test_ranks_that_divide_the_sequence_train_what_one_rank_does(
    zygote: Zygote, tmp_path: Path, alone: Trained, shape: tuple[int, int, int]
) -> None:
    train(zygote, tmp_path, "gpt", shape, sequence=True).assert_close(alone)


@pytest.mark.rotated
def test_a_transformers_model_divides_the_sequence_as_it_is(zygote: Zygote, tmp_path: Path) -> None:
    alone = train(zygote, tmp_path / "alone", "qwen3", (1, 1, 1))
    train(zygote, tmp_path / "divided", "qwen3", (2, 1, 2), sequence=True).assert_close(alone)


@pytest.fixture(scope="module")
def divided(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("divided")
    return train(zygote, folder, "dropped", (1, 1, 2), "exact", sequence=True)


@pytest.mark.rotated
@pytest.mark.parametrize("hooks", SERIES, ids=lambda hooks: hooks[0])
def test_a_rank_with_a_part_of_the_sequence_killed_at_any_hook_changes_no_bit(
    zygote: Zygote, tmp_path: Path, divided: Trained, hooks: Sequence[Hook]
) -> None:
    plan = shape_plan(tensor_spec(tmp_path, "dropped", "exact"), (2, 1, 2), SECTIONS["dropped"])
    # Who holds nothing passes no hook of an update.
    blows = series_of_blows(hooks, 2, max(plan.holders_of(plan.num_sections - 1)))
    script = [
        {**asdict(blow), "mark": str(tmp_path / f"mark-{number}")}
        for number, blow in enumerate(blows)
    ]
    environment = environment_of(script)
    struck = train(zygote, tmp_path, "dropped", (2, 1, 2), "exact", environment, sequence=True)
    assert struck.weights == divided.weights
    assert all(Path(blow["mark"]).exists() for blow in script)


@pytest.mark.rotated
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 2, 2)], ids=str)
def test_blocks_that_recompute_selectively_gather_again_to_the_same_bits(
    zygote: Zygote, tmp_path: Path, divided: Trained, shape: tuple[int, int, int]
) -> None:
    selective = train(zygote, tmp_path, "dropped", shape, "exact", sequence=True, selective=True)
    assert selective.weights == divided.weights


@pytest.mark.rotated
@pytest.mark.parametrize("runtime", RUNTIMES[1:4], ids=str)
def test_parts_of_a_sequence_round_as_all_of_it_in_any_runtime(
    zygote: Zygote, tmp_path: Path, runtime: Runtime
) -> None:
    alone = train(zygote, tmp_path / "1", "gpt", (1, 1, 1), "exact", runtime=runtime)
    parts = train(zygote, tmp_path / "2", "gpt", (2, 1, 2), "exact", runtime=runtime, sequence=True)
    assert parts.losses == pytest.approx(alone.losses, rel=2e-3)


@pytest.mark.rotated
def test_a_micro_batch_that_ranks_cannot_divide_ends_the_job(
    zygote: Zygote, tmp_path: Path
) -> None:
    with pytest.raises(FleetError, match=r"sequences that 2 ranks can divide: got .* 7, 16\)"):
        train(zygote, tmp_path, "uneven", (2, 1, 2), sequence=True)
