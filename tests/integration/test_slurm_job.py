"""examples/slurm.yaml on a real Slurm: preempted, queued, its node lost, trained to its end all
the same. Its model is that of other tests, which know the weights it must end with, and its
folders are the test's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.fakes.slurm import WHY_NO_SLURM, Slurm, a_slurm
from tests.integration.jobs import STEPS, Answer, Job, trained_on, trains, until, weights
from tests.integration.slurm_jobs import slurm_job
from tests.integration.undisturbed import undisturbed
from tests.view import View

from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import State, queued

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm.yaml"
MINE = ("entrypoint", "minibatch_size", "microbatch_size", "steps", "profile")
"""What the job must have in common with that to which nothing happens."""
pytestmark = pytest.mark.skipif(bool(WHY_NO_SLURM), reason=WHY_NO_SLURM)


@dataclass
class Story:
    """What came of the job."""

    job: Job
    cluster: Slurm
    launched: Answer
    preempted: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    status: Answer | None = None
    lost: str = ""
    end: State | None = None
    left: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("slurm-job")
    with a_slurm(folder / "cluster") as cluster, slurm_job(folder, cluster) as job:
        yield lived_through(job, cluster)


def launched(job: Job) -> Answer:
    """Launch the example, with what the test's job has others for."""
    mine = {key: job.settings[key] for key in MINE}
    mine |= {"workdir": str(job.folder / "workdir"), "checkpoint.path": job.checkpoint_root}
    mine |= {f"slurm.{key}": job.settings["slurm"][key] for key in ("python", "folder", "scratch")}
    options = [option for key, value in mine.items() for option in ("--set", f"{key}={value}")]
    paced = ("--env", f"PACE_FILE={job.settings['env']['PACE_FILE']}")
    return job.run("launch", str(EXAMPLE), *options, *paced, "--detach")


def lived_through(job: Job, cluster: Slurm) -> Story:
    job.pace(0.3)  # so that the job is not over before all has happened to it
    others = cluster.occupy("urgent")
    story = Story(job, cluster, launched(job))
    assert story.launched.code == 0, story.launched.err
    first = job.until("three nodes are ready", ready)

    urgent = cluster.occupy("urgent", nodes=2)  # of the three at least one of two that train
    story.preempted = job.until("two notices", lambda s: leaving(s, 2))
    story.waiting = job.until("a successor queues", lambda s: queued(s).keys() - first)
    story.status = job.run("status", job.name, "-o", "json")
    job.until("another trains", lambda s: trained_on(s) and not trained_on(s) & story.preempted)
    cluster.ask("scancel", urgent, others)
    second = job.until("three are ready again", lambda s: ready(s) if ready(s) - first else None)

    story.lost, node = job.until("they train", lambda s: running(cluster, trained_on(s)))
    cluster.kill_node(node)
    job.until("its successor is ready", lambda s: ready(s) - first - second)
    job.pace(0.0)
    until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
    story.end = job.state()
    story.left = [*cluster.jobs(), *(path.name for path in job.folder.glob("shared/*"))]
    return story


def ready(state: State) -> set[str]:
    """Return the VMs that are ready if they are three and some of them train, else none."""
    vms = {k for k, vm in View(state).vms.items() if vm.phase is VmPhase.READY}
    return vms if len(vms) == 3 and trains(state) else set()


def leaving(state: State, count: int) -> set[str]:
    """Return the VMs that will be preempted if they are so many, else none."""
    vms = {k for k, vm in View(state).vms.items() if vm.leaves_at_s is not None}
    return vms if len(vms) == count else set()


def running(cluster: Slurm, vms: set[str]) -> tuple[str, str] | None:
    """Return one of some VMs that runs now, and its node, if it is not alone."""
    nodes = dict(
        line.split() for line in cluster.ask("squeue", "-h", "-t", "R", "-o", "%i %N").splitlines()
    )
    found = [(vm, nodes.get(vm.removeprefix("slurm."), "")) for vm in sorted(vms)]
    return found[0] if len(found) > 1 and found[0][1] else None


def test_it_trains_to_its_end_bit_for_bit(
    story: Story, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert story.end is not None
    assert story.end.outcome is not None
    assert story.end.outcome.kind == "succeeded", story.end.outcome
    assert story.job.checkpoints()[0].step == STEPS
    assert weights(story.job.checkpoint_root) == undisturbed(tmp_path_factory).weights


def test_preempted_nodes_give_their_state_away_in_time(story: Story) -> None:
    assert len(story.preempted) == 2
    assert story.end is not None
    assert View(story.end).tally.preemptions_noticed == 2


def test_a_successor_is_shown_as_queued_until_it_starts(story: Story) -> None:
    assert story.status is not None
    assert story.waiting <= story.status.report["queued"].keys()


def test_a_lost_node_is_replaced(story: Story) -> None:
    assert story.end is not None
    assert View(story.end).tally.preemptions_unnoticed == 1


def test_nothing_is_left_on_the_cluster(story: Story) -> None:
    assert story.left == []
