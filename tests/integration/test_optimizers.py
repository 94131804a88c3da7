"""Optimizers that keep state where libraries keep it: the same bits on every shape.

All of them: ``python -m tests.bench.bench_optimizers``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults import Action
from tests.integration.fleet import Zygote
from tests.integration.optimizer_runs import outcome_of
from tests.integration.struck_runs import Blow, Runtime, train

from spottrain.pipeline.base.faults import Hook

ENTRYPOINT = "optimizer_jobs:Nested"


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("adamw_tensor_lr", ""),
        ("adamw_ema", ""),
        ("adamw_masters", ""),
        ("MomentInEightBits", ""),
        ("StepMadeByFirstStep", '[[0,"step",6],[1,"step",6]]'),
        ("EveryThird", '[[0,"rounds",2],[0,"since",0],[1,"rounds",2],[1,"since",0]]'),
        ("Nested", None),
        ("TypedState", ""),
        ("ListsInState", ""),
        ("NestedState", ""),
    ],
)
def test_a_stop_and_another_shape_change_no_bit(
    zygote: Zygote, tmp_path: Path, name: str, kept: str | None
) -> None:
    outcome = outcome_of(name, zygote, tmp_path)

    assert outcome.kind == "same bits"
    assert kept is None or outcome.kept == kept


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of what these libraries import
@pytest.mark.parametrize("name", ["bnb_adamw_8bit", "ao_adamw_8bit", "ao_adamw_8bit_masters"])
def test_moments_of_8_bits_keep_their_bits(zygote: Zygote, tmp_path: Path, name: str) -> None:
    outcome = outcome_of(name, zygote, tmp_path)

    if outcome.kind == "skipped":
        pytest.skip(outcome.reason)
    assert outcome.kind == "same bits"


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(zygote, folder, 1, 1, entrypoint=ENTRYPOINT)[0]


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("hook", "action", "width", "runtime"),
    [
        (Hook.UPDATED, Action.KILL_WORKER, 1, Runtime()),
        (Hook.DECIDED, Action.KILL_VM, 2, Runtime("tests.fakes.deferred:4", "host")),
        (Hook.UPDATED, Action.END_ITSELF, 1, Runtime("tests.fakes.deferred:5", "device")),
    ],
    ids=str,
)
def test_a_kill_changes_no_bit(
    zygote: Zygote,
    tmp_path: Path,
    undisturbed: dict[str, bytes],
    hook: Hook,
    action: Action,
    width: int,
    runtime: Runtime,
) -> None:
    blow = Blow(hook, 1, action, 3)

    weights, _ = train(
        *(zygote, tmp_path, 2, width, [blow]), runtime=runtime, entrypoint=ENTRYPOINT
    )

    assert weights == undisturbed
