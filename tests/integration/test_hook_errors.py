"""A rank raises, hangs or ends itself at a named place; no state is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.faults import Action
from tests.integration.fleet import (
    Zygote,
)
from tests.integration.struck_runs import (
    STEP_OF,
    Blow,
    Runtime,
    train,
)
from tests.tiers import first_always

from spottrain.pipeline.base.faults import Hook
from spottrain.wire import messages
from spottrain.wire.model import StateHome


@pytest.mark.parametrize("shape", first_always([(1, 2), (1, 1)]), ids=["1x2", "1x1"])
@pytest.mark.parametrize(
    "hooks",
    first_always(
        [
            (Hook.MOVED, Hook.BACKWARD, Hook.REDUCED, Hook.PREPARED),
            (Hook.GATHERED, Hook.DECIDED, Hook.UNDO_SAVED),
            (Hook.UPDATED, Hook.FLIPPED, Hook.APPLIED),
        ]
    ),
    ids=str,
)
def test_a_worker_that_ends_itself_brings_the_state_of_its_device_to_safety(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hooks: Sequence[Hook],
    shape: tuple[int, int],
) -> None:
    """Every worker does, one mini-batch after the other: there is no other copy."""
    width = shape[0] * shape[1]
    # Not in the last mini-batch: a worker whose peer was faster may be ended before its own
    # hook; it strikes in the next one.
    blows = [
        Blow(hook, rank, Action.END_ITSELF, STEP_OF.get(hook, number))
        for number, hook in enumerate(hooks)
        for rank in range(width)
    ]

    weights, fleet = train(
        zygote, tmp_path, *shape, blows, runtime=Runtime("tests.fakes.deferred:3", "device")
    )

    assert weights == undisturbed
    assert fleet.committed_twice() == []
    deaths = [r for _, r in fleet.history if isinstance(r, messages.WorkerDied)]
    assert len(deaths) == len(blows)
    assert all("its state is in the VM's memory" in death.reason for death in deaths)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("hangs", "raises", "state", "outcome"),
    [
        # The one that raises comes to it only after the other has begun to hang: the
        # first stage is the last to come to its reductions, ...
        (
            Blow(Hook.REDUCE, 1, Action.HANG, 3),
            Blow(Hook.REDUCE, 0, Action.RAISE, 3),
            "host",
            "its state is in the VM's memory",
        ),
        # ... and a replica has the tasks of its next mini-batch before it.
        (
            Blow(Hook.GATHERED, 0, Action.HANG, 3),
            Blow(Hook.REDUCE, 3, Action.RAISE, 4),
            "device",
            "in the VM's memory",
        ),
        (
            Blow(Hook.UPDATED, 0, Action.HANG, 3),
            Blow(Hook.REDUCE, 3, Action.RAISE, 4),
            "device",
            "its copy of the state is lost",
        ),
    ],
    ids=lambda value: value.hook if isinstance(value, Blow) else None,
)
def test_a_worker_that_hangs_when_a_peer_is_gone_ends_itself_in_time(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hangs: Blow,
    raises: Blow,
    state: StateHome,
    outcome: str,
) -> None:
    """In the middle of an update nothing can be copied: the replica has the state."""
    runtime = Runtime("tests.fakes.deferred:3", state)

    weights, fleet = train(zygote, tmp_path, 2, 2, [hangs, raises], runtime=runtime)

    assert weights == undisturbed
    assert fleet.committed_twice() == []
    (death,) = [r for _, r in fleet.history if isinstance(r, messages.WorkerDied)]
    assert "a communicator could not be left in 2.5 s" in death.reason
    assert outcome in death.reason


@pytest.mark.rotated
@pytest.mark.parametrize("device", ["tests.fakes.deferred:3", "cpu"])
@pytest.mark.parametrize("hook", [Hook.REDUCE, Hook.GATHERED])
def test_an_error_aborts_groups_on_devices_and_no_worker_ends(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hook: Hook,
    device: str,
) -> None:
    runtime = Runtime(device, "host")

    weights, fleet = train(
        zygote, tmp_path, 1, 3, [Blow(hook, 1, Action.RAISE, 3)], runtime=runtime
    )

    assert weights == undisturbed
    assert all(len(pids) == 1 for pids in fleet.pids().values())


@pytest.mark.rotated
@pytest.mark.parametrize(
    "hooks",
    [
        (Hook.FORWARD, Hook.REDUCED, Hook.GATHERED, Hook.UNDO_SAVED),
        (Hook.UPDATED, Hook.CHECKPOINT_WRITTEN, Hook.FLIPPED),
    ],
    ids=str,
)
def test_an_error_leaves_every_process_alive_and_costs_nothing(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hooks: Sequence[Hook],
) -> None:
    blows = [Blow(hook, 1, Action.RAISE, number) for number, hook in enumerate(hooks, 1)]

    weights, fleet = train(zygote, tmp_path, 2, 2, blows)

    assert weights == undisturbed
    assert all(len(pids) == 1 for pids in fleet.pids().values())


def test_a_device_without_memory_left_is_reported_and_costs_nothing(
    zygote: Zygote, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    hooks = {
        Hook.FORWARD: "forward",
        Hook.RECOMPUTE: "recompute",
        Hook.BACKWARD: "backward",
        Hook.UNDO_SAVED: "update",
    }
    blows = [Blow(hook, 0, Action.OUT_OF_MEMORY, number) for number, hook in enumerate(hooks, 1)]

    weights, fleet = train(zygote, tmp_path, 2, 1, blows)

    assert weights == undisturbed
    assert all(len(pids) == 1 for pids in fleet.pids().values())
    found = [r for _, r in fleet.history if isinstance(r, messages.OutOfMemory)]
    assert [(one.during, one.microbatch_size) for one in found] == [
        (during, 2) for during in hooks.values()
    ]
    assert {one.requested_bytes for one in found} == {1.5 * 2**30}
    assert {one.section for one in found} <= {0, 1}
