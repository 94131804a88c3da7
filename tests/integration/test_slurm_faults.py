"""A Slurm whose controller is away, whose administrator ends jobs, whose jobs reach limits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.slurm import WHY_NO_SLURM, Slurm, a_slurm
from tests.integration.jobs import Job, trained_on, trains, until, weights
from tests.integration.slurm_jobs import slurm_job
from tests.integration.undisturbed import undisturbed
from tests.view import View

from spottrain.varuna_manager.core.model.records import Interruption
from spottrain.varuna_manager.core.model.state import State

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NO_SLURM), reason=WHY_NO_SLURM),
]


PACE_S = 2.0
"""Time for a loss: so that a job is not over before all has happened to it."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with a_slurm(tmp_path_factory.mktemp("slurm-faults") / "cluster") as cluster:
        yield cluster


def two_train(state: State) -> set[str]:
    """Return the VMs on which the job trains if they are two, else none."""
    vms = trained_on(state)
    return vms if len(vms) == 2 else set()


def follows(state: State, step: int, vms: set[str]) -> bool:
    """Return whether some VMs train, and have come further than a step."""
    return trained_on(state) == vms and trains(state) > step


def silent(state: State) -> set[str]:
    """Return the VMs that are not heard of."""
    return {k for k, vm in View(state).vms.items() if vm.silent_since_s is not None}


def leaving(state: State) -> set[str]:
    """Return the VMs whose end has been announced."""
    return {k for k, vm in View(state).vms.items() if vm.leaves_at_s is not None}


def number(vm_id: str) -> str:
    return vm_id.removeprefix("slurm.")


def ran(cluster: Slurm, vm_id: str) -> str:
    """Return how long a VM has run, as Slurm tells: minutes and seconds."""
    return cluster.ask("squeue", "-h", "-j", number(vm_id), "-o", "%M").strip()


def kills(state: State) -> list[Interruption]:
    """Return the VMs that were lost without a notice."""
    return [one for one in state.history.interruptions if one.interruption == "kill"]


def listed(cluster: Slurm) -> set[str]:
    """Return the VMs that Slurm has."""
    return {f"slurm.{one}" for one in cluster.jobs()}


def until_told(job: Job, words: str) -> None:
    until(words, lambda: words in job.dir.log.read_text())


def ends_undisturbed(job: Job, factory: pytest.TempPathFactory, cluster: Slurm) -> State:
    """Let a job train to its end; return that."""
    job.pace(0.0)
    until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
    end = job.state()
    assert end.outcome is not None
    assert end.outcome.kind == "succeeded", end.outcome
    assert weights(job.checkpoint_root) == undisturbed(factory).weights
    assert cluster.jobs() == []
    return end


def test_while_the_controller_is_away_a_job_trains_and_then_launches_resume(
    cluster: Slurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with slurm_job(tmp_path, cluster) as job:
        job.pace(PACE_S)
        launched = job.launch("--detach")
        assert launched.code == 0, launched.err
        first = job.until("two train", two_train)
        cluster.stop_controller()
        step = View(job.state()).step
        job.until("both train on", lambda s: follows(s, step + 5, first))
        lost = min(first)
        cluster.kill_job(number(lost))
        job.until("it is missed", lambda s: lost in silent(s))
        cluster.start_controller()
        both = job.until(
            "two train again", lambda s: two_train(s) if two_train(s) - first else None
        )
        until("nothing else is there", lambda: listed(cluster) == both)
        end = ends_undisturbed(job, tmp_path_factory, cluster)
        assert View(end).tally.vms_launched == 3


def test_ends_by_scancel_and_by_the_time_limit_are_told_and_made_good(
    cluster: Slurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ten hours before its limit a VM gives its state away, and has a successor."""
    with slurm_job(tmp_path, cluster, time_limit="24:00:00", notice_s=36000) as job:
        job.pace(PACE_S)
        launched = job.launch("--detach")
        assert launched.code == 0, launched.err
        first = job.until("two train", two_train)
        cancelled = min(first)
        cluster.ask("scancel", number(cancelled))
        second = job.until("a successor trains", lambda s: two_train(s) - first and two_train(s))

        (limited,) = first - {cancelled}
        cluster.ask("scontrol", "update", f"JobId={number(limited)}", "TimeLimit=9:00:00")
        job.until("its notice", lambda s: limited in leaving(s))
        known = first | second
        third = job.until("it is replaced", lambda s: two_train(s) - known and two_train(s))
        assert limited not in third
        until("it is given back", lambda: limited not in listed(cluster))

        late = min(third)
        until("a minute", lambda: not ran(cluster, late).startswith("0:"))
        cluster.ask("scontrol", "update", f"JobId={number(late)}", "TimeLimit=1")
        until_told(job, f"{cancelled}: cancelled with scancel, by its owner or an administrator")
        until_told(job, f"{late}: ended at its time limit")
        end = ends_undisturbed(job, tmp_path_factory, cluster)
        assert limited not in {one.vm_id for one in kills(end)}, "its state had moved"


DEADLY = """#!/bin/sh
PATH={path}
case "$*" in *--test-only*) exec sbatch "$@" ;; esac
moment=$(cat {order} 2>/dev/null)
rm -f {order}
[ "$moment" = before ] && exec kill -KILL $PPID
sbatch "$@" || exit
[ "$moment" = after ] && exec kill -KILL $PPID
exit 0
"""
"""An ``sbatch`` that kills who calls it, before or after Slurm has the job."""


def test_a_manager_killed_around_sbatch_leaves_no_double_and_no_orphan(
    cluster: Slurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with slurm_job(tmp_path, cluster) as job:
        order, programs = tmp_path / "order", tmp_path / "programs"
        programs.mkdir()
        deadly = programs / "sbatch"
        deadly.write_text(DEADLY.format(path=job.environment["PATH"], order=order))
        deadly.chmod(0o700)
        job.environment["PATH"] = f"{programs}:{job.environment['PATH']}"
        job.pace(PACE_S)
        for start, moment, left in ((job.launch, "before", 0), (job.resume, "after", 1)):
            order.write_text(moment)
            start("--detach")
            until("the manager dies", lambda: not order.exists() and not job.dir.is_managed())
            assert len(cluster.jobs()) == left
        assert job.resume("--detach").code == 0
        both = job.until("two train", two_train)
        assert listed(cluster) == both

        job.kill_manager()
        shutil.rmtree(job.dir.path)
        shown = job.run("gc", str(job.file), "-o", "json")
        assert {vm["vm_id"] for vm in shown.report["vms"]} == both
        assert listed(cluster) == both, "they are only shown"
        ended = job.run("gc", str(job.file), "--job", job.name, "--yes")
        assert ended.code == 0, ended.err
        assert cluster.jobs() == []
        assert list(job.folder.glob("shared/*")) == []
