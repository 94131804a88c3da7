"""``spottrain gc``: find orphaned VMs in all regions of all clouds."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import (
    CloudProvider,
    Vm,
    VmState,
)
from spottrain.errors import ConfigError
from spottrain.eventlog.journal import JournalError
from spottrain.units import counted
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
from spottrain.varuna_manager.config.job import AnyCluster, load_config
from spottrain.varuna_manager.format import age, dollars
from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.launch.machines import open_cluster
from spottrain.varuna_manager.launch.providers import open_cloud
from spottrain.varuna_manager.reporting.columns import columns

Asked = AnyCloud | AnyCluster
SCHEMA_VERSION = 1
_CLOUDS: dict[str, AnyCloud] = {
    "aws": AwsConfig(),
    "azure": AzureConfig(),
    "gcp": GcpConfig(),
}
_ELSEWHERE = "is not of this machine: another may manage it"

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
AllOwnersOption = Annotated[
    bool, typer.Option("--all-owners", help="VMs of everybody in the account.")
]
YesOption = Annotated[
    bool, typer.Option("--yes", help="Return the VMs; without it they are only shown.")
]


def gc(
    file: FileArgument = None,
    cloud: CloudOption = None,
    job: JobOption = None,
    all_owners: AllOwnersOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show your VMs that have no manager on this machine; --yes returns them.

    Yours are those that your credentials rented, or that name the owner of the job file;
    --all-owners shows those of everybody. VMs without an owner are shown, and returned only
    with --job or --all-owners. A job that this machine does not know may have its manager on
    another machine: --yes asks before it returns its VMs, and leaves them alone where nobody
    can answer, unless --job names the job. The same holds for jobs whose manager runs on a
    VM of its own.
    """
    scope = Scope(jobs=tuple(job or ()), all_owners=all_owners, file=file)
    found: list[Vm] = []
    failed: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, asked in _chosen_clouds(file, cloud).items():
        try:
            vms, trouble = sweep(asked, scope, yes)
        except CloudError as error:
            failed[name] = str(error)
            continue
        found += vms
        if trouble:
            left[name] = "; ".join(trouble)
    _show(found, failed, left, scope, yes, output)
    if left or (failed and (file is not None or cloud or len(failed) == len(_CLOUDS))):
        raise typer.Exit(CloudError.exit_code)


def _chosen_clouds(file: Path | None, names: Sequence[str] | None) -> dict[str, Asked]:
    """Return the clouds to ask, by name."""
    clouds: dict[str, Asked] = {**_CLOUDS}
    if file is not None:
        config = load_config(file)
        if config.cluster is not None:
            clouds = {config.resources.providers[0]: config.cluster}
        elif not config.clouds:
            raise ConfigError(
                f"{file.name}: resources.provider: nothing is rented from "
                f"{config.resources.provider}; name a job file with a cloud"
            )
        else:
            clouds = {cloud.cloud: cloud for cloud in config.clouds}
    for name in names or ():
        if name not in clouds:
            raise ConfigError(f"--cloud must be one of {', '.join(clouds)}: got {name}")
    return {name: each for name, each in clouds.items() if not names or name in names}


@dataclass(frozen=True)
class Scope:
    """The VMs that are looked for."""

    jobs: tuple[str, ...] = ()
    """Names of jobs; empty: all."""
    all_owners: bool = False
    """Also what others rented."""
    file: Path | None = None
    """The job file that names the account."""

    def command(self, options: str) -> str:
        """Return the command that does more in the same account."""
        file = f"{self.file} " if self.file else ""
        return f"'spottrain gc {file}{options}'"

    def returns(self, vm: Vm, orphans: Collection[Vm]) -> bool:
        """Return whether a VM is returned, of those that are shown."""
        if vm.job in self.jobs:
            return True
        ours = bool(vm.owner) or self.all_owners
        return ours and _is_known(vm) and not is_kept(vm, orphans)


def _open(cloud: Asked, name: str = "gc", uid: str = "") -> CloudProvider:
    """Return the provider of an account.

    Args:
        name: Of a job.
        uid: Its unique id.
    """
    if isinstance(cloud, AnyCluster):
        return open_cluster(cloud, job_dir(name).cloud, uid)
    return open_cloud(cloud, uid=uid, everywhere=True)


def sweep(cloud: Asked, scope: Scope, yes: bool) -> tuple[list[Vm], list[str]]:
    """Return the orphans of one cloud, and what failed; with ``yes``, those that were
    terminated.

    Raises:
        CloudError: the cloud cannot be asked.
    """
    provider = _open(cloud)
    try:
        orphans = list(_orphans(provider, scope))
    finally:
        provider.close()
    if not yes:
        return orphans, []
    agreed = tuple(job for job in _unknown(orphans, scope) if _agrees(job, scope))
    scope = replace(scope, jobs=(*scope.jobs, *agreed))
    jobs: dict[tuple[str, str], list[Vm]] = {(name, _uid_here(name)): [] for name in scope.jobs}
    for vm in orphans:
        if scope.returns(vm, orphans):
            jobs.setdefault((vm.job, vm.uid), []).append(vm)
    returned: list[Vm] = []
    trouble: list[str] = []
    for (name, uid), lost in jobs.items():
        if _is_managed(name, uid):
            continue
        # The same provider for both: lists lag behind, and it knows what it has terminated.
        provider = _open(cloud, name, uid)
        try:
            provider.terminate([vm.vm_id for vm in lost])
            returned += lost
            provider.release(name)
        except CloudError as error:
            trouble.append(str(error))
        finally:
            provider.close()
    return returned, trouble


def _uid_here(name: str) -> str:
    """Return the unique id of a job of this machine, empty if there is none."""
    try:
        return uid_of(job_dir(name))
    except (JournalError, OSError, StopIteration):
        return ""


def _is_known(vm: Vm) -> bool:
    """Return whether a VM's job is one of this machine."""
    return bool(vm.uid) and _uid_here(vm.job) == vm.uid


def _unknown(vms: Collection[Vm], scope: Scope) -> list[str]:
    """Return the jobs that another machine may manage, of those that were not named."""
    unknown = {vm.job for vm in vms if not _is_known(vm) and not is_kept(vm, vms)}
    return sorted(unknown.difference(scope.jobs))


def _agrees(job: str, scope: Scope) -> bool:
    """Ask a person whether to return a job's VMs; no, where nobody can answer."""
    if sys.stdin.isatty():
        return typer.confirm(f"job {job} {_ELSEWHERE}. Return its VMs?", err=True)
    say(f"job {job} {_ELSEWHERE}; {_ends(job, scope)}")
    return False


def _ends(job: str, scope: Scope) -> str:
    return f"{scope.command(f'--job {job} --yes')} ends it anyway"


def is_kept(vm: Vm, vms: Collection[Vm]) -> bool:
    """Return whether a VM's job has a live manager on one of these VMs."""
    return any(
        (one.job, one.uid) == (vm.job, vm.uid) and one.intent == tags.MANAGER and one.state.is_alive
        for one in vms
    )


def _orphans(provider: CloudProvider, scope: Scope) -> Iterator[Vm]:
    us = "" if scope.all_owners else provider.principal()
    for vm in provider.list_all():
        wanted = not scope.jobs or vm.job in scope.jobs
        ours = not us or vm.owner in ("", us)
        there = vm.state is not VmState.TERMINATED  # a stopped one still has its disk
        if wanted and ours and there and not _is_managed(vm.job, vm.uid):
            yield vm


def _is_managed(name: str, uid: str) -> bool:
    """Return whether a manager on this machine looks after a job."""
    return job_dir(name).is_managed() and uid in ("", _uid_here(name))


def _show(
    vms: list[Vm],
    failed: dict[str, str],
    left: dict[str, str],
    scope: Scope,
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
    lost = vms if yes else [vm for vm in vms if scope.returns(vm, vms)]
    orphans = [vm for vm in vms if vm in lost or not is_kept(vm, vms)]
    rate = sum(vm.offer.usd_per_hour for vm in orphans if vm.state.is_alive)
    what = f"{counted(len(orphans), 'VM')} without a manager here, {dollars(rate)} an hour"
    hint = f"; {scope.command('--yes')} returns them" if lost and not yes else ""
    kept = {vm.job for vm in vms if is_kept(vm, vms)}
    for name in sorted({vm.job for vm in vms} - {vm.job for vm in lost}):
        why = _ELSEWHERE
        if name in kept:
            why = "has its manager on a VM of its own and is no orphan"
        say(f"job {name} {why}; {_ends(name, scope)}")
    say(f"{'returned: ' if yes and vms else ''}{what}{hint}")


def _document(vm: Vm) -> dict[str, Any]:
    return {**asdict(vm), "state": vm.state.value}


def _table(vms: Sequence[Vm]) -> Table:
    table = columns("CLOUD", "ZONE", "VM", "STATE", "TYPE", "JOB", "r:AGE", "r:$/HOUR")
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
