"""``spottrain pool``: create a pool, watch it, change it, end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live

from spottrain.cloud.slurm.settings import INSTANCE_TYPE
from spottrain.errors import ConfigError, SpottrainError
from spottrain.pricing.sharing.solver import check_solver
from spottrain.units import counted
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    console,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.cli.pool.submit import (
    PreparedJob,
    find_open,
    plan,
    prepare,
    submit_job,
)
from spottrain.varuna_manager.config.overrides import Overrides
from spottrain.varuna_manager.config.pool import PoolConfig, load_pool
from spottrain.varuna_manager.config.ssh import check_secrets
from spottrain.varuna_manager.core.model.state import kind_of
from spottrain.varuna_manager.jobs.follow import folder_of
from spottrain.varuna_manager.pool.core.model import (
    PoolCreated,
    PoolJobPhase,
    PoolState,
)
from spottrain.varuna_manager.pool.report.document import read_pool
from spottrain.varuna_manager.pool.report.document import status as read_status
from spottrain.varuna_manager.pool.report.forecast import plan_document, plan_lines
from spottrain.varuna_manager.pool.report.page import divisions, report_page
from spottrain.varuna_manager.pool.report.tables import parts
from spottrain.varuna_manager.pool.store.client import ask_pool, read_changes, start_daemon
from spottrain.varuna_manager.pool.store.folder import (
    PoolDir,
    create_pool,
)
from spottrain.varuna_manager.pool.store.settings import settings_of, supplies_of
from spottrain.varuna_manager.reporting.html.page import write_page

REFRESH_S = 0.5
PLAIN_S = 5.0
"""Time between lines where there is no terminal."""
NameArgument = Annotated[str, typer.Argument(help="Name of a pool.")]
OptionalNameArgument = Annotated[
    str | None,
    typer.Argument(help="Name of a pool; may be left out if there is only one."),
]


def create(
    file: Annotated[Path, typer.Argument(help="Pool file: YAML or TOML.")],
    until_done: Annotated[
        bool,
        typer.Option(
            "--until-done",
            help="Watch until the jobs of the file have ended, then take the pool down.",
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a pool and start its daemon; submit the jobs that its file names."""
    check_solver()
    config = load_pool(file)
    supplies = supplies_of(config, _prices(config))
    _warn_of_others(config)
    settings = settings_of(config)
    created = PoolCreated(at_s=time.time(), settings=settings, supplies=supplies)
    pool = create_pool(config, created)
    pid = start_daemon(pool)
    say(f"pool {pool.name} runs (pid {pid}): {counted(config.max_vms, 'VM')}, {config.policy}")
    try:
        _submit_all(pool, config)
        if until_done:
            _watch(pool, _are_over)
    except KeyboardInterrupt:
        say(
            f"pool {pool.name} goes on, with {len(read_pool(pool).jobs)} of the "
            f"{counted(len(config.jobs), 'job')} of its file: 'spottrain pool status {pool.name} "
            f"--watch' shows it, 'spottrain pool down {pool.name}' ends it"
        )
        raise
    if until_done:
        take_down(pool)
    if until_done or output is Output.JSON:
        _show(pool, output)


def _prices(config: PoolConfig) -> dict[str, float]:
    """Return the highest price of each kind of VM that the pool may rent, USD per hour."""
    found: dict[str, float] = {}
    if config.clouds == "local":
        for zone in config.local.specs:
            prices = [zone.spot_usd_per_hour]
            prices += [zone.on_demand_usd_per_hour] * config.allow_on_demand
            kind = f"local/{zone.instance_type}"
            found[kind] = max(found.get(kind, 0.0), *prices)
        return found
    if config.clouds == "slurm":
        return {f"slurm/{INSTANCE_TYPE}": config.slurm.usd_per_hour}
    # Not above: it imports the cloud adapters, which other commands do not need.
    from spottrain.varuna_manager.launch import preflight

    sections = [getattr(config, name) for name in config.providers]
    offers, lines = preflight.before_launch(sections)
    for line in lines:
        say(line)
    for offer in offers:
        if offer.spot or config.allow_on_demand:
            kind = kind_of(offer)
            found[kind] = max(found.get(kind, 0.0), offer.usd_per_hour)
    return found


def _warn_of_others(config: PoolConfig) -> None:
    """Warn of other pools that rent from the same quota."""
    for pool in PoolDir.all():
        if pool.is_down or pool.name == config.name:
            continue
        if shared := sorted({*config.providers} & {*pool.config().providers}):
            say(
                f"warning: pool {pool.name} rents from {', '.join(shared)} too: two pools "
                "on one quota do not know of each other's VMs"
            )


def _submit_all(pool: PoolDir, config: PoolConfig) -> None:
    """Submit the jobs that the pool file names, each when it is due."""
    jobs = config.jobs
    prepared = [prepare(pool, Path(job.file), job.priority, job.team, say) for job in jobs]
    before: PreparedJob | None = None
    for one, job in zip(prepared, jobs, strict=True):
        if before is not None and job.after_steps:
            examples = job.after_steps * before.config.minibatch_size
            _watch(pool, partial(_has_trained, before.config.name, examples))
        submit_job(pool, one, say)
        before = one


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What ``launch --pool`` and ``plan --pool`` are given."""

    file: Path
    pool: str
    priority: float | None = None
    team: str | None = None
    with_vm: bool = False
    adopt: bool = False
    """Take over the checkpoints of another job."""
    overrides: Overrides = field(default_factory=dict)
    """Values that replace the file's."""


def launch(asked: SubmitOptions, output: Output, *, is_dry: bool) -> None:
    """Submit a job to a pool, or say what would come of it."""
    if asked.with_vm:
        raise ConfigError("--manager-vm: a pool starts the managers of its jobs; leave it out")
    pool = find_open(asked.pool)
    weight = 1.0 if asked.priority is None else asked.priority
    prepared = prepare(
        pool,
        asked.file,
        weight,
        asked.team or "",
        say,
        adopt=asked.adopt,
        overrides=asked.overrides,
    )
    if not is_dry:
        answer = submit_job(pool, prepared, say)
        if output is Output.JSON:
            show_json({"name": prepared.config.name, "pool": pool.name, **answer})
        return
    planned, now = plan(pool, prepared), read_status(pool)
    document = plan_document(prepared.request, planned, now, time.time())
    if output is Output.JSON:
        show_json(document)
    else:
        show(*plan_lines(document))


def status(
    name: OptionalNameArgument = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh until the pool is taken down.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a pool: its jobs, the VMs that each is granted and holds, and why."""
    pool = _the_pool(name)
    if watch and output is Output.TABLE:
        _watch(pool)
    else:
        _show(pool, output)


def _the_pool(name: str | None) -> PoolDir:
    """Return a pool by its name, or the only one there is."""
    if name is not None:
        return PoolDir.find(name)
    pools = [pool for pool in PoolDir.all() if not pool.is_down]
    if len(pools) != 1:
        known = ", ".join(pool.name for pool in pools) or "none"
        raise ConfigError(f"name a pool: this machine has {known}")
    return pools[0]


def _watch(pool: PoolDir, is_over: Callable[[PoolState], bool] | None = None) -> None:
    """Show a pool until it is taken down, or what is waited for has come."""
    screen, shown_at_s = console(stderr=True), 0.0
    with Live(console=screen, auto_refresh=False, transient=False) as live:
        while True:
            document = read_status(pool)
            if screen.is_terminal:
                live.update(Group(*parts(document)), refresh=True)
            elif time.monotonic() - shown_at_s > PLAIN_S:
                shown_at_s = time.monotonic()
                say(_line(document))
            if document["state"] in ("down", "unserved"):
                break
            if is_over is not None and is_over(read_pool(pool)):
                break
            time.sleep(REFRESH_S)
    if document["state"] == "unserved":
        raise SpottrainError(
            f"pool {pool.name}: its daemon does not run; 'spottrain pool resume {pool.name}' "
            "starts it again"
        )


def _are_over(state: PoolState) -> bool:
    return all(job.phase is PoolJobPhase.ENDED for job in state.jobs.values())


def _has_trained(name: str, examples: float, state: PoolState) -> bool:
    """Return whether a job has trained so many examples, or will train no more."""
    job = state.jobs[name]
    return job.phase is PoolJobPhase.ENDED or job.examples_done >= examples


def _line(document: dict[str, Any]) -> str:
    """Return a pool's status in a line."""
    jobs = "; ".join(
        f"{job['name']} {job['state']}, {counted(sum(job['vms'].values()), 'VM')}, step "
        f"{job['steps_done']} of {job['steps']}"
        for job in document["jobs"]
    )
    return f"pool {document['name']}: {jobs or 'no jobs'}"


def report(
    name: OptionalNameArgument = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the page here; else into its folder.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a page on a pool: which job held which VMs when, and how each ended."""
    pool = _the_pool(name)
    if output is Output.JSON:
        changes = [change._asdict() for change in divisions(pool)]
        show_json({**read_status(pool), "allocations": changes})
        return
    file = html or pool.page
    write_page(file, report_page(pool))
    show(str(file))


def set_command(
    name: NameArgument,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help="max_vms, policy, budget.max_usd, budget.max_usd_per_hour, "
            "teams.NAME.weight, jobs.NAME.priority, ...; 'none' removes a limit.",
        ),
    ],
    output: OutputOption = Output.TABLE,
) -> None:
    """Change the policy, caps and weights of a pool, or the priority of a job."""
    pool = PoolDir.find(name)
    ask_pool(pool, "set", {"changes": read_changes(changes)})
    _show(pool, output)


def _show(pool: PoolDir, output: Output) -> None:
    document = read_status(pool)
    if output is Output.JSON:
        show_json(document)
    else:
        show(*parts(document))


def pause(
    name: NameArgument,
    job: Annotated[str, typer.Argument(help="Name of a job of the pool.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Pause a job: it saves a checkpoint, and others get its VMs."""
    pool = PoolDir.find(name)
    ask_pool(pool, "pause", {"job": job, "is_paused": True})
    _show(pool, output)


def resume(
    name: NameArgument,
    job: Annotated[
        str | None,
        typer.Argument(help="Name of a job of the pool that was paused or has failed."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Resume a job; without a job, restart the pool's daemon."""
    pool = PoolDir.find(name)
    if pool.is_down:
        raise ConfigError(
            f"pool {name} was taken down; see 'spottrain pool report {name}', or create it again"
        )
    if not pool.is_managed():
        _check_secrets(pool)
        say(f"pool {name} runs again (pid {start_daemon(pool)})")
    elif job is None:
        raise ConfigError(
            f"pool {name} is running; watch it with 'spottrain pool status {name} --watch'"
        )
    if job is not None:
        ask_pool(pool, "pause", {"job": job, "is_paused": False})
    _show(pool, output)


def _check_secrets(pool: PoolDir) -> None:
    """Check that this shell has the secrets of all jobs that have not ended: the daemon
    that had them is dead, and a manager that it starts anew needs them.

    Raises:
        ConfigError: One is missing.
    """
    for name, job in read_pool(pool).jobs.items():
        if job.phase is not PoolJobPhase.ENDED:
            folder = folder_of(name, job.request.uid)
            if folder.path.exists():
                check_secrets(folder.config().secrets)


def down(
    name: NameArgument,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Also end its jobs, without asking.")
    ] = False,
) -> None:
    """End a pool for good: its jobs save checkpoints, return their VMs and end."""
    pool = PoolDir.find(name)
    if pool.is_down:
        raise ConfigError(f"pool {name} was taken down already")
    left = [
        job.request.name
        for job in read_pool(pool).jobs.values()
        if job.phase is not PoolJobPhase.ENDED
    ]
    if left and not yes:
        raise ConfigError(
            f"pool {name} has jobs that have not ended: {', '.join(left)}; --yes ends them "
            "after a checkpoint"
        )
    if not pool.is_managed():
        start_daemon(pool)
    take_down(pool)
    say(f"pool {name} has ended; jobs ended with it: {len(left)}")


def take_down(pool: PoolDir) -> None:
    """End a pool; return once nothing of it is rented any more."""
    ask_pool(pool, "down")
    while not pool.is_down:
        if not pool.is_managed():
            raise SpottrainError(
                f"pool {pool.name}: its daemon ended before the pool; see {pool.log}, then "
                f"run 'spottrain pool down {pool.name} --yes' again"
            )
        time.sleep(REFRESH_S / 5)
    while pool.is_managed():
        time.sleep(REFRESH_S / 5)
