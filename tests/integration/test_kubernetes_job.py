"""A job in pods: evicted with notice, a node lost, one that waits; trained to its end all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.fakes.kubernetes import FakeCluster, a_cluster
from tests.integration.jobs import STEPS, Answer, Job, trained_on, trains, until, weights
from tests.integration.kubernetes_jobs import kubernetes_job
from tests.integration.undisturbed import undisturbed
from tests.view import View

from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import State, queued

pytestmark = pytest.mark.rotated(parts=[5])


@dataclass
class Story:
    """What came of the job."""

    job: Job
    cluster: FakeCluster
    checked: Answer
    launched: Answer
    evicted: str = ""
    waiting: set[str] = field(default_factory=set)
    status: Answer | None = None
    end: State | None = None
    left: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("kubernetes-job")
    with a_cluster(folder / "cluster") as cluster, kubernetes_job(folder, cluster) as job:
        yield lived_through(job, cluster)


def lived_through(job: Job, cluster: FakeCluster) -> Story:
    """Two pods on three nodes of which one is lost, so that its successor waits."""
    job.pace(0.3)  # so that the job is not over before all has happened to it
    checked = job.run("doctor", str(job.file))
    story = Story(job, cluster, checked, job.launch("--detach"))
    assert story.launched.code == 0, story.launched.err
    first = job.until("two pods are ready", ready)

    story.evicted = min(first)
    cluster.evict(pod_of(story.evicted))
    second = job.until(
        "another trains for it", lambda s: ready(s) if story.evicted not in ready(s) else None
    )

    lost = cluster.pods[pod_of(min(second & first))]
    node = lost.object["spec"]["nodeName"]
    cluster.taint(next(n for n in cluster.nodes if not cluster.is_used(n)), "busy")
    cluster.lose_node(node)
    cluster.give_up_on(node)
    story.waiting = job.until("its successor waits for a node", lambda s: set(queued(s)))
    story.status = job.run("status", job.name, "-o", "json")
    cluster.remove_node(node)
    cluster.add_node("n4")
    job.until("two train again", lambda s: ready(s) if ready(s) - first - second else None)
    job.pace(0.0)
    until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
    story.end = job.state()
    story.left = sorted(cluster.pods)
    return story


def pod_of(vm_id: str) -> str:
    return vm_id.removeprefix("kubernetes.")


def ready(state: State) -> set[str]:
    """Return the VMs that are ready if they are two and some of them train, else none."""
    vms = {k for k, vm in View(state).vms.items() if vm.phase is VmPhase.READY}
    return vms if len(vms) == 2 and trains(state) and trained_on(state) <= vms else set()


def test_it_trains_to_its_end_bit_for_bit(
    story: Story, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert story.end is not None
    assert story.end.outcome is not None
    assert story.end.outcome.kind == "succeeded", story.end.outcome
    assert story.job.checkpoints()[0].step == STEPS
    assert weights(story.job.checkpoint_root) == undisturbed(tmp_path_factory).weights


def test_doctor_asked_the_cluster_whether_it_would_take_the_pods(story: Story) -> None:
    assert story.checked.code == 0, story.checked.err
    assert "namespace training takes them" in story.checked.out


def test_an_evicted_pod_gives_its_state_away_in_time(story: Story) -> None:
    assert story.end is not None
    assert View(story.end).tally.preemptions_noticed == 1


def test_a_lost_node_is_replaced(story: Story) -> None:
    assert story.end is not None
    assert View(story.end).tally.preemptions_unnoticed == 1


def test_what_finds_no_node_is_shown_as_queued_with_the_schedulers_reason(story: Story) -> None:
    assert story.status is not None
    assert story.waiting <= story.status.report["queued"].keys()
    assert "nodes are available" in story.status.out


def test_nothing_is_left_in_the_cluster(story: Story) -> None:
    assert story.left == []
