"""The section of a job file about a Kubernetes cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from spottrain.cloud.kubernetes.settings import INSTANCE_TYPE, KubernetesSettings
from spottrain.cloud.local.market import ZoneSpec
from spottrain.storage.store import is_url
from spottrain.varuna_manager.config.base import Section
from spottrain.varuna_manager.config.slots import SlotSection

_LABEL = r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
Key = Annotated[str, Field(pattern=_LABEL)]
Value = Annotated[str, Field(pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$")]
Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Folder = Annotated[str, Field(pattern=r"^/[^:]+$")]


class TolerationConfig(Section):
    """A taint of nodes on which pods may be all the same."""

    key: Key
    """Key of the taint, such as `nvidia.com/gpu`."""
    value: Value | None = None
    """Its value; by default any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Its effect; by default any."""


class KubernetesConfig(SlotSection):
    """A Kubernetes cluster, for `provider: kubernetes`; see docs/clouds/kubernetes.md."""

    context: str = ""
    """Context of the kubeconfig; by default the current one, and within a pod its own
    service account."""
    namespace: Name = "default"
    """Namespace of the pods."""
    image: str | None = None
    """Image of the pods, with Python 3.11 or newer, torch, numpy and safetensors."""
    pull_secrets: tuple[Name, ...] = ()
    """Secrets with which the image is pulled."""
    service_account: Name | None = None
    """Service account of the pods, whose token they get; by default they get none."""
    priority_class: Name | None = None
    """Priority class of the pods; those of a higher one preempt them."""
    labels: dict[Key, Value] = Field(default_factory=dict)
    """Further labels of the pods, such as those of a queue or a cost centre."""
    node_selector: dict[Key, Value] = Field(default_factory=dict)
    """Labels that nodes must have, such as `cloud.google.com/gke-spot: "true"`."""
    manager_node_selector: dict[Key, Value] = Field(default_factory=dict)
    """Labels that nodes must have for the manager's pod of `launch --manager-vm`, which is not to
    be evicted; it tolerates no taints."""
    tolerations: tuple[TolerationConfig, ...] = ()
    """Taints of nodes on which pods may be all the same."""
    cpu: Quantity | None = None
    """CPU of a pod, request and limit; by default what the namespace says."""
    memory: Quantity | None = None
    """Memory of a pod with its /dev/shm, request and limit, such as `64Gi`; by default what
    the namespace says."""
    gpu_resource: Key = "nvidia.com/gpu"
    """Resource by which GPUs are asked for, one for each slot."""
    shared_memory: Quantity | None = None
    """Limit of /dev/shm; by default the pod's memory."""
    volumes: dict[Folder, Name] = Field(default_factory=dict)
    """Persistent volume claims by the folder at which they are mounted. All pods mount them
    at once: their access mode must be ReadWriteMany, or ReadOnlyMany for data."""
    grace_s: Annotated[int, Field(ge=2, le=86400)] = 60
    """Grace period of the pods: how long they may give their state away. Spot nodes of some
    clouds allow less."""
    python: str = Field(default="python3", min_length=1)
    """Python of the image."""
    address: str = ""
    """This machine's address for pods, if they reach it; by default they are reached by
    port-forward, and within the cluster by this pod's own address."""
    usd_per_gpu_hour: NonNegativeFloat = 0.0
    """Price of a slot per hour; budgets need one. By default by the instance types of the
    nodes, where they may be read and the catalogue has them."""

    @property
    def usd_per_hour(self) -> float:
        """Price of a VM, as far as the job file says it."""
        return self.usd_per_gpu_hour * self.slots

    def specs(self, max_vms: int) -> tuple[ZoneSpec, ...]:
        """Return the namespace, as a zone for planners.

        Args:
            max_vms: How many pods it may give.
        """
        return (self.spec(self.namespace, INSTANCE_TYPE, max_vms, self.usd_per_hour),)

    def settings(self, *, uses_gpus: bool = True) -> KubernetesSettings:
        """Return the settings for the provider.

        Args:
            uses_gpus: False: slots are CPU slots.
        """
        gpus = str(self.slots) if uses_gpus else None
        asked = {"cpu": self.cpu, "memory": self.memory, self.gpu_resource: gpus}
        return KubernetesSettings(
            context=self.context,
            namespace=self.namespace,
            image=self.image or "",
            pull_secrets=self.pull_secrets,
            service_account=self.service_account or "",
            priority_class=self.priority_class or "",
            labels=self.labels,
            node_selector=self.node_selector,
            tolerations=tuple(map(_toleration, self.tolerations)),
            requests={name: amount for name, amount in asked.items() if amount is not None},
            shared_memory=self.shared_memory or "",
            volumes=self.volumes,
            grace_s=self.grace_s,
            python=self.python,
            address=self.address,
            **self.slot_settings(uses_gpus=uses_gpus),
            usd_per_hour=self.usd_per_hour,
        )


def _toleration(one: TolerationConfig) -> dict[str, str]:
    matches = {"operator": "Exists"} if one.value is None else {"value": one.value}
    return {"key": one.key, **matches, **({"effect": one.effect} if one.effect else {})}


def check_kubernetes(
    kubernetes: KubernetesConfig, checkpoint_path: str | None, *, needs_price: bool
) -> None:
    """Check the rest of a job file with ``provider: kubernetes``.

    Args:
        kubernetes: Its section.
        checkpoint_path: Where checkpoints are to be; None: not said.
        needs_price: The job has a budget in dollars, or weighs throughput against them.

    Raises:
        ValueError: It is wrong.
    """
    if kubernetes.image is None:
        raise ValueError("resources.provider kubernetes needs kubernetes.image")
    if checkpoint_path is None:
        raise ValueError(
            "resources.provider kubernetes needs a checkpoint.path that all pods and this "
            "machine can access: a bucket, or a folder of kubernetes.volumes"
        )
    if not is_url(checkpoint_path) and not any(
        f"{checkpoint_path}/".startswith(f"{folder.rstrip('/')}/") for folder in kubernetes.volumes
    ):
        raise ValueError(
            f"checkpoint.path must be a bucket or in a folder of kubernetes.volumes: got "
            f"{checkpoint_path}, which pods do not have"
        )
    if needs_price and not kubernetes.usd_per_gpu_hour:
        raise ValueError(
            "budget and morphing.objective examples_per_dollar need a price; give "
            "kubernetes.usd_per_gpu_hour, or leave them out"
        )
