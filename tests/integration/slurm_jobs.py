"""Jobs on a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.fakes.slurm import Slurm
from tests.integration.jobs import Job


def slurm_job(folder: Path, cluster: Slurm, name: str = "on-slurm", **changed: Any) -> Job:
    """Return a job in the cluster's partition ``preempt``.

    Args:
        changed: ``max_vms``, and keys of the section ``slurm``; with ``login`` this machine
            knows nothing of the cluster.
    """
    here = folder / name
    job = Job(
        folder,
        name,
        resources={"provider": "slurm", "max_vms": changed.pop("max_vms", 2)},
        checkpoint={"every_steps": 10, "path": str(here / "checkpoints")},
        env={"PACE_FILE": str(here / "pace")},
        manager={"suspect_s": 30.0},
        slurm={
            "partitions": ["preempt"],
            "python": sys.executable,
            "folder": str(here / "shared"),
            "scratch": str(here / "node-local"),
            **changed,
        },
    )
    if "login" not in changed:
        job.environment |= cluster.environment
    return job
