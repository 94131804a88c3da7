"""``spottrain doctor``: can jobs be run from here, and if not, what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import Finding
from spottrain.errors import SpottrainError
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    console,
    show_json,
)
from spottrain.varuna_manager.config.clouds import (
    AnyCloud,
    AwsConfig,
    AzureConfig,
    GcpConfig,
)
from spottrain.varuna_manager.config.job import JobConfig, load_config
from spottrain.varuna_manager.config.ssh import check_secrets
from spottrain.varuna_manager.launch import control, preflight
from spottrain.varuna_manager.launch.submit import check_checkpoint_path

FileArgument = Annotated[
    Path | None,
    typer.Argument(help="Job file; without one every cloud's account is tried."),
]
SCHEMA_VERSION = 1
_TYPICAL: dict[str, AnyCloud] = {
    "aws": AwsConfig(instance_types=("g5.xlarge",)),
    "azure": AzureConfig(instance_types=("Standard_NC24ads_A100_v4",)),
    "gcp": GcpConfig(instance_types=("g2-standard-4",)),
}
"""What is tried where no job says what it wants."""


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(doctor)


def doctor(file: FileArgument = None, output: OutputOption = Output.TABLE) -> None:
    """Check credentials, permissions, quotas, image and SSH; rents nothing.

    One line each; the exit code is 0 if all is well.
    """
    found = _of_job(load_config(file)) if file is not None else _of_all()
    told = [
        {"provider": where, **asdict(each)} for where, each in _shown(found, output)
    ]
    if output is Output.JSON:
        show_json({"schema_version": SCHEMA_VERSION, "findings": told})
    if not all(each["ok"] for each in told):
        raise typer.Exit(CloudError.exit_code)


def _shown(
    found: Iterator[tuple[str, Finding]], output: Output
) -> Iterator[tuple[str, Finding]]:
    """Show each finding when it is made: some take seconds."""
    out = console()
    for where, each in found:
        if output is Output.TABLE:
            line = f"{'ok  ' if each.ok else 'FAIL'} {where} {each.what}: {each.told}"
            out.print(line, markup=False, soft_wrap=True)
        yield where, each


def _of_all() -> Iterator[tuple[str, Finding]]:
    yield "here", _ssh_client()
    for name, cloud in _TYPICAL.items():
        yield from _of_cloud(name, cloud)


def _of_job(config: JobConfig) -> Iterator[tuple[str, Finding]]:
    yield "here", _ssh_client()
    yield "here", _secrets(config)
    os.environ.update(config.env)
    yield "here", _checkpoints(config)
    for cloud in config.clouds:
        yield from _of_cloud(cloud.cloud, cloud)
    if config.clouds:
        return
    (provider,) = config.resources.providers
    try:
        told = (
            "; ".join(control.check_machines(config)[0]) or "this machine, nothing else"
        )
        yield provider, Finding(what="machines", ok=True, told=told)
    except SpottrainError as error:
        yield provider, Finding(what="machines", ok=False, told=str(error))


def _of_cloud(name: str, cloud: AnyCloud) -> Iterator[tuple[str, Finding]]:
    for each in preflight.findings(cloud):
        yield name, each


def _secrets(config: JobConfig) -> Finding:
    try:
        check_secrets(config.secrets)
    except SpottrainError as error:
        return Finding(what="secrets", ok=False, told=str(error))
    return Finding(
        what="secrets", ok=True, told=f"{len(config.secrets)} named, all set"
    )


def _checkpoints(config: JobConfig) -> Finding:
    place = config.checkpoint.path or "in the job's own state folder"
    try:
        check_checkpoint_path(config)
    except SpottrainError as error:
        return Finding(what="checkpoints", ok=False, told=str(error))
    return Finding(what="checkpoints", ok=True, told=place)


def _ssh_client() -> Finding:
    path = shutil.which("ssh")
    told = path or "no ssh command: jobs run, 'spottrain ssh' does not; install OpenSSH"
    return Finding(what="ssh command", ok=path is not None, told=told)
