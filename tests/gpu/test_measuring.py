"""What is measured on a GPU behaves as it must; the numbers are ``bench_gpu``'s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.gpu.conftest import ROOT
from tests.gpu.devices import is_gpu


def measure(module: str, options: str) -> dict[str, Any]:
    """Run a measurement in a process of its own."""
    command = [sys.executable, "-m", f"tests.gpu.{module}", *options.split()]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert "error" not in found, found
    return found


def test_the_host_waits_for_the_commit_only(device: str) -> None:
    found = measure("hidden_syncs", "")

    for variant, minibatches in found.items():
        for places in minibatches[1:]:  # kernels are loaded in the first one
            if variant.endswith("host"):
                assert not places, variant
            elif is_gpu(device):
                assert {p.rpartition(":")[0] for p in places} <= {"pipeline/state/update.py"}, (
                    variant
                )
            else:
                assert {p.rpartition(":")[2] for p in places} <= {"_square_norms"}


def test_every_variant_of_a_loop_trains(device: str) -> None:
    job = "gpt2_124m --microbatch 4 --minibatch 8" if is_gpu(device) else ""
    small = "small --microbatch 2 --minibatch 4"
    found = measure("speed", f"{job or small} --turns 1 --steps 1 --predict")

    losses = [one["loss"] for one in found["variants"].values()]
    assert len(losses) == 7
    assert all(0 < loss < 12 for loss in losses)
    assert found["predictions"]["predicted_step_s"] > 0


def test_memory_that_its_maker_leaves_is_whole(device: str) -> None:
    found = measure("memory_survival", "--kills 4 --mib 64 --large-mib 0")

    assert found["whole"] == found["kills"] == 4
    assert all(one["counted"] > 0 for one in found["survivals"])


def test_memory_can_be_evacuated_beside_a_kernel(device: str) -> None:
    found = measure("evacuation", "--mib 64 --hang-s 3")

    assert found["locked before"]["whole"]
    assert found["locked before"]["beside_the_kernel"]


def test_a_broken_peer_is_noticed_at_once(device: str) -> None:
    found = measure("broken_peers", "--mb 1 --reduce-mb 20 --kills 4")

    assert found["hangs"] == 0
    assert found["longest_to_error_s"] < 2
    assert all(one["usable"] for one in found["kills"])


def test_nccl_starts_and_is_aborted(device: str) -> None:
    found = measure("nccl_alone", "--mb 20 --hang-s 4")

    assert found["idle"]["formed"]
    assert found["idle"]["aborted"]
    assert found["hung"]["ended_s"] is not None


def test_a_killed_workers_successor_goes_on(device: str) -> None:
    found = measure("recovery", "--job small --kills 1")

    assert found["median"]["all_s"] < 30
