"""The job file's part about a Kubernetes cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spottrain.cloud.kubernetes.pods import ClusterNode
from spottrain.errors import ConfigError
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.varuna_manager.config.job import load_config, parse_config
from spottrain.varuna_manager.launch.machines import node_price

EXAMPLE = Path(__file__).parents[4] / "examples" / "kubernetes.yaml"
JOB: dict[str, Any] = {
    "name": "job",
    "entrypoint": "train:job",
    "minibatch_size": 8,
    "steps": 1,
    "resources": {"provider": "kubernetes", "max_vms": 3},
    "checkpoint": {"path": "s3://bucket/job"},
    "kubernetes": {"image": "torch"},
}


def changed(**kubernetes: Any) -> dict[str, Any]:
    return {**JOB, "kubernetes": {**JOB["kubernetes"], **kubernetes}}


def test_the_namespace_may_give_as_many_pods_as_the_job_wants() -> None:
    config = parse_config(changed(slots=4, usd_per_gpu_hour=0.5), "x")
    (zone,) = config.zones
    assert (zone.name, zone.capacity, zone.spot_usd_per_hour) == ("default", 3, 2.0)


def test_its_gpus_settle_the_precision() -> None:
    assert parse_config(changed(gpu="A100-80GB"), "x").precision == "bf16"
    assert parse_config(changed(), "x").precision == "fp32"


def test_a_pod_asks_for_a_gpu_a_slot_unless_slots_are_of_a_cpu() -> None:
    kubernetes = parse_config(changed(slots=4, cpu="8", memory="64Gi"), "x").kubernetes
    common = {"cpu": "8", "memory": "64Gi"}
    assert kubernetes.settings().requests == {**common, "nvidia.com/gpu": "4"}
    assert kubernetes.settings(uses_gpus=False).requests == common


def test_tolerations_are_of_a_value_or_of_any() -> None:
    given = [{"key": "a"}, {"key": "b", "value": "c", "effect": "NoSchedule"}]
    settings = parse_config(changed(tolerations=given), "x").kubernetes.settings()
    assert settings.tolerations == (
        {"key": "a", "operator": "Exists"},
        {"key": "b", "value": "c", "effect": "NoSchedule"},
    )


def test_the_example_is_accepted() -> None:
    assert load_config(EXAMPLE).kubernetes.settings().grace_s == 60


@pytest.mark.parametrize(
    ("job", "key"),
    [
        (changed(image=None), "kubernetes.image"),
        ({**JOB, "checkpoint": {}}, "checkpoint.path"),
        ({**JOB, "checkpoint": {"path": "/work"}}, "kubernetes.volumes"),
        (
            {**changed(volumes={"/wo": "claim"}), "checkpoint": {"path": "/work"}},
            "kubernetes.volumes",
        ),
        ({**JOB, "budget": {"max_usd": 5.0}}, "kubernetes.usd_per_gpu_hour"),
        (changed(namespace="Training"), "kubernetes.namespace"),
        (changed(memory="64GB"), "kubernetes.memory"),
        (changed(labels={"team": "computer vision"}), "kubernetes.labels"),
        (changed(volumes={"data": "claim"}), "kubernetes.volumes"),
        (changed(gpu="A1000"), "kubernetes.gpu"),
        (changed(grace_s=1), "kubernetes.grace_s"),
    ],
)
def test_what_cannot_run_is_refused(job: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_config(job, "x")


def test_checkpoints_may_be_in_a_volume() -> None:
    job = {**changed(volumes={"/work/": "claim"}), "checkpoint": {"path": "/work/job"}}
    assert parse_config(job, "x").checkpoint.path == "/work/job"


def test_a_share_of_a_node_costs_that_share_of_its_published_price() -> None:
    price = next(p for p in catalogue().published() if p.spot)
    kind = catalogue().find(price.cloud, price.instance_type)
    assert kind is not None
    node = ClusterNode("n", False, False, price.cloud, price.region, price.instance_type, True)
    assert node_price(node, kind.gpus) == pytest.approx(price.usd_per_hour)
    assert node_price(node, 1) == pytest.approx(price.usd_per_hour / kind.gpus)
    assert node_price(ClusterNode("n", False, False, "", "", "", True), 1) is None
