"""``spottrain sweep``: one job for each value of some keys, all in one pool."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from spottrain.errors import ConfigError, SpottrainError
from spottrain.suggest import did_you_mean
from spottrain.units import counted
from spottrain.varuna_manager.cli.arguments import EnvOption, SetOption
from spottrain.varuna_manager.cli.console import Output, OutputOption, say, show, show_json
from spottrain.varuna_manager.cli.pool.submit import (
    PreparedJob,
    find_open,
    plan,
    prepare,
    submit_job,
)
from spottrain.varuna_manager.config.files import read_job_file
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.config.overrides import (
    Overrides,
    overridden,
    read_overrides,
    split,
    value_of,
)
from spottrain.varuna_manager.config.pool import load_job_of
from spottrain.varuna_manager.pool.store.folder import PoolDir


def sweep(
    file: Annotated[Path, typer.Argument(help="Job file: YAML or TOML.")],
    grid: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE,VALUE...",
            help="Key of the job file, or variable of its env, and its values; with several "
            "keys, one job for each combination.",
        ),
    ],
    pool: Annotated[str, typer.Option(help="Submit the jobs to this pool.")],
    priority: Annotated[float, typer.Option(help="Weight of each against other jobs.")] = 1.0,
    team: Annotated[str, typer.Option(help="The team that they belong to.")] = "",
    settings: SetOption = None,
    env: EnvOption = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps of each.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run all checks and print the names; submits nothing.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Submit a job to a pool for each of several values: sweep job.yaml lr=1e-3,3e-4.

    Names say the values, as in job-lr-1e-3, and are added to checkpoint.path. All jobs are
    checked before the first is submitted.
    """
    place = find_open(pool)
    jobs = list(combinations(file, grid, read_overrides(settings or (), env or (), steps=steps)))
    for overrides in jobs:
        load_job_of(place.config(), file, overrides)  # all files before the first model
    say_once = functools.cache(say)  # most of what is said of one job is true of all
    prepared = [
        prepare(place, file, priority, team, say_once, overrides=overrides) for overrides in jobs
    ]
    names = [each.config.name for each in prepared]
    answers = [plan(place, each) for each in prepared]
    if not dry_run:
        answers = list(_submitted(place, prepared))
    if output is Output.JSON:
        pairs = zip(names, answers, strict=True)
        show_json([{"name": name, "pool": pool, **answer} for name, answer in pairs])
    else:
        show(*names)


def _submitted(pool: PoolDir, jobs: Sequence[PreparedJob]) -> Iterator[dict[str, Any]]:
    """Submit jobs; yield the pool's answers."""
    for count, each in enumerate(jobs):
        try:
            yield submit_job(pool, each, say)
        except SpottrainError:  # others were faster, or the ones before fill the pool's caps
            if count:
                say(f"{count} of {counted(len(jobs), 'job')} were submitted before this")
            raise


def combinations(file: Path, grid: Sequence[str], fixed: Overrides) -> Iterator[Overrides]:
    """Yield the values of the command line for each job of a sweep, its name among them.

    Args:
        grid: ``KEY=VALUE,VALUE``; one job for each combination.
        fixed: Values of all jobs.

    Raises:
        ConfigError: A key is unknown or given twice, or two jobs would have one name.
    """
    data, _ = overridden(*read_job_file(file), fixed, file.name)
    data = data if isinstance(data, dict) else {}  # refused with the first job
    axes: dict[str, list[tuple[str, Any]]] = {}
    for text in grid:
        given, values = split(text, "sweep", "env.LR=1e-3,3e-4")
        if (key := _key(given, data.get("env"))) in axes or key in fixed:
            raise ConfigError(f"{key}: is given twice on the command line; remove one")
        axes[key] = _labelled(key, values)
    names = set()
    for chosen in itertools.product(*axes.values()):
        values_of = {key: value for key, (_, value) in zip(axes, chosen, strict=True)}
        parts = [
            f"{_slug(key.rpartition('.')[2])}-{_slug(label)}"
            for key, (label, _) in zip(axes, chosen, strict=True)
        ]
        name = "-".join([str(data.get("name")), *parts])
        if name in names:
            raise ConfigError(f"two jobs would be named {name}; give each value once")
        names.add(name)
        own: dict[str, Any] = {"name": name}
        checkpoint = data.get("checkpoint")
        if isinstance(checkpoint, Mapping) and isinstance(path := checkpoint.get("path"), str):
            own["checkpoint.path"] = f"{path.rstrip('/')}/{name}"
        yield {**fixed, **own, **values_of}


def _key(given: str, env: object) -> str:
    """Return the key of the job file that is meant: its own, or a variable of ``env``.

    Raises:
        ConfigError: It is neither.
    """
    if given.partition(".")[0] in JobConfig.model_fields:
        return given  # the rest of it is checked as the file is
    variables = env if isinstance(env, Mapping) else {}
    fitting = [name for name in variables if name.casefold() == given.casefold()]
    if len(fitting) == 1:
        return f"env.{fitting[0]}"
    hint = did_you_mean(given, {*JobConfig.model_fields, *variables})
    raise ConfigError(
        f"{given}: is no key of the job file, and no variable that its env has; "
        f"{hint or f'for a variable of your code write env.{given}'}"
    )


def _labelled(key: str, text: str) -> list[tuple[str, Any]]:
    """Return values that are separated by commas, each with what names it."""
    values = value_of(key, f"[{text}]")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{key}: must have values, such as 1e-3,3e-4: got {text!r}")
    labels = text.split(",")
    if len(labels) != len(values):  # some are lists, or texts with commas
        labels = [json.dumps(value) for value in values]
    return list(zip(labels, values, strict=True))


def _slug(text: str) -> str:
    """Return a text as a part of a job's name."""
    return re.sub(r"[^a-z0-9-]+", "-", text.strip().lower()).rstrip("-")
