"""Weights that leave a job, and those that it begins with.

Child processes, which may import torch, read and write them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from spottrain.codec import decode, encode
from spottrain.errors import ConfigError, SpottrainError
from spottrain.manifest import (
    CheckpointEntry,
    CheckpointError,
    DamagedError,
    list_checkpoints,
    parse_name,
    read_manifest,
    read_owner,
)
from spottrain.storage.open import open_store
from spottrain.storage.store import UNFINISHED, is_url, local_folder
from spottrain.units import counted
from spottrain.varuna_manager.config.init_from import InitFromConfig
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.jobs.bucket import StoredJob, find_stored
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.launch import data
from spottrain.varuna_manager.launch.inspect import run_tool
from spottrain.varuna_manager.launch.workdir import unpack
from spottrain.wire.model import ExportedWeights, ExportFormat, FirstWeights

_EXPORTER = "spottrain.pipeline.weights.export"
_STARTER = "spottrain.pipeline.weights.warm_start"
MAX_TRIES = 5
"""Checkpoints that may be deleted, one after the other, before they are read."""
T = TypeVar("T")


class Source(NamedTuple):
    """Where weights are read from."""

    place: str
    """Folder or URL."""
    checkpoint: str
    """Its name there; empty: they are files at the place itself."""


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
    with _code_of(name) as (config, place, uid, workdir):
        os.environ.update(config.env)
        data.ensure_data(config)
        flags = {"--full": full, "--ema": ema}
        options = ["--format", kind, *(flag for flag in flags if flags[flag])]
        if Path(config.workdir).is_dir():
            options += ["--origin", config.workdir]

        def choose() -> Source:
            found = _best(place, uid) if best else _choose(place, step, checkpoint, uid)
            return Source(place, found.name)

        def write(source: Source) -> Export:
            with _draft(to) as draft:
                arguments = (place, source.checkpoint, str(draft), *options)
                text = run_tool(_EXPORTER, config, *arguments, workdir=str(workdir), timeout_s=None)
                written: ExportedWeights = decode(ExportedWeights, text)
                draft.rename(to)
            entry = parse_name(source.checkpoint)
            assert entry is not None
            return Export(config.name, entry, to, written)

        return _beside_retention(choose, write)


def _check_target(to: Path) -> None:
    try:
        if not to.exists() or (to.is_dir() and not any(to.iterdir())):
            return
    except OSError as error:
        raise ConfigError(f"--to: {to} cannot be read: {error.strerror}") from error
    what = "is not empty" if to.is_dir() else "is not a folder"
    raise ConfigError(f"--to: {to} {what}; name a new folder")


@contextlib.contextmanager
def _code_of(name: str) -> Iterator[tuple[JobConfig, str, str, Path]]:
    """Yield a job's configuration, where its checkpoints are, its uid, and its code,
    unpacked."""
    with tempfile.TemporaryDirectory(prefix="spottrain-") as scratch:
        if is_url(name):
            job, url = JobDir(Path(scratch)), find_stored(name)
            StoredJob(url.place, url.newest.uid).fetch(job.path)
            config, place, uid = job.config(), url.place, url.newest.uid
        else:
            job = find(name)
            config, uid = job.config(), uid_of(job)
            place = config.checkpoint.path or str(job.checkpoints)
        code = Path(scratch, "workdir")
        unpack(job.workdir, code)
        yield config, place, uid, code


def _checkpoints(place: str, uid: str) -> list[CheckpointEntry]:
    """Return the complete checkpoints of a job, newest first.

    Args:
        place: Where they are.
        uid: Of the job; empty: the one whose place it is.

    Raises:
        StorageError: The store cannot be read.
    """
    store = open_store(place)
    if (owner := read_owner(store)) is None:
        return list_checkpoints(store)
    return list_checkpoints(store, owner.uids if uid in ("", owner.uid) else {uid})


def _choose(place: str, step: int | None, name: str | None, uid: str = "") -> CheckpointEntry:
    """Return the checkpoint that was asked for: the newest unless one was named.

    Raises:
        ConfigError: It is not there, or not complete.
    """
    found = _checkpoints(place, uid)
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


def _beside_retention(choose: Callable[[], Source], use: Callable[[Source], T]) -> T:
    """Use a checkpoint of a job that may run: if its retention deletes the one that was
    chosen before it is read, choose again.

    Raises:
        SpottrainError: It cannot be used, though it is there; or there is none any more of
            those that were asked for; or one after the other was deleted.
    """
    chosen: list[Source] = []
    while True:
        try:
            chosen.append(choose())
            return use(chosen[-1])
        except SpottrainError as error:
            if not chosen or not _is_gone(chosen[-1]) or chosen[-1] in chosen[:-1]:
                raise
            if len(chosen) == MAX_TRIES:
                raise CheckpointError(
                    f"{chosen[-1].place}: {MAX_TRIES} checkpoints in a row were deleted "
                    "before they were read; raise checkpoint.keep, or stop the job meanwhile"
                ) from error


def _is_gone(source: Source) -> bool:
    """Return whether a checkpoint that was chosen is not there any more."""
    if not source.checkpoint:
        return False
    there = list_checkpoints(open_store(source.place))
    return all(entry.name != source.checkpoint for entry in there)


def _best(place: str, uid: str = "") -> CheckpointEntry:
    """Return the best checkpoint by evaluation, as the newest one says.

    Raises:
        ConfigError: No evaluation has chosen one, or there is no checkpoint.
        CheckpointError: It cannot be read.
    """
    step = 0
    for _ in range(MAX_TRIES):
        newest = _choose(place, None, None, uid)
        try:
            step = read_manifest(open_store(place), newest.name).best_step
        except DamagedError:
            raise
        except CheckpointError:
            continue  # deleted meanwhile: there is a newer one
        if not step:
            raise ConfigError(f"--best: no evaluation has named a best one in {place}")
        for entry in _checkpoints(place, uid):
            if entry.step == step:
                return entry
        # Deleted meanwhile: a newer one has become the best, and the newest says which.
    raise CheckpointError(
        f"--best: the checkpoint of step {step}, the best one as {newest.name} says, is "
        f"not in {place}; name another with --step"
    )


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
def first(config: JobConfig, place: str, uid: str = "") -> Iterator[FirstWeights | None]:
    """Write the weights that the job file names, if it does, as a checkpoint of step 0.

    It is deleted when the block fails: a launch leaves all or nothing.

    Args:
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
    yield f"init_from: {counted(weights.num_taken, 'parameter')} taken; the optimizer starts fresh"
    yield from (f"init_from: {remark}" for remark in weights.remarks)


def _start(config: JobConfig, given: InitFromConfig, target: str, uid: str) -> FirstWeights:
    def take(source: Source) -> FirstWeights:
        arguments = [encode(config.job_spec(target, uid)), source.place]
        arguments += ["--checkpoint", source.checkpoint] * bool(source.checkpoint)
        arguments += ["--partial"] * (not given.strict)
        arguments += ["--target", target]
        text = run_tool(_STARTER, config, *arguments, timeout_s=None)
        weights: FirstWeights = decode(FirstWeights, text)
        return weights

    return _beside_retention(lambda: Source(*_source(given.path)), take)


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
        return place, _choose(place, None, None, uid_of(job)).name
    if parse_name(folder.name):
        return str(folder.parent), folder.name
    if folder.is_dir() and (found := _checkpoints(str(folder), "")):
        return str(folder), found[0].name
    return str(folder), ""
