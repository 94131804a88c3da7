"""What is asked of the API server, and what it tells of pods."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_launch, an_offer
from tests.fakes.kubernetes_rules import admit

from spottrain.cloud.kubernetes import pods
from spottrain.cloud.kubernetes.settings import KubernetesSettings
from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import VmState

SETTINGS = KubernetesSettings(
    image="registry.example/torch",
    pull_secrets=("registry",),
    service_account="trainer",
    priority_class="low",
    labels={"team": "vision"},
    node_selector={"cloud.google.com/gke-spot": "true"},
    tolerations=({"key": "spot", "operator": "Exists"}, {"key": "a", "value": "b"}),
    requests={"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2"},
    shared_memory="8Gi",
    volumes={"/data": "corpus", "/checkpoints": "work"},
    slot_memory_bytes=1,
)
REQUEST = a_launch(an_offer(usd_per_hour=0.1 + 0.2), 1, token="t", job="job", intent="i-1")
NOW = 1_800_000_000.0
"""2027-01-15T08:00:00Z"""


def a_manifest(settings: KubernetesSettings = SETTINGS) -> dict[str, Any]:
    return pods.manifest(settings, pods.name_of("uid", "t", 0), REQUEST, "uid", "me", 60.0)


def parsed(**changed: Any) -> pods.Pod | None:
    """Return the pod that ``a_manifest`` has become."""
    item = a_manifest()
    item["metadata"] |= changed.pop("metadata", {})
    item["spec"] |= {"nodeName": changed.pop("node", "n1")}
    found = pods.parse_pods([{**item, "status": changed}], NOW)
    return found[0] if found else None


def container(state: str, **what: Any) -> list[dict[str, Any]]:
    return [{"name": "agent", "state": {state: what}}]


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, KubernetesSettings(image="torch", slot_memory_bytes=1)],
    ids=["all settings", "none"],
)
def test_a_pod_fits_the_published_schemas(settings: KubernetesSettings) -> None:
    admit(a_manifest(settings))


def test_a_pod_is_not_privileged_and_gets_no_token_unless_it_is_to() -> None:
    spec = a_manifest(replace(SETTINGS, service_account=""))["spec"]
    (found,) = spec["containers"]
    assert found["securityContext"] == {"allowPrivilegeEscalation": False, "privileged": False}
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()


def test_a_pods_arguments_are_far_from_what_the_kernel_takes() -> None:
    (found,) = a_manifest()["spec"]["containers"]
    assert max(len(argument) for argument in found["command"]) < 128 * 1024 // 4


def test_a_repeated_launch_has_the_same_names_and_another_has_others() -> None:
    names = {pods.name_of(uid, token, n) for uid in "ab" for token in "xy" for n in range(3)}
    assert len(names) == 12
    assert pods.name_of("a", "x", 0) in names


@given(st.text(st.characters(codec="utf-8")), st.floats(0, 1e4))
def test_marks_survive_whatever_the_intent_and_the_price(intent: str, usd: float) -> None:
    request = replace(REQUEST, intent=intent, offer=an_offer(usd_per_hour=usd))
    item = pods.manifest(SETTINGS, "name", request, "uid", "me", 60.0)
    (pod,) = pods.parse_pods([json.loads(json.dumps(item))], NOW)
    assert (pod.tags[tags.INTENT], float(pod.tags[tags.PRICE])) == (intent, usd)


@pytest.mark.parametrize(
    ("changed", "state", "why"),
    [
        ({"node": ""}, VmState.QUEUED, "not considered by the scheduler yet"),
        ({"phase": "Pending"}, VmState.STARTING, ""),
        (
            {"phase": "Pending", "containerStatuses": container("waiting", reason="ErrImagePull")},
            VmState.STARTING,
            "ErrImagePull",
        ),
        (
            {"phase": "Running", "containerStatuses": container("running")},
            VmState.RUNNING,
            "",
        ),
        (
            {"phase": "Succeeded", "containerStatuses": container("terminated", exitCode=0)},
            VmState.TERMINATED,
            "",
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": container("terminated", exitCode=7, message="a\nlast words\n"),
            },
            VmState.TERMINATED,
            "its program ended with 7: last words",
        ),
        (
            {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no GPU"},
            VmState.TERMINATED,
            "refused by its node (UnexpectedAdmissionError): no GPU",
        ),
    ],
)
def test_states_of_pods_are_states_of_vms(
    changed: dict[str, Any], state: VmState, why: str
) -> None:
    pod = parsed(**changed)
    assert pod is not None
    assert (pod.state, pod.why) == (state, why)


@pytest.mark.parametrize(
    ("grace_s", "at", "state"),
    [
        (60, "2027-01-15T08:00:30Z", VmState.RUNNING),
        (60, "2027-01-15T07:59:45Z", VmState.RUNNING),  # clocks differ
        (60, "2027-01-15T07:59:00Z", VmState.STOPPING),
        (1, "2027-01-15T08:00:01Z", VmState.STOPPING),
    ],
)
def test_a_pod_that_is_to_end_runs_until_its_grace_period_is_over(
    grace_s: int, at: str, state: VmState
) -> None:
    deleted = {"deletionTimestamp": at, "deletionGracePeriodSeconds": grace_s}
    running = container("running")
    pod = parsed(metadata=deleted, phase="Running", containerStatuses=running)
    assert pod is not None
    assert (pod.state, pod.is_deleted) == (state, True)


def test_one_that_was_withdrawn_while_it_waited_never_was_a_vm() -> None:
    deleted = {"deletionTimestamp": "2027-01-15T08:00:01Z", "deletionGracePeriodSeconds": 1}
    assert parsed(metadata=deleted, node="") is None


def test_pods_of_others_are_none_of_ours() -> None:
    item = {"metadata": {"name": "x", "labels": {tags.UID: "uid"}}, "spec": {}}
    assert pods.parse_pods([item], NOW) == []


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "InvalidImageName"])
def test_what_only_people_can_mend_is_told_apart_from_what_may_pass(reason: str) -> None:
    pod = parsed(phase="Pending", containerStatuses=container("waiting", reason=reason))
    passing = parsed(phase="Pending", containerStatuses=container("waiting", reason="ErrImagePull"))
    assert pod is not None
    assert passing is not None
    assert (pod.is_stuck, passing.is_stuck) == (True, False)


def test_nodes_tell_what_they_are_and_whether_they_will_go() -> None:
    labels = {
        "node.kubernetes.io/instance-type": "p4d.24xlarge",
        "topology.kubernetes.io/region": "us-east-1",
        "karpenter.sh/capacity-type": "spot",
    }
    item = {
        "metadata": {"name": "n", "labels": labels},
        "spec": {
            "providerID": "aws:///us-east-1a/i-1",
            "taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}],
        },
    }
    (node,) = pods.parse_nodes([item])
    assert (node.cloud, node.region, node.instance_type) == ("aws", "us-east-1", "p4d.24xlarge")
    assert (node.is_spot, node.leaves, node.is_lost) == (True, True, False)
