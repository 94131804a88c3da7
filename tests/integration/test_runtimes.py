"""Precisions, devices and wires: which bits they change, and which they do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.faults import Action
from tests.integration.fleet import (
    Fleet,
    FleetError,
    Zygote,
    make_plan,
)
from tests.integration.struck_runs import (
    NUM_SECTIONS,
    RUNTIMES,
    STEPS,
    Blow,
    Runtime,
    Undisturbed,
    job_spec,
    train,
)

from spottrain.pipeline.base.faults import Hook
from spottrain.wire import messages
from spottrain.wire.model import Precision, WireType


def test_a_library_that_cannot_sum_here_is_refused_in_a_line(
    zygote: Zygote, tmp_path: Path
) -> None:
    runtime = Runtime(network="nccl")

    with pytest.raises(FleetError, match="nccl is impossible: rank 0 computes on a CPU"):
        train(zygote, tmp_path, 1, 2, runtime=runtime)


def some_nightly(
    kept: Sequence[Sequence[object]], every: Iterable[Sequence[object]]
) -> list[object]:
    """Return all cases, of which the gate has those that are kept."""
    nightly = (pytest.mark.nightly,)
    return [pytest.param(*one, marks=() if one in kept else nightly) for one in every]


ALONE, BOTH = (1, 1), (2, 2)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("shape", "runtime"),
    some_nightly(
        tuple(zip((BOTH, ALONE, ALONE, BOTH, ALONE, BOTH), RUNTIMES, strict=True)),
        itertools.product((ALONE, BOTH), RUNTIMES),
    ),
    ids=str,
)
def test_gradients_that_leave_their_range_are_computed_again_to_the_same_bits(
    zygote: Zygote,
    undisturbed_in: Undisturbed,
    tmp_path: Path,
    shape: tuple[int, int],
    runtime: Runtime,
) -> None:
    """One example in nine weighs a billion times as much as the others."""
    jumping = "tiny_job:jumping_job"
    rank = shape[0] * shape[1] - 1
    blows = [Blow(Hook.GATHERED, rank, Action.KILL_WORKER, 2)]

    weights, _ = train(zygote, tmp_path, *shape, blows, runtime=runtime, entrypoint=jumping)

    assert weights == undisturbed_in(runtime.precision, jumping)


@pytest.mark.rotated
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_tensors_that_travel_in_fewer_bits_change_weights_by_rounding_only(
    zygote: Zygote, tmp_path: Path, wire: WireType
) -> None:
    losses = []
    wires: tuple[WireType, ...] = ("own", wire)
    for one in wires:
        (folder := tmp_path / one).mkdir()
        spec = replace(job_spec(folder, "fast"), wire=one)
        with Fleet(spec, "ab", folder / "log", zygote) as fleet:
            fleet.ready()
            plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS)
            fleet.train(lambda _, plan=plan: plan, fleet.initialise())  # type: ignore[misc]
            found = {
                r.step: r.loss
                for _, r in fleet.history
                if isinstance(r, messages.MinibatchCommitted) and r.loss
            }
        losses.append([loss for _, loss in sorted(found.items())])

    assert len(losses[0]) == STEPS
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("shape", "precision"),
    some_nightly(
        (
            *((ALONE, "fp32"), ((2, 1), "bf16"), ((1, 2), "fp16")),
            *((BOTH, "fp32"), (BOTH, "bf16"), (BOTH, "fp16")),
        ),
        itertools.product((ALONE, (2, 1), (1, 2), BOTH), ("fp32", "bf16", "fp16")),
    ),
    ids=str,
)
def test_fast_mode_has_the_same_bits_on_every_device(
    zygote: Zygote, tmp_path: Path, shape: tuple[int, int], precision: Precision
) -> None:
    """Two replicas at most: the sum of two gradients has no order."""
    found = []
    for runtime in (
        Runtime("cpu", "host", precision),
        Runtime("tests.fakes.deferred:3", "host", precision, segments=2),
        Runtime("tests.fakes.deferred:3", "device", precision),
    ):
        (folder := tmp_path / str(runtime)).mkdir()
        weights, _ = train(zygote, folder, *shape, runtime=runtime, reduction="fast")
        found.append(weights)

    assert found[0] == found[1] == found[2]
