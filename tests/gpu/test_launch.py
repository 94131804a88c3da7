"""A job file, from the command line to the end of its training on a real GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.runs import WORKDIR

from spottrain.machine import OWNER_VARIABLE

JOB = f"""
name: {{name}}
entrypoint: jobs:tiny
workdir: {WORKDIR}
minibatch_size: 8
microbatch_size: 2
steps: 40
reduction: exact
resources: {{{{device: gpu, max_vms: 2}}}}
budget: {{{{max_usd: 1.00}}}}
checkpoint: {{{{every_steps: 20}}}}
local:
  zones:
    - name: local-a
      slots: 1
      slot_memory_bytes: 8_000_000_000
      capacity: 2
      spot_usd_per_hour: 3.00
      on_demand_usd_per_hour: 10.00
"""


def test_a_job_is_trained_to_its_end(gpu: str, tmp_path: Path) -> None:
    name = os.environ[OWNER_VARIABLE]  # the GPU's other users are of this job
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(name=name))
    environment = {**os.environ, "SPOTTRAIN_HOME": str(tmp_path / "home")}
    cli = "spottrain.varuna_manager.cli.main"
    spottrain = [sys.executable, "-m", "spottrain.start", cli]

    run = subprocess.run(
        [*spottrain, "launch", str(file)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    print(run.stdout[-3000:], run.stderr[-3000:])  # noqa: T201
    assert run.returncode == 0
    told = subprocess.run(
        [*spottrain, "status", name, "-o", "json"],
        check=True,
        capture_output=True,
        env=environment,
    )
    status = json.loads(told.stdout)
    assert status["state"] == "succeeded"
    assert status["step"] == 40
    assert "NVIDIA" in status["computes_on"]
