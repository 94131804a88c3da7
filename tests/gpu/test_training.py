"""Workers on a device train, are killed at every place, and no bit changes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.faults import Action, environment_of
from tests.gpu import runs
from tests.integration.fleet import Fleet, Zygote
from tests.integration.struck_runs import STEP_OF, can_reach

from spottrain.pipeline.base.faults import Hook
from spottrain.wire import messages
from spottrain.wire.model import StateHome
from spottrain.wire.plan import Plan

SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2))
HOOKS = [hook for hook in Hook if hook is not Hook.EVALUATED]  # nothing is held out
EVERY = os.environ.get("SPOTTRAIN_TEST_MATRIX") == "all"


def cases(
    shapes: Sequence[tuple[int, int]], hooks: Sequence[Hook] = HOOKS
) -> list[tuple[tuple[int, int], Hook]]:
    """Return shapes and hooks: all pairs, or every hook once and shapes in turn."""
    pairs = (
        itertools.product(shapes, hooks)
        if EVERY
        else zip(itertools.cycle(shapes), hooks, strict=False)
    )
    reaching = shapes[-1]  # recomputes
    return [(shape if can_reach(hook, shape[0]) else reaching, hook) for shape, hook in pairs]


def train(
    zygote: Zygote,
    folder: Path,
    shape: tuple[int, int],
    blow: tuple[Hook, int] | None = None,
    state: StateHome = "host",
    entrypoint: str = "tiny",
    **changes: Any,
) -> tuple[dict[str, bytes], Fleet]:
    """Train to the end; a blow kills the worker of a rank at a hook."""
    spec = runs.job_spec(folder, entrypoint, **changes)
    script = []
    if blow is not None:
        hook, rank = blow
        step, mark = STEP_OF.get(hook, 3), str(folder / "mark")
        action = Action.KILL_WORKER
        script = [{"hook": hook, "rank": rank, "action": action, "step": step, "mark": mark}]

    def choose(vms: Sequence[str]) -> Plan:
        return runs.plan_for(spec, shape, vms, state=state)

    vms = runs.VMS[: shape[0] * shape[1]]
    environment = environment_of(script)
    with runs.start(spec, vms, folder, zygote, environment) as fleet:
        weights = fleet.train(choose, fleet.initialise())
    assert blow is None or (folder / "mark").exists(), f"{blow} did not strike"
    return weights, fleet


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return train(zygote, tmp_path_factory.mktemp("undisturbed"), (1, 1))[0]


def test_it_trains(zygote: Zygote, tmp_path: Path) -> None:
    _, fleet = train(zygote, tmp_path, (1, 1))

    committed = [r for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted)]
    assert [r.step for r in committed] == list(range(1, runs.STEPS + 1))
    assert committed[-1].loss < committed[0].loss
    assert all(r.busy_s > 0 for r in committed)


@pytest.mark.parametrize(("shape", "hook"), cases(SHAPES))
def test_a_worker_killed_at_any_hook_costs_nothing(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    shape: tuple[int, int],
    hook: Hook,
) -> None:
    rank = 0 if hook is Hook.RECOMPUTE else shape[0] * shape[1] - 1

    weights, fleet = train(zygote, tmp_path, shape, (hook, rank))

    assert weights == undisturbed
    assert fleet.committed_twice() == []


@pytest.mark.parametrize("shape", SHAPES)
def test_state_on_the_device_changes_no_bit(
    zygote: Zygote, tmp_path: Path, shape: tuple[int, int]
) -> None:
    """One update of the GPU's rounds otherwise than one of the CPU's: own reference."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()

    one, _ = train(zygote, folders[0], (1, 1), state="device")
    other, _ = train(zygote, folders[1], shape, state="device")

    assert one == other


@pytest.mark.parametrize(("shape", "hook"), cases(((1, 2), (2, 2)), HOOKS[::2]))
def test_a_replica_that_dies_with_its_state_costs_nothing(
    zygote: Zygote,
    tmp_path: Path,
    shape: tuple[int, int],
    hook: Hook,
    on_device: dict[str, bytes],
) -> None:
    rank = 0 if hook is Hook.RECOMPUTE else shape[0] * shape[1] - 1

    weights, fleet = train(zygote, tmp_path, shape, (hook, rank), state="device")

    assert weights == on_device
    assert fleet.committed_twice() == []


@pytest.fixture(scope="module")
def on_device(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("on_device")
    return train(zygote, folder, (1, 1), state="device")[0]


@pytest.mark.parametrize("hook", [Hook.BACKWARD, Hook.DECIDED, Hook.UPDATED])
def test_the_only_copy_that_dies_with_its_worker_comes_from_the_checkpoint(
    zygote: Zygote, tmp_path: Path, hook: Hook, on_device: dict[str, bytes]
) -> None:
    weights, fleet = train(zygote, tmp_path, (1, 1), (hook, 0), state="device")

    assert weights == on_device
    assert fleet.committed_twice(), "it must go on from the checkpoint of mini-batch 2"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_precisions_are_exact_over_shapes_too(
    zygote: Zygote, tmp_path: Path, precision: str, shape: tuple[int, int]
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()

    one, _ = train(zygote, folders[0], (1, 1), precision=precision)
    blow = (Hook.BACKWARD, 0)
    other, _ = train(zygote, folders[1], shape, blow, precision=precision)

    assert one == other


@pytest.mark.parametrize("state", ["host", "device"])
def test_stale_gradients_are_exact_over_shapes(
    zygote: Zygote, tmp_path: Path, state: StateHome
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()

    def trained(folder: Path, shape: tuple[int, int]) -> dict[str, bytes]:
        how: dict[str, Any] = {
            "semantics": "stale_by_one",
            "checkpoint_every_steps": 100,
        }
        return train(zygote, folder, shape, state=state, **how)[0]

    one = trained(folders[0], (1, 1))
    other = trained(folders[1], (2, 2))

    assert one == other


def test_the_fused_optimizer_trains_in_both_homes(zygote: Zygote, tmp_path: Path) -> None:
    folders: dict[StateHome, Path] = {"host": tmp_path / "h", "device": tmp_path / "d"}
    losses = {}
    for state, folder in folders.items():
        folder.mkdir()
        _, fleet = train(zygote, folder, (1, 1), state=state, entrypoint="tiny_fused")
        losses[state] = [
            r.loss for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted)
        ]

    assert losses["device"] == pytest.approx(losses["host"], rel=1e-3)
