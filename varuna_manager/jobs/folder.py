"""Jobs on this machine: one folder per job.

The state directory is the XDG one (``SPOTTRAIN_HOME`` overrides it):

    <home>/jobs/<name>/config.json      the job file, validated, paths absolute
                       facts.json       what the tracer found about the model
                       workdir.tar.gz   the user's code
                       journal.sqlite   all events
                       measurements.sqlite  one row for each mini-batch
                       manager.lock     held by the running manager, with its pid
                       manager.json     its pid and url
                       manager.log, identity.pem, cloud/, checkpoints/
                       report.html      once the job is over
                       folder.id        tells this folder from copies on other machines
                       copy.json        progress of the journal's copy
                       metrics.jsonl    its measurements, a line each
                       tracking/        of the processes that write them
                       tracking.json    what is in their way
                       traces/          of 'spottrain profile' and 'timeline'
    <home>/cache/                       facts and profiles by fingerprint
           locks/<name>                 held while a job of that name is put on disk
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_state_path

from spottrain.codec import decode, encode
from spottrain.errors import ConfigError, SpottrainError
from spottrain.files import write_whole
from spottrain.wire.model import ModelFacts

if TYPE_CHECKING:
    from spottrain.varuna_manager.config.job import JobConfig

logger = logging.getLogger(__name__)


def home() -> Path:
    """Return the state directory; ``SPOTTRAIN_HOME`` overrides the XDG one."""
    if override := os.environ.get("SPOTTRAIN_HOME"):
        return Path(override).expanduser().absolute()
    return user_state_path("spottrain")


def is_folder_name(name: str) -> bool:
    """Return whether a job or a pool may be in a folder of this name."""
    return 0 < len(name) < 100 and not name.startswith(".") and "/" not in name


def try_to_write_text(path: Path, text: str) -> None:
    """Write a file that only tells people something: where the disk refuses, the next
    time is soon."""
    try:
        write_whole(path, text)
    except OSError as error:
        logger.warning("%s is not written: %s", path.name, error.strerror)


LOCK_S = 2.0
"""How long to wait for a lock that a command may hold for a moment."""


def is_locked(lock_file: Path) -> bool:
    """Return whether a process holds a lock for its life; the file need not exist."""
    try:
        with open(lock_file, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextlib.contextmanager
def held_lock(lock_file: Path, refusal: SpottrainError) -> Iterator[None]:
    """Hold a lock, with this process's id in its file.

    Raises:
        SpottrainError: ``refusal``: another process holds it.
    """
    with open(lock_file, "ab") as lock:
        give_up_at_s = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                # A process that checks for a holder holds the lock for a moment.
                if time.monotonic() > give_up_at_s:
                    raise refusal from error
            time.sleep(0.02)
        lock.truncate(0)
        lock.write(b"%d" % os.getpid())
        lock.flush()
        yield


@dataclass(frozen=True, slots=True)
class ManagerAddress:
    """Process and address of a running manager."""

    pid: int
    url: str


@dataclass(frozen=True, slots=True)
class JobDir:
    """The folder of one job."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.path.name

    @property
    def journal(self) -> Path:
        """The journal of the job's events."""
        return self.path / "journal.sqlite"

    @property
    def measurements(self) -> Path:
        """What its mini-batches and evaluations measured."""
        return self.path / "measurements.sqlite"

    @property
    def workdir(self) -> Path:
        """The user's code, packed."""
        return self.path / "workdir.tar.gz"

    @property
    def lock(self) -> Path:
        """Held by the running manager."""
        return self.path / "manager.lock"

    @property
    def log(self) -> Path:
        """The manager's log."""
        return self.path / "manager.log"

    @property
    def page(self) -> Path:
        """The report as an HTML page, written when the job ends."""
        return self.path / "report.html"

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
        """What is in the way of writing measurements, by sink."""
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
    def is_down(self) -> bool:
        """True if ``spottrain down`` has ended the job."""
        return (self.path / "down").exists()

    def mark_down(self) -> None:
        """Record that the job has been ended for good."""
        (self.path / "down").touch()

    def config(self) -> JobConfig:
        """Return the job's configuration at launch."""
        # Not above: most readers of a job do without its file.
        from spottrain.varuna_manager.config.job import parse_config

        return parse_config(json.loads(self._read("config.json")), self.name)

    def facts(self) -> ModelFacts:
        """Return what the tracer found about the model at launch."""
        facts: ModelFacts = decode(ModelFacts, self._read("facts.json"))
        return facts

    def write(self, config: JobConfig, facts: ModelFacts) -> None:
        """Store the job's configuration and its model's facts."""
        text = config.model_dump_json(indent=2)
        (self.path / "config.json").write_text(text, encoding="utf-8")
        (self.path / "facts.json").write_text(encode(facts))

    def is_managed(self) -> bool:
        """Return whether a manager of this job runs: it holds the lock while it does."""
        return is_locked(self.lock)

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


def job_dir(name: str) -> JobDir:
    """Return the folder of a job, which need not exist."""
    return JobDir(home() / "jobs" / name)


def find(name: str) -> JobDir:
    """Return the folder of an existing job.

    Raises:
        ConfigError: There is none.
    """
    if is_folder_name(name) and (job := job_dir(name)).journal.exists():
        return job
    known = ", ".join(job.name for job in all_jobs()) or "none"
    raise ConfigError(f"no job {name} on this machine; those in {home() / 'jobs'}: {known}")


def all_jobs() -> list[JobDir]:
    """Return all jobs of this machine, sorted by name."""
    folders = (home() / "jobs").glob("[!.]*/journal.sqlite")
    return [JobDir(journal.parent) for journal in sorted(folders)]
