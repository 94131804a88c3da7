"""A job in pods: evicted with notice, a node lost, one that waits; trained to its end all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.kubernetes import FakeCluster, a_cluster
from tests.integration.cluster_stories import (
    Story,
    ready,
    test_a_lost_node_is_replaced,
    test_a_successor_is_shown_as_queued_until_it_starts,
    test_it_trains_to_its_end_bit_for_bit,
    test_nothing_is_left_on_the_cluster,
    test_those_that_are_told_of_their_end_give_their_state_away_in_time,
)
from tests.integration.jobs import Job
from tests.integration.kubernetes_jobs import kubernetes_job

from spottrain.varuna_manager.core.model.state import queued

__all__ = (
    "test_a_lost_node_is_replaced",
    "test_a_successor_is_shown_as_queued_until_it_starts",
    "test_it_trains_to_its_end_bit_for_bit",
    "test_nothing_is_left_on_the_cluster",
    "test_those_that_are_told_of_their_end_give_their_state_away_in_time",
)
pytestmark = pytest.mark.rotated(parts=[5])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("kubernetes-job")
    with a_cluster(folder / "cluster") as cluster, kubernetes_job(folder, cluster) as job:
        yield lived_through(job, cluster)


def lived_through(job: Job, cluster: FakeCluster) -> Story:
    """Two pods on three nodes of which one is lost, so that its successor waits."""
    job.pace(0.3)  # so that the job is not over before all has happened to it
    checked = job.run("doctor", str(job.file))
    assert checked.code == 0, checked.err
    assert "namespace training takes them" in checked.out
    story = Story(job, job.launch("--detach"), noticed=1)
    assert story.launched.code == 0, story.launched.err
    first = job.until("two pods are ready", lambda s: ready(s, 2))

    evicted = min(first)
    cluster.evict(pod_of(evicted))
    second = job.until(
        "another trains for it", lambda s: ready(s, 2) if evicted not in ready(s, 2) else None
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
    job.until("two train again", lambda s: ready(s, 2) - first - second)
    story.goes_to_its_end(lambda: sorted(cluster.pods))
    return story


def pod_of(vm_id: str) -> str:
    return vm_id.removeprefix("kubernetes.")


def test_what_finds_no_node_is_shown_with_the_schedulers_reason(story: Story) -> None:
    assert story.status is not None
    assert "nodes are available" in story.status.out
