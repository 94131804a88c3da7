"""Weights that leave a job, and those that it begins with.

Child processes, which may import torch, read and write them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spottrain.errors import ConfigError
from spottrain.manifest import (
    CheckpointEntry,
    list_checkpoints,
    parse_name,
    read_manifest,
)
from spottrain.storage.open import open_store
from spottrain.storage.store import UNFINISHED, is_url, local_folder
from spottrain.varuna_manager.config.init_from import InitFromConfig
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.jobs.bucket import StoredJob, find_stored
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.launch import data
from spottrain.varuna_manager.launch.inspect import run_tool
from spottrain.varuna_manager.launch.workdir import unpack
from spottrain.wire.codec import decode, encode
from spottrain.wire.model import ExportedWeights, ExportFormat, FirstWeights

_EXPORTER = "spottrain.pipeline.weights.export"
_STARTER = "spottrain.pipeline.weights.warm_start"


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
    best: bool = False,
    full: bool = False,
    ema: bool = False,
) -> Export:
    """Write the weights of a job's checkpoint into a new folder, all of it or nothing.

    Args:
        name: Of a job on this machine, or the URL of a job's checkpoints.
        to: The folder; must be missing or empty.
        kind: The format.
        step: Of the checkpoint; by default the newest complete one.
        checkpoint: Its name instead.
        best: Take the best one by evaluation instead.
        full: Write frozen parameters, too, where only trained ones would be.
        ema: Write the moving average that the optimizer keeps in place of the weights.

    Raises:
        ConfigError: There is no such job or checkpoint, or the folder is not empty.
        UserCodeError: The user's model cannot be built, or does not suit the format.
        ToolError: The checkpoint is damaged, or the folder cannot be written to.
        StorageError: The store cannot be read.
    """
    _check_target(to)
    with _code_of(name) as (config, place, workdir):
        chosen = _choose(place, _best_step(place) if best else step, checkpoint)
        os.environ.update(config.env)
        data.ensure_data(config)
        with _draft(to) as draft:
            flags = {"--full": full, "--ema": ema}
            options = ("--format", kind, *(flag for flag in flags if flags[flag]))
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
        unpack(job.workdir, code)
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


def _best_step(place: str) -> int | None:
    """Return the step of the best checkpoint; ``None`` if there is no checkpoint.

    Raises:
        ConfigError: No evaluation has chosen one.
    """
    store = open_store(place)
    for entry in list_checkpoints(store)[:1]:
        if step := read_manifest(store, entry.name).best_step:
            return step
        raise ConfigError(f"--best: no evaluation has named a best one in {place}")
    return None


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


# --- The weights that a job begins with ---------------------------------------------------


def check_first(config: JobConfig) -> FirstWeights | None:
    """Check that the weights that the job file names fit the model; ``None``: it does not.

    Raises:
        ConfigError: They are not there, or do not fit.
        UserCodeError, ToolError: As ``run_tool``.
        StorageError: The store that they are in cannot be read.
    """
    given = config.init_from
    return None if given is None else _start(config, given, "", "")


@contextlib.contextmanager
def first(
    config: JobConfig, place: str, uid: str = ""
) -> Iterator[FirstWeights | None]:
    """Write the weights that the job file names, if it does, as a checkpoint of step 0.

    It is deleted when the block fails: a launch leaves all or nothing.

    Args:
        config: The job.
        place: Of its checkpoints, as far as this process is concerned.
        uid: Of the job, which marks them.

    Raises:
        ConfigError: As ``check_first``; or there are checkpoints already.
        UserCodeError, ToolError, StorageError: As ``check_first``.
    """
    if config.init_from is None:
        yield None
        return
    store = open_store(place)
    if found := list_checkpoints(store):
        raise ConfigError(
            f"init_from: {place} holds checkpoints already, such as {found[0].name}, "
            "which the job would continue from; give checkpoint.path a new place"
        )
    written = _start(config, config.init_from, place, uid)
    try:
        yield written
    except BaseException:
        store.delete_folder(written.checkpoint)
        raise


def describe(weights: FirstWeights) -> Iterator[str]:
    """Yield lines for the user on weights that a job begins with."""
    yield f"init_from: {weights.num_taken} parameters taken; the optimizer starts fresh"
    yield from (f"init_from: {remark}" for remark in weights.remarks)


def _start(
    config: JobConfig, given: InitFromConfig, target: str, uid: str
) -> FirstWeights:
    source, checkpoint = _source(given.path)
    arguments = [encode(config.job_spec(target, uid)), source]
    arguments += ["--checkpoint", checkpoint] * bool(checkpoint)
    arguments += ["--partial"] * (not given.strict)
    text = run_tool(_STARTER, config, *arguments, "--target", target, timeout_s=None)
    weights: FirstWeights = decode(FirstWeights, text)
    return weights


def _source(path: str) -> tuple[str, str]:
    """Return where given weights are: a store and a checkpoint, or a path and nothing.

    Raises:
        ConfigError: They are not there.
        StorageError: The store cannot be read.
    """
    folder = local_folder(path)
    if folder is None:
        above, mark, options = path.partition("?")
        above, _, last = above.rstrip("/").rpartition("/")
        if parse_name(last):
            return above + mark + options, last
        return path, _choose(path, None, None).name
    if not folder.exists():
        job = find(path)
        place = job.config().checkpoint.path or str(job.checkpoints)
        return place, _choose(place, None, None).name
    if parse_name(folder.name):
        return str(folder.parent), folder.name
    if folder.is_dir() and (found := list_checkpoints(open_store(folder))):
        return str(folder), found[0].name
    return str(folder), ""
