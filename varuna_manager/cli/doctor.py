"""``spottrain doctor``: check whether jobs can run from here, and say what to fix."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import Finding, run_check
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    console,
    show_json,
)
from spottrain.varuna_manager.config.clouds import (
    OWN_MACHINES,
    AnyCloud,
    AwsConfig,
    AzureConfig,
    GcpConfig,
)
from spottrain.varuna_manager.config.job import JobConfig, load_config
from spottrain.varuna_manager.launch import machines, preflight
from spottrain.varuna_manager.offers.checks import Check, checks_here

FileArgument = Annotated[
    Path | None,
    typer.Argument(help="Job file; without one, the accounts of all clouds are checked."),
]
SCHEMA_VERSION = 1
_TYPICAL: dict[str, AnyCloud] = {
    "aws": AwsConfig(instance_types=("g5.xlarge",)),
    "azure": AzureConfig(instance_types=("Standard_NC24ads_A100_v4",)),
    "gcp": GcpConfig(instance_types=("g2-standard-4",)),
}
"""Checked where no job file names instance types."""
Status = Literal["ok", "warning", "unused", "failed"]
Result = tuple[str, Finding, Status]
_LABELS: Mapping[Status, str] = {
    "ok": "ok  ",
    "warning": "warn",
    "unused": "-   ",
    "failed": "FAIL",
}


def doctor(file: FileArgument = None, output: OutputOption = Output.TABLE) -> None:
    """Check credentials, permissions, quotas, image and SSH; rents nothing.

    Prints a line per check; exits with 0 unless one fails. A warning is no failure, and
    neither is a cloud for which this machine has no login, unless the job rents from it.
    """
    found = _of_job(load_config(file)) if file is not None else _of_all()
    results = [
        {"provider": where, "status": status, **asdict(each)}
        for where, each, status in _shown(found, output)
    ]
    if output is Output.JSON:
        show_json({"schema_version": SCHEMA_VERSION, "findings": results})
    if any(each["status"] == "failed" for each in results):
        raise typer.Exit(CloudError.exit_code)


def _shown(found: Iterator[Result], output: Output) -> Iterator[Result]:
    """Show each finding as soon as it is known: some take seconds."""
    out = console()
    for where, each, status in found:
        if output is Output.TABLE:
            line = f"{_LABELS[status]} {where} {each.what}: {each.message}"
            out.print(line, markup=False, soft_wrap=True)
        yield where, each, status


def _required(where: str, finding: Finding) -> Result:
    return where, finding, "ok" if finding.ok else "failed"


def _advised(where: str, finding: Finding) -> Result:
    return where, finding, "ok" if finding.ok else "warning"


def _of_all() -> Iterator[Result]:
    yield _advised("here", _ssh_client())
    for name, cloud in _TYPICAL.items():
        found = preflight.findings(cloud)
        first = next(found)
        if first.ok or preflight.has_login(name):
            yield _required(name, first)
            yield from (_required(name, each) for each in found)
        else:
            yield name, first, "unused"


def _of_job(config: JobConfig) -> Iterator[Result]:
    yield _advised("here", _ssh_client())
    for check in checks_here(config):
        yield _required("here", _finding(check))
    for cloud in config.clouds:
        for each in preflight.findings(cloud, config.resources.max_vms):
            yield _required(cloud.cloud, each)
    if config.clouds:
        yield _required("here", run_check("torch", lambda: _build(config)))
        yield _required("here", _bucket_access(config))
        yield _advised("here", _traffic(config))
        return
    (provider,) = config.resources.providers
    check = Check(what="machines", run=lambda: machines.check_machines(config)[0])
    yield _required(provider, _finding(check))
    if provider in OWN_MACHINES:
        yield _advised("here", _traffic(config))


def _finding(check: Check) -> Finding:
    return run_check(check.what, lambda: "; ".join(check.run()))


def _build(config: JobConfig) -> str:
    return "; ".join(preflight.check_build(config)) or "no GPU is asked for"


def _bucket_access(config: JobConfig) -> Finding:
    lines = preflight.check_bucket_access(config)
    return Finding(
        what="checkpoints from VMs",
        ok=not lines,
        message="; ".join(lines) or "VMs have credentials, as far as the job file says",
    )


def _traffic(config: JobConfig) -> Finding:
    where = "the network of one region"
    if config.resources.provider == "ssh":
        where = "your hosts' network"
    elif config.cluster is not None:
        where = "the cluster's network"
    if config.resources.span != "region":
        named = ", ".join(f"{c.cloud}.{c.network_key}" for c in config.clouds)
        where = f"your own network between regions ({named}), which must be private"
    elif any(isinstance(c, AzureConfig) and c.subnets for c in config.clouds):
        where = "azure.subnets, where all machines of that network and its peers reach them"
    message = (
        "VMs send each other weights and activations NOT encrypted and NOT "
        f"authenticated, inside {where}"
    )
    return Finding(what="traffic between VMs", ok=False, message=message)


def _ssh_client() -> Finding:
    path = shutil.which("ssh")
    message = path or "none: 'spottrain ssh' does not work, jobs do; install OpenSSH"
    return Finding(what="ssh command", ok=path is not None, message=message)
