"""``spottrain gc``: find orphaned VMs in all regions of all clouds."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import FindsOrphans, ReleasesJob, Vm, VmState
from spottrain.cloud.process.child import ChildProvider
from spottrain.errors import ConfigError
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.config.clouds import (
    AnyCloud,
    AwsConfig,
    AzureConfig,
    GcpConfig,
)
from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.format import age, dollars
from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.launch.providers import open_cloud

SCHEMA_VERSION = 1
_CLOUDS: dict[str, AnyCloud] = {
    "aws": AwsConfig(),
    "azure": AzureConfig(),
    "gcp": GcpConfig(),
}
_ALIVE = (VmState.STARTING, VmState.RUNNING)

FileArgument = Annotated[
    Path | None,
    typer.Argument(help="Job file that names the account; else the SDKs' default."),
]
CloudOption = Annotated[
    list[str] | None,
    typer.Option("--cloud", help="aws, azure or gcp; repeatable; by default all."),
]
JobOption = Annotated[
    list[str] | None,
    typer.Option("--job", help="Only these jobs; also removes what their VMs shared."),
]
YesOption = Annotated[
    bool, typer.Option("--yes", help="Return the VMs; without it they are only shown.")
]


def gc(
    file: FileArgument = None,
    cloud: CloudOption = None,
    job: JobOption = None,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show VMs that have no manager on this machine; --yes returns them.

    VMs of a job that is managed from another machine look like orphans here: check whose
    they are before you pass --yes, or name jobs with --job. Jobs whose manager runs on a
    VM of its own are left alone unless you name them.
    """
    found: list[Vm] = []
    failed: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, asked in _chosen_clouds(file, cloud).items():
        try:
            vms, trouble = _sweep(asked, job or (), yes)
        except CloudError as error:
            failed[name] = str(error)
            continue
        found += vms
        if trouble:
            left[name] = "; ".join(trouble)
    _show(found, failed, left, yes, output)
    if left or (failed and (file is not None or cloud or len(failed) == len(_CLOUDS))):
        raise typer.Exit(CloudError.exit_code)


def _chosen_clouds(
    file: Path | None, names: Sequence[str] | None
) -> dict[str, AnyCloud]:
    """Return the clouds to ask, by name."""
    clouds = _CLOUDS
    if file is not None:
        config = load_config(file)
        if not config.clouds:
            raise ConfigError(
                f"{file.name}: resources.provider: nothing is rented from "
                f"{config.resources.provider}; name a job file with a cloud"
            )
        clouds = {cloud.cloud: cloud for cloud in config.clouds}
    for name in names or ():
        if name not in clouds:
            raise ConfigError(f"--cloud must be one of {', '.join(clouds)}: got {name}")
    return {name: each for name, each in clouds.items() if not names or name in names}


def _sweep(
    cloud: AnyCloud, jobs: Collection[str], yes: bool
) -> tuple[list[Vm], list[str]]:
    """Return the orphans of one cloud, terminated if ``yes``, and what failed.

    Raises:
        CloudError: the cloud cannot be asked.
    """
    provider = open_cloud(cloud, everywhere=True)
    try:
        orphans = list(_orphans(provider, jobs))
        if yes:
            lost = [vm for vm in orphans if vm.job in jobs or not is_kept(vm, orphans)]
            try:
                provider.terminate([vm.vm_id for vm in lost])
            except CloudError as error:
                return [], [str(error)]
            return lost, _release(provider, {vm.job for vm in lost} | set(jobs))
        return orphans, []
    finally:
        provider.close()


def is_kept(vm: Vm, vms: Collection[Vm]) -> bool:
    """Return whether a VM's job has a live manager on one of these VMs."""
    return any(
        one.job == vm.job and one.intent == tags.MANAGER and one.state in _ALIVE
        for one in vms
    )


def _orphans(provider: ChildProvider, jobs: Collection[str]) -> Iterator[Vm]:
    if not isinstance(provider, FindsOrphans):
        raise CloudError(
            f"{provider.name}: cannot search for orphans; check the cloud's console"
        )
    for vm in provider.list_all():
        wanted = not jobs or vm.job in jobs
        there = vm.state is not VmState.TERMINATED  # a stopped one still has its disk
        if wanted and there and not job_dir(vm.job).is_managed():
            yield vm


def _release(provider: ChildProvider, jobs: Collection[str]) -> list[str]:
    """Remove what the jobs' VMs shared; return why some of it is left."""
    trouble: list[str] = []
    if isinstance(provider, ReleasesJob):
        for name in sorted(jobs):
            if not job_dir(name).is_managed():
                try:
                    provider.release(name)
                except CloudError as error:
                    trouble.append(str(error))
    return trouble


def _show(
    vms: list[Vm],
    failed: dict[str, str],
    left: dict[str, str],
    yes: bool,
    output: Output,
) -> None:
    for name, why in failed.items():
        say(f"{name}: not asked: {why}")
    for name, why in left.items():
        say(f"{name}: not everything was removed: {why}")
    if output is Output.JSON:
        show_json(
            {
                "schema_version": SCHEMA_VERSION,
                "returned": yes,
                "vms": [_document(vm) for vm in vms],
                "failed": failed,
                "left": left,
            }
        )
        return
    if vms:
        show(_table(vms))
    lost = vms if yes else [vm for vm in vms if not is_kept(vm, vms)]
    rate = sum(vm.offer.usd_per_hour for vm in lost if vm.state in _ALIVE)
    what = f"{len(lost)} VMs without a manager here, {dollars(rate)} an hour"
    hint = "; 'spottrain gc --yes' returns them" if lost and not yes else ""
    for name in sorted({vm.job for vm in vms} - {vm.job for vm in lost}):
        say(
            f"job {name} has its manager on a VM of its own and is no orphan; 'spottrain gc "
            f"--job {name} --yes' ends it anyway"
        )
    say(f"{'returned: ' if yes and vms else ''}{what}{hint}")


def _document(vm: Vm) -> dict[str, Any]:
    return {**asdict(vm), "state": vm.state.value}


def _table(vms: Sequence[Vm]) -> Table:
    table = Table("CLOUD", "ZONE", "VM", "STATE", "TYPE", "JOB", box=None)
    for name in ("AGE", "$/HOUR"):
        table.add_column(name, justify="right")
    for vm in vms:
        offer = vm.offer
        table.add_row(
            offer.cloud,
            offer.zone,
            vm.vm_id,
            vm.state.value,
            offer.instance_type,
            f"{vm.job} (manager)" if vm.intent == tags.MANAGER else vm.job,
            age(time.time() - vm.launched_at_s),
            dollars(offer.usd_per_hour),
        )
    return table
