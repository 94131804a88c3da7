"""Loader processes: the same bits as without, and none of them is left over."""

from __future__ import annotations

import functools
import os
import select
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.fleet import (
    Fleet,
    FleetError,
    Zygote,
    make_plan,
    read_weights,
)
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.wire import messages
from spottrain.wire.messages import EvaluationSpec, JobSpec
from spottrain.wire.model import LoaderSpec

STEPS = 6


def spec_of(folder: Path, workers: int | None) -> JobSpec:
    folder.mkdir(exist_ok=True)
    return replace(
        job_spec(folder, steps=STEPS, entrypoint="loader_jobs:job"),
        loader=LoaderSpec(workers=workers, ahead=3),
        evaluation=EvaluationSpec(every_steps=2),
    )


def start(spec: JobSpec, folder: Path, names: str, zygote: Zygote, loss_s: float = 0.01) -> Fleet:
    environment = {"LOADER_FOLDER": str(folder), "TINY_SLEEP_S": str(loss_s)}
    return Fleet(spec, names, folder / "log", zygote, environment)


def losses(fleet: Fleet) -> dict[object, float]:
    steps: dict[object, float] = {
        r.step: r.loss for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted)
    }
    sets: dict[object, float] = {
        (r.step, r.name): r.loss for _, r in fleet.history if isinstance(r, messages.Evaluated)
    }
    return {**steps, **sets}


def makers(folder: Path, length: str = "*") -> set[int]:
    """Return who has made examples, of all sets or of the one of that length."""
    found = folder.glob(f"made-{length}-*")
    return {int(path.name.rpartition("-")[2]) for path in found}


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()}


@pytest.fixture(scope="module")
def without(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], dict[object, float]]:
    folder = tmp_path_factory.mktemp("without")
    spec = spec_of(folder, workers=0)
    with start(spec, folder, "a", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        weights = fleet.train(lambda _: plan, fleet.initialise())
        (pid,) = fleet.pids()["a", 0]
        assert makers(folder) >= {pid}
    return weights, losses(fleet)


def test_the_same_bits_over_a_morph_with_loaders_that_die(
    zygote: Zygote,
    tmp_path: Path,
    without: tuple[dict[str, bytes], dict[object, float]],
) -> None:
    spec = spec_of(tmp_path, workers=2)
    for index in (3, 17, 30):
        (tmp_path / f"kill-{index}").touch()
    with start(spec, tmp_path, "ab", zygote, loss_s=0.2) as fleet:
        fleet.ready()
        deep = make_plan(spec, 2, 1, "ab", NUM_SECTIONS)
        checkpoint = fleet.initialise()
        fleet.run(deep, checkpoint)
        fleet.wait_for_step(2)
        fleet.stop()
        assert not fleet.wait_for_end({"a", "b"})
        wide = make_plan(spec, 1, 2, "ab", NUM_SECTIONS)
        fleet.run(wide, checkpoint)
        assert fleet.wait_for_end({"a", "b"})

        workers = {pid for pids in fleet.pids().values() for pid in pids}
        made = makers(tmp_path)
        assert not list(tmp_path.glob("kill-*"))
        assert not alive(made) & workers
        assert len(alive(made)) <= 2 * 2
        pidfds = [os.pidfd_open(pid) for pid in alive(made)]
        for machine in fleet.machines.values():
            machine.send(messages.Retire())
        for pidfd in pidfds:
            wait_for_end(pidfd)
    assert read_weights(Path(spec.checkpoint_path)) == without[0]
    assert losses(fleet) == without[1]
    assert "was killed by SIGKILL" in (tmp_path / "log").read_text()


def test_loaders_end_with_their_worker(zygote: Zygote, tmp_path: Path) -> None:
    spec = replace(spec_of(tmp_path, workers=2), steps=1000)
    with start(spec, tmp_path, "a", zygote) as fleet:
        fleet.ready()
        fleet.run(make_plan(spec, 1, 1, "a", NUM_SECTIONS), fleet.initialise())
        fleet.wait_for_step(2)
        (worker,) = fleet.pids()["a", 0]
        loaders = alive(makers(tmp_path)) - {worker}
        assert len(loaders) == 2
        pidfds = [os.pidfd_open(pid) for pid in loaders]
        fleet.machines["a"].send(messages.AbandonGeneration(generation=1))
        fleet.wait_for("death", lambda _, r: isinstance(r, messages.WorkerDied) or None)
        for pidfd in pidfds:
            wait_for_end(pidfd)


def wait_for_end(pidfd: int) -> None:
    """Wait until a process that is not our child has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(60_000)
    os.close(pidfd)


@pytest.mark.rotated
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_example_is_told_with_the_users_traceback(
    zygote: Zygote, tmp_path: Path, workers: int
) -> None:
    (tmp_path / "raise").touch()
    spec = spec_of(tmp_path, workers)
    with start(spec, tmp_path, "a", zygote) as fleet:
        fleet.ready()
        fleet.run(make_plan(spec, 1, 1, "a", NUM_SECTIONS), fleet.initialise())
        with pytest.raises(FleetError) as caught:
            fleet.wait_for_end({"a"})

    assert "raised ValueError: example 7 is bad" in str(caught.value)
    assert "loader_jobs.py" in str(caught.value)


@pytest.mark.rotated
@pytest.mark.parametrize("entrypoint", ["unread_job", "uneven_job"])
def test_stages_that_use_no_value_of_the_batch_fetch_no_examples(
    zygote: Zygote, tmp_path: Path, entrypoint: str
) -> None:
    results = []
    for depth in (1, 4):
        folder, names = tmp_path / str(depth), "abcd"[:depth]
        spec = spec_of(folder, workers=0)
        spec = replace(spec, entrypoint=f"loader_jobs:{entrypoint}")
        with start(spec, folder, names, zygote) as fleet:
            fleet.ready()
            plan = make_plan(spec, depth, 1, names, NUM_SECTIONS)
            choose = functools.partial(lambda plan, _: plan, plan)
            weights = fleet.train(choose, fleet.initialise())
            workers = [fleet.pids()[name, 0] for name in names]
        results.append((weights, losses(fleet)))
    assert results[0] == results[1]
    if entrypoint == "unread_job":
        for length in ("50", "40", "7"):  # of training, and of evaluations
            assert makers(tmp_path / "4", length) == workers[0] | workers[3]
    else:  # whatever shapes come
        for length in ("50", "40"):
            assert makers(tmp_path / "4", length) == set().union(*workers)
