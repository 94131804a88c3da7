"""The real manager over the real local cloud, with stub supervisors on its VMs.

Its arguments are ``JOB_DIR [CRASH_AT]``: with CRASH_AT it kills itself with SIGKILL at its
nth append to the journal: odd ones before it is committed, even ones after.

With STUB_PATIENCE_S in its environment that is how long it waits for a folder or journal
that cannot be used, and it hardly waits before it rents again after a VM that failed. With
STUB_VERSION its software is of that version.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
from pathlib import Path

import uvloop

from spottrain.cloud.local.market import MarketSpec
from spottrain.cloud.local.provider import LocalProvider
from spottrain.codec import decode
from spottrain.eventlog import loop
from spottrain.varuna_manager.config.track import MlflowConfig, TrackConfig
from spottrain.varuna_manager.core import preparation, shutdown
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.daemon import server
from spottrain.varuna_manager.daemon.main import ManagerError, manage
from spottrain.varuna_manager.daemon.tracking import Trackers
from spottrain.varuna_manager.jobs import journal
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.replication import begin_replication

AGENT = (sys.executable, str(Path(__file__).with_name("stub_agent.py")))


def open_cloud(job_dir: Path) -> LocalProvider:
    market = decode(MarketSpec, (job_dir / "market.json").read_text())
    return LocalProvider(job_dir / "cloud", "job", market, AGENT, idle_s=2.0)


class CrashingJournal(journal.Journal):
    """Ends the process at its nth event, however many a busy machine takes at once."""

    crash_at = 0
    appended = 0

    def append(self, *steps: journal.Step) -> int:
        for step in steps:
            self.appended += 1
            last = self.appended == self.crash_at
            if last and self.crash_at % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            seq = super().append(step)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)
        return seq


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    job = JobDir(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        CrashingJournal.crash_at = int(sys.argv[2])
        sys.modules["spottrain.varuna_manager.daemon.main"].Journal = CrashingJournal  # type: ignore[attr-defined]
    preparation.BOOT_WAIT_S, records.COOLDOWN_S = math.inf, 0.5
    if patience := os.environ.get("STUB_PATIENCE_S"):
        shutdown.FOLDER_WAIT_S = loop.JOURNAL_WAIT_S = float(patience)
        records.FIRST_START_PAUSE_S = 0.01
    if version := os.environ.get("STUB_VERSION"):
        sys.modules[server.__name__].software_version = lambda: version  # type: ignore[attr-defined]
    with job.locked(ManagerError("there is another one")):
        # Most jobs have no job file. Asked for without a server, MLflow fails.
        copy = trackers = None
        if (job.path / "config.json").exists():
            mlflow = TrackConfig(mlflow=MlflowConfig(tracking_uri="none"))
            trackers = Trackers(job, mlflow)
            if json.loads((job.path / "config.json").read_bytes())["checkpoint"]["path"]:
                copy = begin_replication(job)
        outcome = uvloop.run(manage(job, open_cloud(job.path), copy, trackers))
    return 143 if outcome is None else outcome.exit_code
