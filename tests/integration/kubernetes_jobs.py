"""Jobs on a fake Kubernetes cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.fakes.kubernetes import IMAGE, NAMESPACE, FakeCluster
from tests.integration.jobs import Job


def kubernetes_job(
    folder: Path, cluster: FakeCluster, name: str = "in-pods", **changed: Any
) -> Job:
    """Return a job whose manager is outside of the cluster.

    Args:
        changed: ``max_vms``, and keys of the section ``kubernetes``.
    """
    here = folder / name
    cluster.claims.add("work")
    job = Job(
        folder,
        name,
        resources={"provider": "kubernetes", "device": "cpu", "max_vms": changed.pop("max_vms", 2)},
        checkpoint={"every_steps": 10, "path": str(here / "checkpoints")},
        env={"PACE_FILE": str(here / "pace")},
        manager={"suspect_s": 30.0},
        kubernetes={
            "namespace": NAMESPACE,
            "image": IMAGE,
            "python": sys.executable,
            "cpu": "40",
            "grace_s": 300,
            "volumes": {str(here): "work"},
            **changed,
        },
    )
    job.environment["KUBECONFIG"] = str(cluster.kubeconfig)
    return job
