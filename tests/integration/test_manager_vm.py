"""``launch --manager-vm`` on AWS's fake: the machine that launched the job may go away.

The manager's VM is an OpenSSH server on loopback with a home of its own, like those that
train; what lies in its home is gone when it ends.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.aws import CREDENTIALS, KIND, REGION, ZONE
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import AwsVms, aws_vms
from tests.integration.jobs import STEPS, Answer, Job, until

from spottrain.manifest import list_checkpoints
from spottrain.storage import open_store
from spottrain.varuna_manager import away
from spottrain.varuna_manager.config_manager_vm import DEFAULTS

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

SMALL = DEFAULTS["aws"].instance_type


class RemoteJob(Job):
    """A job whose manager goes to a VM of the fake."""

    def __init__(self, folder: Path, name: str, cloud: AwsVms) -> None:
        self.store = (folder / f"store-{name}").as_uri()
        super().__init__(
            folder,
            name,
            resources={"provider": "aws", "max_vms": 1},
            aws={
                "regions": [REGION],
                "instance_types": [KIND],
                "endpoint_url": cloud.fake.url,
                "user": cloud.settings()["user"],
                "ssh_port": cloud.port,
                "ssh_from": ["192.0.2.0/24"],
                "python": sys.executable,
            },
            manager_vm={
                "identity": "spottrain-manager",
                "image": "Deep Learning Base OSS *",
                "python": sys.executable,
            },
            checkpoint={"every_steps": 10, "path": self.store},
            secrets=["A_SECRET"],
            env={**CREDENTIALS, "PACE_FILE": str(folder / name / "pace")},
            manager={"suspect_s": 30.0},
        )
        self.environment |= CREDENTIALS | {"A_SECRET": "hunter2"}

    def status(self) -> dict[str, Any]:
        """Return what the manager says of the job, wherever it is."""
        answer = self.run("status", self.name, "-o", "json")
        assert answer.code == 0, answer.err
        return answer.report

    def there(self) -> str:
        """Return the VM of its manager."""
        found = away.read(self.dir)
        assert found is not None
        return found.vm_id
