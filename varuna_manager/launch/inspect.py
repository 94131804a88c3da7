"""Questions about the user's code, asked in child processes that may import torch.

``python -m spottrain.pipeline.model.<tool>`` answers with JSON on stdout. Answers are kept by
fingerprint, so that asking twice costs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import spottrain
from spottrain import machine
from spottrain.errors import SpottrainError, UserCodeError, WireError
from spottrain.morphing.plan.profiles import is_noisy
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.jobs import profiles
from spottrain.varuna_manager.jobs.folder import home
from spottrain.varuna_manager.launch import data
from spottrain.varuna_manager.launch.calibrate import OnProgress, measure_here
from spottrain.varuna_manager.launch.workdir import fingerprint, packed_files
from spottrain.wire import ModelFacts, Profile, decode, encode

TIME_LIMIT_S = 600.0
"""A model that cannot be inspected or measured in that time never will be."""


class ToolError(SpottrainError):
    """A tool of ours did not answer."""


def inspect_model(config: JobConfig) -> ModelFacts:
    """Return what the tracer finds out about the user's model.

    Raises:
        UserCodeError: The user's code is missing, raises or misfits.
        ToolError: The tool did not answer.
    """
    arguments = [config.entrypoint, config.workdir]
    facts: ModelFacts = _ask("inspect", arguments, ModelFacts, config)
    return facts


def calibrate(
    config: JobConfig,
    on_progress: OnProgress = lambda progress: None,
    *,
    again: bool = False,
) -> Profile:
    """Return a profile of the user's model for this machine.

    The one that the job file names; else one that was measured here before, for the
    same model, device and software; else it is measured now, and
    kept unless the machine was busy.

    Args:
        config: The job.
        on_progress: Told whenever a step of measuring is done.
        again: Measure in any case.

    Raises:
        ConfigError: The profile that the job file names does not fit; it cannot be kept.
        UserCodeError: The user's code is missing, raises or misfits.
        ToolError: The tool did not answer.
        MeasuringError: Measuring failed.
    """
    facts = inspect_model(config)
    if not again:
        if (given := profiles.given_profile(config, facts)) is not None:
            return given
        here = machine.device(), machine.software()
        known = profiles.find(facts, *here, config.microbatch_sizes)
        if known is not None:
            return known.profile
    data.have(config)
    profile = measure_here(config, on_progress)
    if not is_noisy(profile):
        profiles.keep(profile)
    return profile


def _ask(tool: str, arguments: list[str], cls: Any, config: JobConfig) -> Any:
    """Return the tool's answer as ``cls``: the one it gave before, if there is one."""
    key = _key(tool, [config.entrypoint, *arguments[2:]], Path(config.workdir))
    kept = home() / "cache" / tool / f"{key}.json"
    try:
        return decode(cls, kept.read_bytes())
    except (FileNotFoundError, WireError):
        data.have(config)
        answer = decode(cls, run_tool(tool, arguments, config.steps))
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = kept.with_suffix(f".{os.getpid()}")
    draft.write_text(encode(answer))
    draft.replace(kept)
    return answer


def _key(tool: str, arguments: list[str], workdir: Path) -> str:
    """Return a name for a question: the same one if all that it depends on is."""
    ours = Path(spottrain.__file__).parent / "pipeline"
    parts = [fingerprint(folder, packed_files(folder)) for folder in (workdir, ours)]
    parts += [tool, *arguments, spottrain.__version__, sys.version]
    with contextlib.suppress(PackageNotFoundError):
        parts.append(version("torch"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def run_tool(tool: str, arguments: list[str], steps: int) -> str:
    """Return what ``python -m spottrain.pipeline.model.<tool>`` prints on stdout.

    Args:
        tool: Its module.
        arguments: Its command line.
        steps: The job's steps, which user code finds in ``SPOTTRAIN_STEPS``.

    Raises:
        UserCodeError: The tool says so (exit code 3).
        ToolError: It crashed, or took longer than ``TIME_LIMIT_S``.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        f"spottrain.pipeline.model.{tool}",
        *arguments,
    ]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            env={**os.environ, "SPOTTRAIN_STEPS": str(steps)},
        )
    except subprocess.TimeoutExpired:
        raise ToolError(
            f"{tool}: no answer within {TIME_LIMIT_S:.0f} s; make the entrypoint faster"
        ) from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode == UserCodeError.exit_code:
        told = json.loads(done.stdout)
        raise UserCodeError(told["error"], told["traceback"])
    if "No module named 'torch'" in done.stderr:
        raise ToolError(f"{tool}: needs torch here; pip install 'spottrain[train]'")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise ToolError(f"{tool}: ended with {done.returncode}: {last}")
