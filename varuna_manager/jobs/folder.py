"""Jobs on this machine: one folder per job.

Beside what ``eventlog.folder`` names:

    <home>/jobs/<name>/config.json      the job file, validated, paths absolute
                       facts.json       what the tracer found about the model
                       workdir.tar.gz   the user's code
                       measurements.sqlite  one row for each mini-batch
                       manager.json     pid and url of its running manager
                       identity.pem, cloud/, checkpoints/
                       folder.id        tells this folder from copies on other machines
                       copy.json        progress of the journal's copy
                       metrics.jsonl    its measurements, a line each
                       tracking/        of the processes that write them, and of callbacks
                       callbacks/       of the call that runs
                       tracking.json    what is in their way
                       gpus.json        what GPUs did a moment ago
                       traces/          of 'spottrain profile' and 'timeline'
    <home>/cache/                       facts and profiles by fingerprint
"""

from __future__ import annotations

import json
import logging
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spottrain.codec import decode, encode
from spottrain.errors import ConfigError, WireError
from spottrain.eventlog.folder import Folder
from spottrain.files import write_whole
from spottrain.wire.model import GpuUse, ModelFacts

if TYPE_CHECKING:
    from spottrain.varuna_manager.config.job import JobConfig

logger = logging.getLogger(__name__)

GpuUses = Mapping[str, tuple[GpuUse, ...]]
"""By VM."""
COMMIT = "comment"
"""Header of the user's packed code that holds its commit, as ``git archive`` writes it."""


def try_to_write_text(path: Path, text: str) -> None:
    """Write a file that only tells people something: where the disk refuses, the next
    time is soon."""
    try:
        write_whole(path, text)
    except OSError as error:
        logger.warning("%s is not written: %s", path.name, error.strerror)


@dataclass(frozen=True, slots=True)
class ManagerAddress:
    """Process and address of a running manager."""

    pid: int
    url: str


@dataclass(frozen=True, slots=True)
class JobDir(Folder):
    """The folder of one job."""

    KIND, PROCESS = "job", "manager"
    ARGV = ("spottrain.start", "spottrain.varuna_manager.daemon.main")

    @property
    def measurements(self) -> Path:
        """What its mini-batches and evaluations measured."""
        return self.path / "measurements.sqlite"

    @property
    def workdir(self) -> Path:
        """The user's code, packed."""
        return self.path / "workdir.tar.gz"

    @property
    def copy_status(self) -> Path:
        """Progress of the journal's copy, if the journal is copied."""
        return self.path / "copy.json"

    @property
    def json_log(self) -> Path:
        """The manager's log as JSON lines, if the job file asks for it."""
        return self.path / "manager.json.log"

    @property
    def tracking_status(self) -> Path:
        """What is in the way of writing measurements, by sink, and of callbacks."""
        return self.path / "tracking.json"

    @property
    def remote_manager_file(self) -> Path:
        """The manager's VM, if it has one of its own; see ``manager_location``."""
        return self.path / "away.json"

    @property
    def cloud(self) -> Path:
        """State and VM folders of the local cloud."""
        return self.path / "cloud"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints if the job file names no other."""
        return self.path / "checkpoints"

    @property
    def traces(self) -> Path:
        """What ``spottrain profile`` and ``timeline`` have recorded, a folder each time."""
        return self.path / "traces"

    @property
    def gpu_uses_file(self) -> Path:
        """What GPUs did a moment ago, by VM."""
        return self.path / "gpus.json"

    def keep_gpu_uses(self, uses: GpuUses) -> None:
        """Store what the GPUs of VMs do, for people."""
        try_to_write_text(self.gpu_uses_file, encode(uses))

    def gpu_uses(self) -> GpuUses:
        """Return what GPUs did a moment ago, by VM; empty if that is not known."""
        try:
            uses: GpuUses = decode(GpuUses, self.gpu_uses_file.read_text())
            return uses
        except (OSError, ValueError, WireError):
            return {}

    def config(self) -> JobConfig:
        """Return the job's configuration at launch."""
        # Not above: most readers of a job do without its file.
        from spottrain.varuna_manager.config.job import parse_config

        return parse_config(json.loads(self._read("config.json")), self.name)

    def facts(self) -> ModelFacts:
        """Return what the tracer found about the model at launch."""
        facts: ModelFacts = decode(ModelFacts, self._read("facts.json"))
        return facts

    def commit(self) -> str:
        """Return the commit of the user's code at launch; empty: none is known."""
        with tarfile.open(self.workdir) as archive:
            return archive.pax_headers.get(COMMIT, "")

    def write(self, config: JobConfig, facts: ModelFacts) -> None:
        """Store the job's configuration and its model's facts."""
        text = config.model_dump_json(indent=2)
        (self.path / "config.json").write_text(text, encoding="utf-8")
        (self.path / "facts.json").write_text(encode(facts))

    def manager(self) -> ManagerAddress | None:
        """Return the running manager's address, once it has published it."""
        try:
            data = json.loads((self.path / "manager.json").read_text())
            return ManagerAddress(pid=int(data["pid"]), url=str(data["url"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ConfigError(
                f"job {self.name}: {name} is missing, the launch was not completed; "
                f"run 'spottrain down {self.name}', then launch again"
            ) from error


job_dir = JobDir.named
find = JobDir.find
all_jobs = JobDir.all
