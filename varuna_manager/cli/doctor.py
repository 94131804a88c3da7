"""``spottrain doctor``: check whether jobs can run from here, and say what to fix."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import Finding, run_check
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
    typer.Argument(
        help="Job file; without one, the accounts of all clouds are checked."
    ),
]
SCHEMA_VERSION = 1
_TYPICAL: dict[str, AnyCloud] = {
    "aws": AwsConfig(instance_types=("g5.xlarge",)),
    "azure": AzureConfig(instance_types=("Standard_NC24ads_A100_v4",)),
    "gcp": GcpConfig(instance_types=("g2-standard-4",)),
}
"""Checked where no job file names instance types."""


def doctor(file: FileArgument = None, output: OutputOption = Output.TABLE) -> None:
    """Check credentials, permissions, quotas, image and SSH; rents nothing.

    Prints a line per check; exits with 0 if all pass.
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
    """Show each finding as soon as it is known: some take seconds."""
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
        yield from _of_cloud(cloud.cloud, cloud, config.resources.max_vms)
    if config.clouds:
        torch = run_check("torch", lambda: _build(config))
        yield "here", torch
        yield "here", _bucket_access(config)
        yield "here", _traffic(config)
        return
    (provider,) = config.resources.providers
    try:
        told = "; ".join(control.check_machines(config)[0])
        yield provider, Finding(what="machines", ok=True, told=told)
    except SpottrainError as error:
        yield provider, Finding(what="machines", ok=False, told=str(error))


def _build(config: JobConfig) -> str:
    return "; ".join(preflight.check_build(config)) or "no GPU is asked for"


def _bucket_access(config: JobConfig) -> Finding:
    lines = preflight.check_bucket_access(config)
    return Finding(
        what="checkpoints from VMs",
        ok=not lines,
        told="; ".join(lines) or "VMs have credentials, as far as the job file says",
    )


def _traffic(config: JobConfig) -> Finding:
    where = "the network of one region"
    if config.resources.span != "region":
        named = ", ".join(f"{c.cloud}.{c.network_key}" for c in config.clouds)
        where = f"your own network between regions ({named}), which must be private"
    elif any(isinstance(c, AzureConfig) and c.subnets for c in config.clouds):
        where = (
            "azure.subnets, where all machines of that network and its peers reach them"
        )
    told = (
        "VMs send each other weights and activations NOT encrypted and NOT "
        f"authenticated, inside {where}"
    )
    return Finding(what="traffic between VMs", ok=True, told=told)


def _of_cloud(
    name: str, cloud: AnyCloud, max_vms: int = 0
) -> Iterator[tuple[str, Finding]]:
    for each in preflight.findings(cloud, max_vms):
        yield name, each


def _secrets(config: JobConfig) -> Finding:
    try:
        check_secrets(config.secrets)
    except SpottrainError as error:
        return Finding(what="secrets", ok=False, told=str(error))
    return Finding(
        what="secrets", ok=True, told=f"{len(config.secrets)} named, all are set"
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
    told = path or "none: 'spottrain ssh' does not work, jobs do; install OpenSSH"
    return Finding(what="ssh command", ok=path is not None, told=told)
