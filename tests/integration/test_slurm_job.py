"""examples/slurm.yaml on a real Slurm: preempted, queued, its node lost, trained to its end all
the same. Its model is that of other tests, which know the weights it must end with, and its
folders are the test's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.slurm import WHY_NO_SLURM, Slurm, a_slurm
from tests.integration.cluster_stories import (
    Story,
    ready,
    test_a_lost_node_is_replaced,
    test_a_successor_is_shown_as_queued_until_it_starts,
    test_it_trains_to_its_end_bit_for_bit,
    test_nothing_is_left_on_the_cluster,
    test_those_that_are_told_of_their_end_give_their_state_away_in_time,
)
from tests.integration.jobs import Answer, Job, trained_on
from tests.integration.slurm_jobs import slurm_job
from tests.view import View

from spottrain.varuna_manager.core.model.state import State, queued

__all__ = (
    "test_a_lost_node_is_replaced",
    "test_a_successor_is_shown_as_queued_until_it_starts",
    "test_it_trains_to_its_end_bit_for_bit",
    "test_nothing_is_left_on_the_cluster",
    "test_those_that_are_told_of_their_end_give_their_state_away_in_time",
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm.yaml"
MINE = ("entrypoint", "minibatch_size", "microbatch_size", "steps", "profile")
"""What the job must have in common with that to which nothing happens."""
pytestmark = [
    pytest.mark.rotated(parts=[2]),
    pytest.mark.skipif(bool(WHY_NO_SLURM), reason=WHY_NO_SLURM),
]


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
    story = Story(job, launched(job), noticed=2)
    assert story.launched.code == 0, story.launched.err
    first = job.until("three nodes are ready", lambda s: ready(s, 3))

    urgent = cluster.occupy("urgent", nodes=2)  # of the three at least one of two that train
    preempted = job.until("two notices", lambda s: leaving(s, 2))
    story.waiting = job.until("a successor queues", lambda s: queued(s).keys() - first)
    story.status = job.run("status", job.name, "-o", "json")
    job.until("another trains", lambda s: trained_on(s) and not trained_on(s) & preempted)
    cluster.ask("scancel", urgent, others)
    second = job.until("three are ready again", lambda s: ready(s, 3) - first and ready(s, 3))

    _, node = job.until("they train", lambda s: running(cluster, trained_on(s)))
    cluster.kill_node(node)
    job.until("its successor is ready", lambda s: ready(s, 3) - first - second)
    story.goes_to_its_end(
        lambda: [*cluster.jobs(), *(path.name for path in job.folder.glob("shared/*"))]
    )
    return story


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
