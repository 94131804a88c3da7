"""Commands that start, change and end a job: launch, stop, resume, set, down."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from spottrain.cloud.port.provider import Offer
from spottrain.errors import ConfigError, SpottrainError
from spottrain.printable import printable
from spottrain.varuna_manager.api import actions
from spottrain.varuna_manager.api import limits as limits_view
from spottrain.varuna_manager.cli import show as show_commands
from spottrain.varuna_manager.cli.arguments import (
    EnvOption,
    NameArgument,
    SetOption,
    run_at_manager,
)
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    console,
    is_debugging,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.cli.watch import INTERRUPTED, Watcher
from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.config.overrides import read_overrides
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.launch import asking, control, limits, submit, unit
from spottrain.varuna_manager.launch.changes import Changes

FileArgument = Annotated[Path, typer.Argument(help="Job file: YAML or TOML.")]
DryOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Run all checks of a launch and print the plan; rents nothing."),
]
DetachOption = Annotated[
    bool, typer.Option("--detach", "-d", help="Return once the job has started.")
]
VmOption = Annotated[bool, typer.Option("--manager-vm", help="Run the manager on a VM of its own.")]
PoolOption = Annotated[str | None, typer.Option(help="Submit it to this pool, and return.")]
PriorityOption = Annotated[
    float | None, typer.Option(help="With --pool: its weight against other jobs.")
]
TeamOption = Annotated[str | None, typer.Option(help="With --pool: the team that it belongs to.")]
AdoptOption = Annotated[
    bool,
    typer.Option("--adopt", help="Go on from checkpoints of another job in checkpoint.path."),
]


def launch(
    file: FileArgument,
    dry_run: DryOption = False,
    detach: DetachOption = False,
    with_vm: VmOption = False,
    pool: PoolOption = None,
    priority: PriorityOption = None,
    team: TeamOption = None,
    adopt: AdoptOption = False,
    settings: SetOption = None,
    env: EnvOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the job.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps of the job.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Start a job and watch it. Ctrl-C stops the job; closing the terminal does not.

    With --manager-vm, Ctrl-C only stops watching. --set, --env, --name and --steps replace
    what the job file says, and are checked as it is.
    """
    overrides = read_overrides(settings or (), env or (), name, steps)
    if pool is not None:
        # Not above: it imports the planner, which other commands do not need.
        from spottrain.varuna_manager.cli.pool import commands

        asked = commands.SubmitOptions(file, pool, priority, team, with_vm, adopt, overrides)
        commands.launch(asked, output, is_dry=dry_run)
        return
    if priority is not None or team is not None:
        raise ConfigError("--priority and --team go with --pool; add it")
    config = load_config(file, overrides=overrides)
    if dry_run:
        # Not above: they import the planner, which other commands do not need.
        from spottrain.varuna_manager.cli import plan
        from spottrain.varuna_manager.offers.checks import check_all

        checked = check_all(config, say, "dry run", on_vm=with_vm, adopt=adopt)
        plan.preview(config, checked, output)
        return
    job, offers = actions.submit_checked(config, say, on_vm=with_vm, adopt=adopt)
    if with_vm:
        _run_on_manager_vm(job, offers or (), detach, output)
    else:
        actions.say_how_to_move(job, say)
        _run_here(job, job.start(), detach, output)


def stop(
    name: NameArgument,
    now: Annotated[
        bool,
        typer.Option("--now", help="Return the VMs at once, without a checkpoint."),
    ] = False,
) -> None:
    """Stop a job: save a checkpoint and return its VMs; 'resume' continues it."""
    job = find(name)
    control.stop_job(job, now=now)
    code = Watcher(job, console(stderr=True)).run()
    _say_how_to_resume(job)
    if submit.end_of(job) != "stopped":
        raise typer.Exit(code)


def resume(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of a job, or the URL of its checkpoints (on any machine).",
            callback=run_at_manager,
        ),
    ],
    update_code: Annotated[
        bool,
        typer.Option("--update-code", help="Send the workdir as it is now, if the weights fit."),
    ] = False,
    workdir: Annotated[
        Path | None,
        typer.Option(
            help="With --update-code: where the workdir is now.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Total number of steps to train; may be lower or higher than before."
        ),
    ] = None,
    from_scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Begin again if no checkpoint of it can be used."),
    ] = False,
    trusted: Annotated[
        str,
        typer.Option(
            "--trust",
            metavar="NUMBER",
            help="With a URL: the number printed by launch, for what the job may run.",
        ),
    ] = "",
    detach: DetachOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Continue a job that was stopped, failed or lost its manager, and watch it."""
    changes = Changes(code=update_code, workdir=workdir, steps=steps)
    job, manager = actions.resume(name, changes, say, from_scratch=from_scratch, trusted=trusted)
    _run_here(job, manager, detach, output)


def down(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a job.")],
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask, as without a terminal.")
    ] = False,
) -> None:
    """End a job for good and return everything it rents; its report stays."""
    job = find(name)
    if not yes and sys.stdin.isatty() and submit.can_be_resumed(job):
        asked = f"End job {name} for good? Its checkpoints stay, but it cannot be resumed."
        typer.confirm(asked, abort=True, err=True)
    run_at_manager(context, name)
    returned = control.end_job(job, say)
    say(f"job {name} has ended; VMs returned after its manager ended: {returned}")


def manager_unit(
    name: NameArgument,
    install: Annotated[
        bool, typer.Option("--install", help="Write and enable it, for this user.")
    ] = False,
) -> None:
    """Print a systemd unit that keeps a job's manager through logout and reboot."""
    job = find(name)
    if not install:
        typer.echo(unit.unit_text(job), nl=False)
        return
    for line in unit.install(job):
        say(line)


def _run_here(job: JobDir, manager: subprocess.Popen[bytes], detach: bool, output: Output) -> None:
    """Watch a job whose manager was just started; exit with the job's exit code."""
    if detach:
        asking.await_manager(job, manager)
        if output is Output.JSON:
            show_json({"name": job.name, "pid": manager.pid, "folder": str(job.path)})
        _say_started(job)
        if unit.is_available():
            say(f"survive logout and reboot: spottrain manager-unit {job.name} --install")
        return
    watcher = Watcher(job, console(stderr=True), manager=manager, may_stop=True)
    try:
        code = watcher.run()
    except SpottrainError:
        _show_log_tail(job)
        raise
    show_commands.show_report(job, output)
    if code == INTERRUPTED:
        _say_how_to_resume(job)
    elif code:
        if is_debugging():
            _show_log_tail(job)
        show_commands.say_failure(job)
    raise typer.Exit(code)


def _run_on_manager_vm(job: JobDir, offers: Sequence[Offer], detach: bool, output: Output) -> None:
    """Start a job's manager on a VM and watch it; exit with the job's exit code."""
    # Not above: it imports the cloud adapters, which other commands do not need.
    from spottrain.varuna_manager.cli import remote

    remote.begin(job, offers)
    if detach:
        if output is Output.JSON:
            show_json({"name": job.name, "folder": str(job.path)})
        _say_started(job)
        return
    code = remote.watch(job)
    if not job.remote_manager_file.exists():
        show_commands.show_report(job, output)
    raise typer.Exit(code)


def _say_started(job: JobDir) -> None:
    name = job.name
    say(f"job {name} has started; watch it with 'spottrain status {name} --watch'")


def _say_how_to_resume(job: JobDir) -> None:
    if submit.can_be_resumed(job):
        say(
            f"continue it with 'spottrain resume {job.name}', or end it with "
            f"'spottrain down {job.name}'"
        )


def _show_log_tail(job: JobDir) -> None:
    max_lines = 200 if is_debugging() else 5
    for line in job.log.read_text(errors="replace").splitlines()[-max_lines:]:
        say(f"manager.log: {printable(line)}")


def set_command(
    name: NameArgument,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help=f"{', '.join(limits.SETTABLE)}; 'none' removes a limit.",
        ),
    ],
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Change it even if that ends the job.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change the budget, deadline or minimum speed of a job."""
    job = find(name)
    wanted = limits.read_limits(
        changes,
        job.name,
        launched_at_s=read_state(job).submitted_at_s,
        now_s=time.time(),
    )
    control.change_limits(job, wanted, sure=yes)
    document = limits_view.limits(job)
    if output is Output.JSON:
        show_json(document)
    else:
        show(*limits_view.lines(document))
