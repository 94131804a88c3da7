"""The real manager over a fake cloud, whose VMs it enters by SSH, with stub supervisors.

Its arguments are ``JOB_DIR [EVENT before|after]``: with an EVENT it kills itself with SIGKILL
when one is journalled, before or after it is committed. ``JOB_DIR/cloud.json`` says where the
fake is and what must be known of its VMs.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import logging
import os
import signal
import sys
import tarfile
from pathlib import Path

import uvloop
from tests.integration.cloud_vms import client

from spottrain.cloud.ssh.hosts import bootstrap
from spottrain.cloud.ssh.on_vm.package import Package, package
from spottrain.cloud.ssh.rented.provider import RentedVmProvider
from spottrain.cloud.ssh.rented.vm import VmAccess
from spottrain.cloud.ssh.transport.hosts import Payload
from spottrain.varuna_manager.daemon import server
from spottrain.varuna_manager.daemon.main import ManagerError, manage
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal, Step
from spottrain.version import sources, version_of

STUB = Path(__file__).with_name("stub_supervisor.py")
_REPLACED = "spottrain/pipeline/process/supervisor.py"


class DyingJournal(Journal):
    """Ends the process at an event."""

    event = when = ""

    def append(self, *steps: Step) -> int:
        hit = any(type(step.event).__name__ == self.event for step in steps)
        if hit and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        seq = super().append(*steps)
        if hit:
            os.kill(os.getpid(), signal.SIGKILL)
        return seq


def open_cloud(job: JobDir) -> RentedVmProvider:
    """Return the provider of a job, as ``cloud.json`` says."""
    known = json.loads((job.path / "cloud.json").read_text())
    return RentedVmProvider(
        client(known).provider(**known["settings"]),
        job.cloud,
        job.name,
        Payload(workdir=job.workdir),
        VmAccess(key_file=Path(known["key_file"]), python=sys.executable),
    )


@functools.cache
def stub_package(with_obstore: bool = False) -> Package:
    """Return our software with the stub in the supervisor's place."""
    buffer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(package(with_obstore).archive)) as ours,
        gzip.GzipFile("", "wb", 1, fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for member in ours:
            file = ours.extractfile(member)
            assert file is not None
            content = STUB.read_bytes() if member.name == _REPLACED else file.read()
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    data = buffer.getvalue()
    return Package(data, hashlib.sha256(data).hexdigest())


def stub_version() -> str:
    """Return the version that agents find their software to be, with the stub in it."""
    return version_of(
        (name, STUB.read_bytes() if name == _REPLACED else path.read_bytes())
        for name, path in sources()
    )


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    sys.modules[bootstrap.__name__].package = stub_package  # type: ignore[attr-defined]
    sys.modules[server.__name__].software_version = stub_version  # type: ignore[attr-defined]
    job = JobDir(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        DyingJournal.event, DyingJournal.when = sys.argv[2:]
        sys.modules["spottrain.varuna_manager.daemon.main"].Journal = DyingJournal  # type: ignore[attr-defined]
    with job.locked(ManagerError("there is another one")):
        provider = open_cloud(job)
        try:
            outcome = uvloop.run(manage(job, provider))
        finally:
            provider.close()
    return 143 if outcome is None else outcome.exit_code
