"""Pods and nodes as the API writes them, as plain functions; field names are its own."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spottrain.cloud.clusters import Allocation
from spottrain.cloud.kubernetes import on_pod
from spottrain.cloud.kubernetes.settings import KubernetesSettings
from spottrain.cloud.notices.file import VARIABLE
from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import LaunchRequest, VmState
from spottrain.cloud.ssh.on_vm import host_agent

Json = Mapping[str, Any]
CONTAINER = "agent"
_FOLDER = "/spottrain"
_LOST_S = 30
"""A pod leaves a node that does not answer after this time; by default Kubernetes waits 300 s
(kubernetes.io, "Taints and Tolerations", Taint based Evictions)."""
NOW_S = 1
"""Grace period of pods that we end, as of ``kubectl delete --now``."""
_CLOCKS_S = 30.0
"""How far clocks may differ."""
_LOADER = """
import base64, json, sys, types, zlib
if sys.version_info < (3, 11):
    sys.exit("the image has Python %d.%d, spottrain needs 3.11" % sys.version_info[:2])
for name, source in json.loads(zlib.decompress(base64.b64decode(sys.argv[1]))).items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main(json.loads(sys.argv[2]))
"""
MANAGER = "spottrain-manager"
"""Label of the pod of a manager: the unique id of its job."""
BEGIN = "begin"
"""The program of a manager's pod, in its folder, once it is there."""
_AWAIT = f"""
left=1800 begin="${on_pod.FOLDER_VARIABLE}/{BEGIN}"
until [ -x "$begin" ]; do sleep 1; left=$((left - 1)); [ $left -gt 0 ] || exit 0; done
exec "$begin"
"""
"""A pod that is brought nothing ends by itself."""
_LEAVING = frozenset(
    {
        # cluster-autoscaler, FAQ: "How does scale-down work?"
        "ToBeDeletedByClusterAutoscaler",
        # GKE: "Spot VMs", Termination and graceful shutdown
        "cloud.google.com/impending-node-termination",
        # AKS: "Node auto-drain"
        "remediator.kubernetes.azure.com/unschedulable",
        # aws-node-termination-handler: "Spot Instance Termination Notice"
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        # Karpenter: "Disruption", Termination Controller
        "karpenter.sh/disrupted",
        # kubernetes.io: "Well-Known Labels, Annotations and Taints"
        "node.cloudprovider.kubernetes.io/shutdown",
        "node.kubernetes.io/out-of-service",
    }
)
"""Taints of nodes that will be taken away."""
_SPOT_LABELS = {
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
}
_CLOUDS = {"gce": "gcp", "aws": "aws", "azure": "azure"}
"""Our clouds' names, by what ``Node.spec.providerID`` begins with."""
_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted for a pod of higher priority",
    "DeletionByTaintManager": "its node does not answer, or is being taken away",
    "EvictionByEvictionAPI": "evicted: its node is being drained",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "ended by its node, which shuts down or lacks resources",
}
"""kubernetes.io, "Disruptions", Pod disruption conditions."""
_REASONS = {
    "DeadlineExceeded": "ended at its deadline",
    "Evicted": "evicted by its node",
    "NodeLost": "its node is lost",
    "NodeShutdown": "its node was shut down",
    "Preempting": "preempted on its node for a critical pod",
    "Terminated": "its node was shut down",
}
"""``Pod.status.reason``, as kubelets and controllers set it."""
_STUCK = frozenset(
    {
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
    }
)
"""Reasons for which containers wait, and which only people can remove."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod(Allocation):
    """A pod of ours, as the API server tells."""

    name: str
    is_deleted: bool
    """It is to end, and has its grace period for that."""


# --- What is asked for ------------------------------------------------------------------


def name_of(uid: str, token: str, number: int) -> str:
    """Return the name of a VM's pod: whoever repeats a launch finds the same pods."""
    return f"spottrain-{hashlib.sha256(f'{uid} {token} {number}'.encode()).hexdigest()[:20]}"


def manager_name_of(uid: str) -> str:
    """Return the name of the pod of a job's manager."""
    return f"spottrain-manager-{hashlib.sha256(uid.encode()).hexdigest()[:20]}"


def port_of(name: str) -> int:
    """Return a pod's port on its loopback, which is its node's with a host network."""
    return 20_000 + 2 * (int(hashlib.sha256(name.encode()).hexdigest(), 16) % 4_000)


def kubectl(settings: KubernetesSettings, *, terminal: bool) -> list[str]:
    """Return the beginning of the command line that runs something in a pod."""
    context = ["--context", settings.context] if settings.context else []
    how = "-it" if terminal else "-i"
    return ["kubectl", *context, "-n", settings.namespace, "exec", how]


def selector(uid: str | None) -> str:
    """Return the label selector of a job's pods; None: of all jobs."""
    return tags.UID if uid is None else f"{tags.UID}={uid}"


def manifest(
    settings: KubernetesSettings,
    name: str,
    request: LaunchRequest,
    uid: str,
    owner: str,
    unstarted_s: float,
) -> dict[str, Any]:
    """Return the pod of one VM.

    Args:
        settings: Of the job.
        name: By ``name_of``.
        uid: The job's unique id.
        owner: Who asks.
        unstarted_s: It ends if its agent is not started for so long.
    """
    given = {
        "vm_id": f"kubernetes.{name}",
        "port": port_of(name),
        "grace_s": settings.grace_s,
        "claim": {"owner": uid, "job": request.job, "intent": request.intent},
        "unstarted_s": unstarted_s,
    }
    marks = {
        tags.JOB: request.job,
        tags.UID: uid,
        tags.INTENT: request.intent,
        tags.OWNER: owner,
        tags.PRICE: repr(request.offer.usd_per_hour),
    }
    program = [settings.python, "-u", "-c", _LOADER, _program(), json.dumps(given)]
    return _made(settings, name, {tags.UID: uid, tags.JOB: request.job}, marks, program)


def manager_manifest(
    settings: KubernetesSettings, name: str, uid: str, job: str, owner: str
) -> dict[str, Any]:
    """Return the pod of a job's manager, which runs what it is brought.

    Its labels are others than those of VMs, so that it is not taken for one.

    Args:
        settings: Of the pod.
        name: By ``manager_name_of``.
        uid: The job's unique id.
        job: Its name.
        owner: Who asks.
    """
    marks = {tags.JOB: job, tags.UID: uid, tags.INTENT: tags.MANAGER, tags.OWNER: owner}
    program = ["/bin/sh", "-c", _AWAIT]
    made = _made(settings, name, {MANAGER: uid}, marks, program)
    made["spec"]["restartPolicy"] = "OnFailure"
    return made


def _made(
    settings: KubernetesSettings,
    name: str,
    labels: Mapping[str, str],
    marks: Mapping[str, str],
    program: Sequence[str],
) -> dict[str, Any]:
    memory = {"medium": "Memory"}
    if settings.shared_memory:
        memory["sizeLimit"] = settings.shared_memory
    volumes: list[dict[str, Any]] = [
        {"name": "own", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": memory},
    ]
    mounts = [
        {"name": "own", "mountPath": _FOLDER},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for number, (folder, claim) in enumerate(settings.volumes.items()):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": folder})
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": list(program),
        "env": [
            {"name": on_pod.FOLDER_VARIABLE, "value": _FOLDER},
            {"name": VARIABLE, "value": f"{_FOLDER}/notice.json"},
        ],
        "resources": {"requests": dict(settings.requests), "limits": dict(settings.requests)},
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "privileged": False},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: dict[str, Any] = {
        "containers": [container],
        "volumes": volumes,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_s,
        "automountServiceAccountToken": bool(settings.service_account),
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # the pause container reaps what workers leave
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [*map(dict, settings.tolerations), *_patience()],
        "imagePullSecrets": [{"name": secret} for secret in settings.pull_secrets],
    }
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    if settings.priority_class:
        spec["priorityClassName"] = settings.priority_class
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": {**settings.labels, **labels},
            "annotations": dict(marks),
        },
        "spec": spec,
    }


def _patience() -> list[dict[str, Any]]:
    names = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    common = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_S}
    return [{"key": name, **common} for name in names]


def _program() -> str:
    """Return the program of a pod, packed; the same each time."""
    sources = {
        module.__name__: Path(module.__file__ or "").read_text() for module in (host_agent, on_pod)
    }
    return base64.b64encode(zlib.compress(json.dumps(sources).encode(), 9)).decode()


# --- What is there ----------------------------------------------------------------------


def parse_pods(items: Sequence[Json], now_s: float) -> list[Pod]:
    """Return the pods that are VMs, oldest first.

    One that was withdrawn while it waited never was a VM.

    Args:
        now_s: Seconds since the epoch.
    """
    found = [_pod(item, now_s) for item in items]
    there = [pod for pod in found if pod is not None]
    return sorted(there, key=lambda pod: (pod.start_s or now_s, pod.name))


def _start_s(metadata: Json, status: Json, state: VmState) -> float:
    if state is VmState.QUEUED:
        return 0.0
    scheduled = _condition(status, "PodScheduled").get("lastTransitionTime")
    times = (status.get("startTime"), scheduled, metadata.get("creationTimestamp"))
    return next((at_s for at_s in map(_seconds, times) if at_s is not None), 0.0)


def _condition(status: Json, kind: str) -> Json:
    return next((one for one in status.get("conditions") or () if one["type"] == kind), {})


def _pod(item: Json, now_s: float) -> Pod | None:
    metadata, spec, status = item["metadata"], item["spec"], item.get("status", {})
    marks = metadata.get("annotations", {})
    if tags.JOB not in marks:
        return None
    node = spec.get("nodeName", "")
    container: Json = next(iter(status.get("containerStatuses") or ()), {})
    state = _state(metadata, node, status, container, now_s)
    if state is VmState.QUEUED and "deletionTimestamp" in metadata:
        return None
    ended = container.get("state", {}).get("terminated", {})
    end_s = None
    if state is VmState.TERMINATED:
        end_s = _seconds(ended.get("finishedAt")) or now_s
    waiting = container.get("state", {}).get("waiting", {})
    return Pod(
        vm_id=f"kubernetes.{metadata['name']}",
        name=metadata["name"],
        state=state,
        start_s=_start_s(metadata, status, state),
        end_s=end_s,
        why=_why(state, status, waiting, ended),
        is_deleted="deletionTimestamp" in metadata,
        is_stuck=state is VmState.STARTING and waiting.get("reason") in _STUCK,
        zone=metadata["namespace"],
        node=node,
        address=status.get("podIP", ""),
        owner=marks.get(tags.OWNER, ""),
        tags=marks,
    )


def _state(metadata: Json, node: str, status: Json, container: Json, now_s: float) -> VmState:
    phase = status.get("phase", "Pending")
    if phase in ("Succeeded", "Failed"):
        return VmState.TERMINATED
    if not node:
        return VmState.QUEUED
    runs = phase == "Running" and "running" in container.get("state", {})
    end_s = _seconds(metadata.get("deletionTimestamp"))
    if end_s is not None:
        # During its grace period it gives its state away.
        is_now = metadata.get("deletionGracePeriodSeconds", 0) <= NOW_S
        if is_now or not runs or now_s > end_s + _CLOCKS_S:
            return VmState.STOPPING
    return VmState.RUNNING if runs else VmState.STARTING


def _why(state: VmState, status: Json, waiting: Json, ended: Json) -> str:
    if state is VmState.QUEUED:
        message = _condition(status, "PodScheduled").get("message")
        return _line(message or "not considered by the scheduler yet")
    if state is VmState.STARTING:
        return _line(": ".join(filter(None, map(waiting.get, ("reason", "message")))))
    disruption = _condition(status, "DisruptionTarget")
    if disruption.get("status") == "True":
        cause: str = disruption.get("reason", "")
        return _DISRUPTIONS.get(cause, cause) if state is not VmState.RUNNING else ""
    if state is VmState.RUNNING:
        return ""
    if ended.get("reason") == "OOMKilled":
        return "killed: it used more memory than its limit"
    if reason := status.get("reason"):
        told = _REASONS.get(reason, f"refused by its node ({reason})")
        message = status.get("message", "")
        return _line(f"{told}: {message}" if message else told)
    if code := ended.get("exitCode"):
        last = (ended.get("message", "").strip().splitlines() or ["no message"])[-1]
        return _line(f"its program ended with {code}: {last}")
    return "" if state is VmState.TERMINATED else "its pod is being deleted"


def _line(text: str) -> str:
    """Return a message in one line, without its end if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}…"


def _seconds(text: str | None) -> float | None:
    """Return a time of the API's (RFC 3339) in seconds since the epoch."""
    if text is None:
        return None
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


# --- Nodes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster."""

    name: str
    leaves: bool
    """A taint says that it will be taken away."""
    is_lost: bool
    """A taint says that it does not answer."""
    cloud: str
    """Of ours, empty if it is none of them."""
    region: str
    instance_type: str
    is_spot: bool


def parse_nodes(items: Sequence[Json]) -> list[ClusterNode]:
    """Return the nodes in a list of the API's."""
    return [_node(item) for item in items]


def _node(item: Json) -> ClusterNode:
    labels, spec = item["metadata"].get("labels", {}), item.get("spec", {})
    provider = spec.get("providerID", "").partition(":")[0]
    taints = {taint["key"] for taint in spec.get("taints") or ()}
    return ClusterNode(
        name=item["metadata"]["name"],
        leaves=not taints.isdisjoint(_LEAVING),
        is_lost="node.kubernetes.io/unreachable" in taints,
        cloud=_CLOUDS.get(provider, ""),
        region=labels.get("topology.kubernetes.io/region", ""),
        instance_type=labels.get("node.kubernetes.io/instance-type", ""),
        is_spot=any(labels.get(name) == value for name, value in _SPOT_LABELS.items()),
    )
