"""Settings of a Kubernetes cluster, and of the pods that are VMs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spottrain.cloud.port.settings import SlotSettings

INSTANCE_TYPE = "pod"
"""Name of the type of all pods in offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings(SlotSettings):
    """Settings of the pods; all are alike. Without a price, that of the nodes' types counts."""

    context: str = ""
    """Of the kubeconfig; empty: the current one, or the cluster that this process is in."""
    namespace: str = "default"
    image: str = ""
    pull_secrets: tuple[str, ...] = ()
    service_account: str = ""
    priority_class: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of the pods."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    requests: Mapping[str, str] = field(default_factory=dict)
    """Resources of a pod by name, such as ``nvidia.com/gpu``; also its limits."""
    shared_memory: str = ""
    """Limit of ``/dev/shm``, as Kubernetes writes quantities; empty: the pod's memory."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Persistent volume claims, by the folder at which they are mounted."""
    grace_s: int = 60
    """How long a pod may give its state away once it is told to end."""
    python: str = "python3"
    address: str = ""
    """Of this machine for pods; empty: pods are reached by port-forward."""
