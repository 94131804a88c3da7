"""Profiles on disk: those that this machine keeps and those that users write.

    <home>/cache/profiles/<model>-<conditions>-<micro-batch sizes>.json

Each is a ``Profile`` as indented JSON. A profile is reused for the same model on the
same device with the same software, loader processes, precision, and recompute in blocks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path

from spottrain.codec import decode
from spottrain.errors import ConfigError, WireError
from spottrain.eventlog.folder import home
from spottrain.files import PRIVATE, write_whole
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.profiles import (
    assumes_links,
    check_profile,
    is_noisy,
    knows_sizes,
)
from spottrain.varuna_manager.config.files import read_text
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.core.model.events import KnownProfile
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import LoaderSpec, ModelFacts, Profile

logger = logging.getLogger(__name__)

MAX_KNOWN = 8
"""Number of profiles of one model that a job gets, the newest ones."""


def folder() -> Path:
    """Return where measured profiles are kept."""
    return home() / "cache" / "profiles"


def to_text(profile: Profile) -> str:
    """Return a profile as indented JSON."""
    return json.dumps(dataclasses.asdict(profile), indent=2) + "\n"


def read_profile(path: Path, facts: ModelFacts | None = None) -> Profile:
    """Return the profile in a file.

    Args:
        facts: The model that it must fit, if one is known.

    Raises:
        ConfigError: It cannot be read or used; names the file and the field.
    """
    try:
        profile: Profile = decode(Profile, read_text(path, "profile"))
    except RecursionError as error:
        raise ConfigError(f"{path}: lists and mappings are nested too deeply") from error
    except WireError as error:
        what = str(error).replace("message.", "profile.")
        raise ConfigError(f"{path}: {what}; fix the file") from error
    try:
        check_profile(profile, facts, str(path))
    except PlanError as error:
        raise ConfigError(str(error)) from error
    return profile


def given_profile(config: JobConfig, facts: ModelFacts) -> Profile | None:
    """Return the profile that the job file names, if it names one.

    Raises:
        ConfigError: It cannot be used; names the file and the field.
    """
    if config.profile is None:
        return None
    profile = read_profile(Path(config.profile), facts)
    wanted, loader = config.microbatch_size, config.loader_spec
    for name, asked in (
        ("precision", config.precision),
        ("selective_recompute", config.selective_recompute),
        ("sequence_parallel", config.runtime.sequence_parallel),
    ):
        if profile.origin == "measured" and (got := getattr(profile, name)) != asked:
            raise ConfigError(
                f"{config.profile}: {name} must be that of the job, {str(asked).lower()}: got "
                f"{str(got).lower()}; measure again"
            )
    if profile.origin == "measured" and profile.loader != loader:
        raise ConfigError(
            f"{config.profile}: loader must be that of the job, {_in_words(loader)}: got "
            f"{_in_words(profile.loader)}; set loader in the job file so, or measure again"
        )
    if wanted is not None and wanted not in profile.microbatch_sizes:
        raise ConfigError(
            f"{config.profile}: microbatches must include microbatch_size {wanted} of the "
            f"job: got {list(profile.microbatch_sizes)}; change one of them"
        )
    return profile


def _in_words(loader: LoaderSpec) -> str:
    workers = "auto" if loader.workers is None else loader.workers
    return f"{{workers: {workers}, ahead: {loader.ahead}}}"


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile atomically.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, to_text(profile), mode=PRIVATE)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def path_of(profile: Profile) -> Path:
    """Return the file in which a measured profile is kept."""
    conditions = [profile.device, profile.software]
    conditions.append(str(_conditions(profile)))
    where = hashlib.sha256("\0".join(conditions).encode()).hexdigest()
    sizes = "-".join(map(str, profile.microbatch_sizes))
    return folder() / f"{profile.fingerprint[:16]}-{where[:16]}-m{sizes}.json"


def _conditions(of: Profile | JobSpec) -> tuple[object, ...]:
    """Return what measured times depend on beside model, device, software and size."""
    return of.loader, of.precision, of.selective_recompute, of.sequence_parallel


def keep(profile: Profile) -> None:
    """Keep a measured profile for later; one of a busy machine only until there is another,
    as every launch would measure again without it.

    Raises:
        ConfigError: It cannot be written.
    """
    path = path_of(profile)
    if not is_noisy(profile) or not _is_calm(path):
        write_profile(path, profile)


def _is_calm(path: Path) -> bool:
    """Return whether a profile is kept there that was measured on a quiet machine."""
    try:
        return not is_noisy(read_profile(path))
    except ConfigError:
        return False


def known_profiles(facts: ModelFacts, like: Profile | JobSpec) -> tuple[KnownProfile, ...]:
    """Return the kept profiles of a model, newest first; damaged files are logged.

    Those that were measured for other loader processes, for another precision or recompute in
    blocks than a job's, or another profile's, are left out: other times and bytes are in them.
    """
    found = []
    for path in folder().glob(f"{facts.fingerprint[:16]}-*.json"):
        try:
            profile = read_profile(path, facts)
            at_s = path.stat().st_mtime
            if _conditions(profile) == _conditions(like):
                found.append(KnownProfile(profile=profile, measured_at_s=at_s))
        except (ConfigError, OSError) as error:
            logger.warning("profile skipped: %s", error)
    found.sort(key=lambda known: -known.measured_at_s)
    return tuple(found[:MAX_KNOWN])


def find(
    facts: ModelFacts,
    spec: JobSpec,
    device: str,
    software: str,
    sizes: tuple[int, ...],
) -> KnownProfile | None:
    """Return the newest kept profile that makes measuring here unnecessary."""
    return next(
        (
            known
            for known in known_profiles(facts, spec)
            if (known.profile.device, known.profile.software) == (device, software)
            and knows_sizes(known.profile, sizes)
            and not assumes_links(known.profile)
        ),
        None,
    )
