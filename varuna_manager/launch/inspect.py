"""Inspects and measures the user's model in child processes, which may import torch.

Answers are kept by fingerprint, so that asking twice costs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import spottrain
from spottrain import children, machine
from spottrain.codec import decode, encode
from spottrain.errors import ConfigError, SpottrainError, UserCodeError, WireError
from spottrain.eventlog.folder import home
from spottrain.machine import OUTPUT_VARIABLES
from spottrain.redaction import VARIABLE, redacted
from spottrain.units import counted
from spottrain.varuna_manager.config.job import EvaluationConfig, JobConfig
from spottrain.varuna_manager.jobs import profiles
from spottrain.varuna_manager.launch import data
from spottrain.varuna_manager.launch.calibrate import (
    OnProgress,
    devices_here,
    measure_here,
)
from spottrain.varuna_manager.launch.workdir import fingerprint, packed_files
from spottrain.wire.model import LearningRates, ModelFacts, Profile

TIME_LIMIT_S = 600.0
"""A model that cannot be inspected in that time, on a machine of its own, never will be."""


LEAST_FACTOR, MOST_FACTOR = 0.05, 20.0
"""A schedule whose highest factor is not between them is taken for one of rates."""
INSPECTOR = "spottrain.pipeline.model.inspect"
_LAYOUT = ".layout"
_FRAME = re.compile(r'(?m)^  File "(.+)", line (\d+) in (.+)$')
"""The innermost comes first, as ``faulthandler`` writes them."""


class ToolError(SpottrainError):
    """The process that inspects models failed."""


def inspect_model(config: JobConfig) -> ModelFacts:
    """Return what the tracer finds out about the user's model, now or before.

    Raises:
        UserCodeError: The user's code is missing, raises or misfits.
        ConfigError: The job file names a held-out set or a metric that there is not.
        ToolError: The process that inspects it failed.
    """
    facts = _facts(config)
    if config.semantics == "stale_by_one":
        facts = facts.with_delayed()
    _check_evaluation(config.evaluation, facts)
    if config.lr_schedule_is is None and facts.learning_rates is not None:
        _check_factor(facts.learning_rates, config.steps)
    if config.reduction == "exact" and facts.carried:
        raise UserCodeError(
            f"reduction: exact is impossible: losses or gradients depend on {facts.carried}, "
            "which calls change and other machines do not have; compute it from "
            "spottrain.step(), draw random numbers from torch, random or numpy.random "
            "(seeded for you), or set reduction: fast"
        )
    if config.loader.workers not in ("auto", 0) and facts.unsendable:
        raise ConfigError(
            f"loader.workers: batches cannot go from one process to another: "
            f"{facts.unsendable}; let collate return tensors, in tuples or dictionaries, "
            "or set it to 0"
        )
    if config.device == "gpu" and facts.unmovable:
        raise ConfigError(
            f"batches cannot go to a GPU: collate returns a {facts.unmovable}, whose "
            "tensors spottrain does not find; let collate return tensors, in tuples, "
            "dictionaries or dataclasses"
        )
    return facts


def _check_factor(rates: LearningRates, num_steps: int) -> None:
    """Refuse a schedule that looks like one of learning rates, which are tiny as factors."""
    highest = rates.highest_factor
    if not rates.schedule or LEAST_FACTOR < highest <= MOST_FACTOR:
        return
    schedule = rates.schedule if rates.schedule.isidentifier() else "schedule"
    raise UserCodeError(
        "lr_schedule must return a factor on the optimizer's learning rate, "
        f"{rates.base:g}: got at most {highest:g} in {counted(num_steps, 'step')}, so that the rate "
        f"is at most {rates.base * highest:g}; if it returns the rate, write "
        f"lr_schedule=lambda step: {schedule}(step) / {rates.base:g}; if it is meant as a "
        "factor, set lr_schedule_is: factor in the job file"
    )


def _check_evaluation(asked: EvaluationConfig, facts: ModelFacts) -> None:
    if asked.every_steps and not facts.heldout_sets:
        raise ConfigError(
            "evaluation.every_steps: there is no held-out set to evaluate: give your "
            "TrainingJob heldout="
        )
    name, _, metric = asked.metric.partition("/")
    if name and name not in facts.heldout_sets:
        raise ConfigError(
            f"evaluation.metric: there is no held-out set {name}: got {asked.metric}; "
            f"the sets are {', '.join(facts.heldout_sets) or 'none'}"
        )
    known = (*(f"{one}/loss" for one in facts.heldout_sets), *facts.evaluated)
    if asked.metric and asked.metric not in known:
        raise ConfigError(
            f"evaluation.metric: loss returns no metric {metric} when it evaluates {name}: "
            f"got {asked.metric}; there are {', '.join(known)}"
        )


def _facts(config: JobConfig) -> ModelFacts:
    kept = _kept(config)
    facts: ModelFacts
    try:
        facts = decode(ModelFacts, kept.read_bytes())
    except (FileNotFoundError, WireError):
        data.ensure_data(config)
    else:
        return facts
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        draft, layout = Path(scratch, "facts"), Path(scratch, "layout")
        arguments = ["--layout", str(layout), *_asked(config)]
        facts = decode(ModelFacts, run_tool(INSPECTOR, config, *arguments))
        draft.write_text(encode(facts))
        if layout.exists():
            layout.replace(kept.with_suffix(_LAYOUT))
        draft.replace(kept)
    return facts


def _asked(config: JobConfig) -> list[str]:
    """Return the inspector's arguments for what the job file asks of a model."""
    selective = ["--selective"] if config.selective_recompute else []
    sequence = ["--sequence-parallel"] if config.runtime.sequence_parallel else []
    size, sizes = str(config.tensor_parallel), map(str, config.tensor_sizes)
    return ["--tensor-parallel", size, "--tensor-sizes", *sizes, *sequence, *selective]


def kept_layout(config: JobConfig) -> Path:
    """Return where the layout of an inspected model is kept; it may not be there."""
    return _kept(config).with_suffix(_LAYOUT)


def _kept(config: JobConfig) -> Path:
    key = _key(config)
    return home() / "cache" / "inspect" / f"{key}.json"


def calibrate(
    config: JobConfig,
    on_progress: OnProgress = lambda progress: None,
    *,
    again: bool = False,
) -> Profile:
    """Return a profile of the user's model for this machine.

    It is the one that the job file names; else one that was measured here before, for
    the same model, device and software; else it is measured now, and kept.

    Args:
        on_progress: Called after each step of measuring.
        again: Measure although a profile is kept.

    Raises:
        ConfigError: The profile that the job file names does not fit; it cannot be kept.
        UserCodeError: The user's code is missing, raises or misfits.
        ToolError: The process that inspects it failed.
        MeasuringError: Measuring failed.
    """
    facts = inspect_model(config)
    if not again:
        if (given := profiles.given_profile(config, facts)) is not None:
            return given
        here = devices_here(config).name, machine.software()
        known = profiles.find(facts, config.job_spec(""), *here, config.microbatch_sizes)
        if known is not None:
            return known.profile
    data.ensure_data(config)
    profile = measure_here(config, on_progress)
    profiles.keep(profile)
    return profile


def _key(config: JobConfig) -> str:
    """Return a name for an inspection: a hash of all that its answer depends on."""
    theirs, ours = Path(config.workdir), Path(spottrain.__file__).parent / "pipeline"
    parts = [
        fingerprint(theirs, packed_files(theirs, config.checkpoint.path)),
        fingerprint(ours, sorted(x.relative_to(ours) for x in ours.rglob("*.py"))),
    ]
    parts += [config.entrypoint, str(config.steps), *_asked(config)]
    parts += [spottrain.__version__, sys.version]
    with contextlib.suppress(PackageNotFoundError):
        parts.append(version("torch"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def run_tool(
    module: str,
    config: JobConfig,
    *arguments: str,
    workdir: str = "",
    timeout_s: float | None = TIME_LIMIT_S,
) -> str:
    """Run a module that reads the user's code, in a process that may import torch.

    Args:
        module: Its ``main`` takes entrypoint, workdir and ``arguments``, and ends with
            ``pipeline.model.inspect.answer``.
        *arguments: What else it is given.
        workdir: Where the user's code is; by default where the job file says.
        timeout_s: Bound on its time; ``None``: none.

    Returns:
        What it prints on stdout: a message as JSON.

    Raises:
        UserCodeError, ConfigError: It says so (exit codes 3 and 2).
        ToolError: It refuses, has crashed, or took longer than ``timeout_s``.
    """
    name = module.rpartition(".")[2]
    command = [sys.executable, "-P", "-m", "spottrain.start", module]
    # User code finds the job's steps here.
    own = {"SPOTTRAIN_STEPS": str(config.steps), VARIABLE: ",".join(config.secrets)}
    try:
        done = children.run(
            [*command, config.entrypoint, workdir or config.workdir, *arguments],
            env={**os.environ, **OUTPUT_VARIABLES, **own},
            timeout_s=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        found = _FRAME.search(_text(error.stderr))
        at = f" it was in {found[3]} ({found[1]}, line {found[2]});" if found else ""
        raise ToolError(
            f"{name}: no answer within {timeout_s:.0f} s;{at} make that part of your code faster"
        ) from error
    stdout, stderr = done.stdout.decode(), _text(done.stderr)
    if done.returncode == 0:
        return stdout
    if stdout:
        failure = json.loads(stdout)
        if done.returncode == UserCodeError.exit_code:
            raise UserCodeError(failure["error"], failure["traceback"])
        if done.returncode == ConfigError.exit_code:
            raise ConfigError(failure["error"])
        raise ToolError(failure["error"])
    if "No module named 'torch'" in stderr:
        raise ToolError(
            f"{name}: job files need torch here: pip install torch safetensors; 'spottrain plan' "
            "takes a model's --params or config.json without it"
        )
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    raise ToolError(f"{name}: ended with {done.returncode}: {last}")


def _text(output: bytes | None) -> str:
    return redacted((output or b"").decode(errors="backslashreplace"))
