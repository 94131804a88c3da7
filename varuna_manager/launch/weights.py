"""Weights of a job, written for other programs by a child process with torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spottrain.errors import ConfigError
from spottrain.manifest import CheckpointEntry, list_checkpoints, parse_name
from spottrain.storage.open import open_store
from spottrain.storage.store import UNFINISHED, is_url
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.jobs.bucket import StoredJob
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.launch import data
from spottrain.varuna_manager.launch.inspect import run_tool
from spottrain.varuna_manager.launch.takeover import find_stored
from spottrain.wire.codec import decode
from spottrain.wire.model import ExportedWeights, ExportFormat

_EXPORTER = "spottrain.pipeline.weights.export"


@dataclass(frozen=True, slots=True)
class Export:
    """An export that is done."""

    job: str
    checkpoint: CheckpointEntry
    folder: Path
    weights: ExportedWeights

    @property
    def load(self) -> tuple[str, ...]:
        """Lines of Python that load it."""
        return tuple(line.replace("{}", str(self.folder)) for line in self.weights.load)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum((self.folder / name).stat().st_size for name in self.weights.files)


def export(
    name: str,
    to: Path,
    kind: ExportFormat,
    *,
    step: int | None = None,
    checkpoint: str | None = None,
    full: bool = False,
) -> Export:
    """Write the weights of a job's checkpoint into a new folder, all of it or nothing.

    Args:
        name: Of a job on this machine, or the URL of a job's checkpoints.
        to: The folder; must be missing or empty.
        kind: The format.
        step: Of the checkpoint; by default the newest complete one.
        checkpoint: Its name instead.
        full: Write frozen parameters, too, where only trained ones would be.

    Raises:
        ConfigError: There is no such job or checkpoint, or the folder is not empty.
        UserCodeError: The user's model cannot be built, or does not suit the format.
        ToolError: The checkpoint is damaged, or the folder cannot be written to.
        StorageError: The store cannot be read.
    """
    _check_target(to)
    with _code_of(name) as (config, place, workdir):
        chosen = _choose(place, step, checkpoint)
        os.environ.update(config.env)
        data.ensure_data(config)
        with _draft(to) as draft:
            options = ("--format", kind, *(["--full"] if full else []))
            arguments = (place, chosen.name, str(draft), *options)
            text = run_tool(
                _EXPORTER, config, *arguments, workdir=str(workdir), timeout_s=None
            )
            written: ExportedWeights = decode(ExportedWeights, text)
            draft.rename(to)
        return Export(config.name, chosen, to, written)


def _check_target(to: Path) -> None:
    try:
        if not to.exists() or (to.is_dir() and not any(to.iterdir())):
            return
    except OSError as error:
        raise ConfigError(f"--to: {to} cannot be read: {error.strerror}") from error
    what = "is not empty" if to.is_dir() else "is not a folder"
    raise ConfigError(f"--to: {to} {what}; name a new folder")


@contextlib.contextmanager
def _code_of(name: str) -> Iterator[tuple[JobConfig, str, Path]]:
    """Yield a job's configuration, where its checkpoints are, and its code, unpacked."""
    with tempfile.TemporaryDirectory(prefix="spottrain-") as scratch:
        if is_url(name):
            job, url = JobDir(Path(scratch)), find_stored(name)
            StoredJob(url.place, url.newest.uid).fetch(job.path)
            config, place = job.config(), url.place
        else:
            job = find(name)
            config = job.config()
            place = config.checkpoint.path or str(job.checkpoints)
        code = Path(scratch, "workdir")
        with tarfile.open(job.workdir) as packed:
            packed.extractall(code, filter="data")
        yield config, place, code


def _choose(place: str, step: int | None, name: str | None) -> CheckpointEntry:
    """Return the checkpoint that was asked for: the newest unless one was named.

    Raises:
        ConfigError: It is not there, or not complete.
    """
    found = list_checkpoints(open_store(place))
    if not found:
        raise ConfigError(
            f"{place} holds no complete checkpoint; one is saved every "
            "checkpoint.every_steps and by 'spottrain stop'"
        )
    for entry in found:
        if step in (None, entry.step) and name in (None, entry.name):
            return entry
    known = ", ".join(f"{entry.name}" for entry in found)
    asked = f"--step {step}" if name is None else f"--checkpoint {name}"
    hint = "" if name is None or parse_name(name) else "; give the name of its folder"
    raise ConfigError(f"{asked}: {place} holds {known}{hint}")


@contextlib.contextmanager
def _draft(to: Path) -> Iterator[Path]:
    """Yield a folder beside ``to`` that is removed unless it was renamed."""
    final = to.absolute()
    draft = final.with_name(f".{final.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--to: cannot make {to}: {error.strerror}") from error
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
