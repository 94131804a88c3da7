"""A job on the fakes of two clouds from the command line: it begins where it is cheapest,
moves when that cloud has nothing left, ends, and both are empty.

A third cloud cannot be opened at all. VMs are OpenSSH servers on loopback, as on one cloud
(test_aws_job.py).
"""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import aws, gcp
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import free_port
from tests.integration.jobs import STEPS, Job, until, weights
from tests.integration.rented_jobs import full_and_training, know_gcp_prices
from tests.integration.undisturbed import Undisturbed
from tests.view import View

from spottrain.manifest import list_checkpoints
from spottrain.storage.open import open_store
from spottrain.varuna_manager.core.model.state import State

pytestmark = [
    pytest.mark.rotated(parts=[6]),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


class SkyJob(Job):
    """A job that rents from both fakes, and would from Azure."""

    def __init__(self, folder: Path, ports: dict[str, int], urls: dict[str, str]) -> None:
        def section(name: str, **more: Any) -> dict[str, Any]:
            return {
                "user": getpass.getuser(),
                "ssh_port": ports[name],
                "ssh_from": ["192.0.2.0/24"],
                "python": sys.executable,
                **more,
            }

        super().__init__(
            folder,
            "anywhere",
            # One VM alone is too few to train on: what is left of a fleet moves.
            resources={
                "provider": ["aws", "azure", "gcp"],
                "device": "cpu",
                "min_vms": 2,
                "max_vms": 2,
            },
            aws=section(
                "aws",
                regions=[aws.REGION],
                instance_types=[aws.CPU_KIND],
                endpoint_url=urls["aws"],
            ),
            azure={"instance_types": ["Standard_F16s_v2"]},
            gcp=section(
                "gcp",
                project=gcp.PROJECT,
                regions=[gcp.REGION],
                instance_types=[gcp.CPU_KIND],
                endpoint=urls["gcp"],
            ),
            checkpoint={"every_steps": 10, "path": str(folder / "network-folder")},
            env={"PACE_FILE": str(folder / "anywhere" / "pace")},
            manager={"suspect_s": 30.0},
        )
        self.environment |= aws.CREDENTIALS
        self.environment |= {name: os.environ[name] for name in gcp.VARIABLES}
        self.environment.pop("AZURE_SUBSCRIPTION_ID", None)
        know_gcp_prices(Path(self.environment["SPOTTRAIN_HOME"]))


def on(cloud: str, state: State) -> State | None:
    """Return the state if two VMs train, both on one cloud."""
    here = {vm.offer.cloud for vm in View(state).vms.values()} == {cloud}
    return full_and_training(state) if here else None


def had_vms_and_is_empty(fake: Any) -> None:
    assert fake.ask("left") == []
    assert fake.ask("switched_on") == []
    assert fake.ask("drifts") == []
    bill = fake.ask("bill")
    assert len(bill) >= 2  # on a busy machine a slow one may have been replaced
    assert all(row["ended_at"] for row in bill)


def test_a_job_moves_to_another_cloud_and_leaves_both_empty(
    tmp_path: Path, reference: Undisturbed
) -> None:
    ports = {"aws": free_port(), "gcp": free_port()}
    with aws.running() as east, gcp.running() as west:
        fakes: dict[str, Any] = {"aws": east, "gcp": west}
        for name, fake in fakes.items():
            fake.reset()
            folder = str(tmp_path / name)
            fake.ask("rent_machines", folder=folder, port=ports[name])
        west.ask("quota", metric="N2_CPUS", limit=8)
        urls = {name: fake.url for name, fake in fakes.items()}
        with SkyJob(tmp_path, ports, urls) as job:
            job.pace(0.1)
            launched = job.launch("--detach")
            assert launched.code == 0, launched.err
            assert "continuing without this cloud: azure" in launched.err
            begun = job.until("two VMs on AWS", lambda state: on("aws", state))
            job.pace(0.3)  # so that it is not over before all has happened to it
            assert job.run("ssh", job.name, "gcp.none").code == 2
            east.ask("stock", zone=aws.ZONE, instance_type=aws.CPU_KIND, count=0)
            _, name, region = min(View(begun).vms).split(".")
            east.ask("interrupt", region=region, instance_id=name)
            job.until("two VMs on GCP", lambda state: on("gcp", state))
            job.pace(0.0)
            until(
                "its end",
                lambda: not job.dir.is_managed(),
                lambda: job.tail(job.state()),
            )
            end = job.state()
            assert end.outcome is not None
            assert end.outcome.kind == "succeeded", end.outcome
            assert list_checkpoints(open_store(job.checkpoint_root))[0].step == STEPS
            assert weights(job.checkpoint_root) == reference.weights
        for fake in fakes.values():
            had_vms_and_is_empty(fake)
