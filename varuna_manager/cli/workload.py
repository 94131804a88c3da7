"""Reads profiles of models and machines that are given as files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from spottrain.codec import decode
from spottrain.errors import ConfigError, WireError
from spottrain.morphing.plan.workload import Workload
from spottrain.varuna_manager.config.files import read_text
from spottrain.wire.model import ModelFacts, Profile


def read_workload(
    profile: Path,
    facts: Path | None,
    minibatch_size: int | None,
    gpu_memory_gib: float | None,
    usd_per_hour: float | None,
) -> Workload:
    """Return the workload of ``profile``, with the command line's changes.

    Raises:
        ConfigError: A file cannot be read or has another format.
    """
    text = read_text(profile)
    if facts is None:
        workload: Workload = _decode(Workload, text, profile)
    else:
        if minibatch_size is None or gpu_memory_gib is None or usd_per_hour is None:
            raise ConfigError(
                "--facts needs --minibatch-size, --gpu-memory-gib and --usd-per-hour: "
                "a profile alone does not have them; give all three"
            )
        workload = Workload(
            sources=(str(profile),),
            facts=_decode(ModelFacts, read_text(facts), facts),
            profile=(measured := _decode(Profile, text, profile)),
            minibatch_size=0,
            gpu_memory_bytes=0,
            usd_per_hour=0.0,
            precision=None,
            is_gpu=measured.upload_bytes_per_s > 0,
        )
    changes: dict[str, Any] = {}
    if minibatch_size is not None:
        changes["minibatch_size"] = minibatch_size
    if gpu_memory_gib is not None:
        changes["gpu_memory_bytes"] = size_bytes("--gpu-memory-gib", gpu_memory_gib)
    if usd_per_hour is not None:
        changes["usd_per_hour"] = usd_per_hour
    return replace(workload, **changes)


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        ConfigError: It cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path.name}: is not JSON: {error}; fix the file") from error


def size_bytes(option: str, gib: float) -> int:
    """Return the bytes of an option in GiB.

    Raises:
        ConfigError: It is not a number.
    """
    if not math.isfinite(gib):
        raise ConfigError(f"{option} must be a number above 0: got {gib}; change it")
    return int(gib * 2**30)


def _decode(cls: Any, text: str, path: Path) -> Any:
    try:
        return decode(cls, text)
    except WireError as error:
        hint = ""
        if cls is Workload and '"microbatches"' in text and '"facts"' not in text:
            hint = "; a calibrated profile needs --facts too"
        raise ConfigError(f"{path.name}: {error}{hint}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path.name}: is not JSON: {error}; fix the file") from error
