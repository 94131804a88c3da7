"""The command line ``spottrain``, and the commands that change a job.

Exit codes: see EXIT_CODES, which ``spottrain --help`` shows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

import spottrain
from spottrain.cloud.port.provider import Offer
from spottrain.errors import ConfigError, SpottrainError, UserCodeError
from spottrain.storage.store import is_url
from spottrain.varuna_manager.cli import (
    calibrate,
    doctor,
    export,
    gc,
    limits,
    plan,
    prices,
    schedule,
    ssh,
)
from spottrain.varuna_manager.cli import show as show_commands
from spottrain.varuna_manager.cli.arguments import NameArgument, run_at_manager
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    console,
    is_debugging,
    say,
    say_error,
    show,
    show_json,
)
from spottrain.varuna_manager.cli.simulate import deadlines, mix, trace
from spottrain.varuna_manager.cli.simulate import prices as simulated_prices
from spottrain.varuna_manager.cli.watch import INTERRUPTED, Watcher
from spottrain.varuna_manager.config.job import JobConfig, load_config
from spottrain.varuna_manager.config.ssh import check_secrets
from spottrain.varuna_manager.format import size
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.launch import control, data, inspect, submit
from spottrain.varuna_manager.launch.changes import Changes, change
from spottrain.varuna_manager.launch.systemd import unit

EXIT_CODES = (
    "Exit codes: 0 success, 1 internal or other error, 2 usage or job file, "
    "3 user code failed, 4 budget or deadline cannot be met, 5 no capacity, "
    "6 cloud or credentials, 130 interrupted."
)

app = typer.Typer(
    name="spottrain",
    help="Train large models on preemptible VMs that come and go.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
FileArgument = Annotated[Path, typer.Argument(help="Job file: YAML or TOML.")]


def _version(wanted: bool) -> None:
    if wanted:
        show(f"spottrain {spottrain.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show what caused an error, and its traceback."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Train large models on preemptible VMs that come and go."""


@app.command("launch", epilog=EXIT_CODES)
def launch_command(
    file: FileArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan only, as 'plan' does.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the job has started.")
    ] = False,
    with_vm: Annotated[
        bool, typer.Option("--manager-vm", help="Run the manager on a VM of its own.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Start a job and watch it. Ctrl-C stops the job; closing the terminal does not.

    With --manager-vm, Ctrl-C only stops watching.
    """
    config = load_config(file)
    if dry_run:
        plan.preview(config, output)
        return
    _check_here(config, on_vm=with_vm)
    data_bytes = data.prepare_data(config, say)
    lines, offers = control.check_machines(config, on_vm=with_vm)
    for line in lines:
        say(line)
    say(f"inspecting {config.entrypoint}")
    facts = inspect.inspect_model(config)
    # Not above: it imports the planner, which other commands do not need.
    from spottrain.varuna_manager.offers.feasibility import check_deadline, check_memory

    check_memory(config, facts, offers)
    if forecast := check_deadline(config, facts, offers, say):
        say(forecast)
    job, packed_bytes = submit.submit(config, facts, data_bytes, say)
    say(
        f"{facts.num_parameters:,} parameters in {len(facts.sections)} sections; "
        f"workdir packed: {size(packed_bytes)}"
    )
    for line in show_commands.helper_lines(facts):
        say(line)
    if with_vm:
        _run_on_manager_vm(job, offers or (), detach, output)
    else:
        _run_here(job, submit.start_manager(job), detach, output)


def _check_here(config: JobConfig, *, on_vm: bool) -> None:
    """Check what needs no cloud and no data."""
    submit.check_name(config.name)
    submit.check_manager(config, on_vm=on_vm)
    submit.check_budget(config)
    check_secrets(config.secrets)
    os.environ.update(config.env)
    submit.check_checkpoint_path(config)


@app.command()
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


@app.command()
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
        typer.Option(
            "--update-code", help="Send the workdir as it is now, if the weights fit."
        ),
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
        typer.Option(min=1, help="Train so many steps in all, fewer or more."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the job has started.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Continue a job that was stopped, failed or lost its manager, and watch it."""
    if workdir is not None and not update_code:
        raise ConfigError("--workdir: goes with --update-code")
    if is_url(name):
        # Not above: no other command uses it.
        from spottrain.varuna_manager.launch.takeover import take_over

        job = take_over(name, say, steps)
    else:
        job = find(name)
    if changes := Changes(code=update_code, workdir=workdir, steps=steps):
        change(job, changes, say)
    _run_here(job, control.resume_job(job), detach, output)


@app.command()
def down(name: NameArgument) -> None:
    """End a job for good and return everything it rents; its report stays."""
    job = find(name)
    returned = control.end_job(job)
    say(f"job {name} has ended; VMs returned after its manager ended: {returned}")


@app.command("manager-unit")
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


def _run_here(
    job: JobDir, manager: subprocess.Popen[bytes], detach: bool, output: Output
) -> None:
    """Watch a job whose manager was just started; exit with the job's exit code."""
    if detach:
        control.await_manager(job, manager)
        if output is Output.JSON:
            show_json({"name": job.name, "pid": manager.pid, "folder": str(job.path)})
        _say_started(job)
        if unit.is_available():
            say(
                f"survive logout and reboot: spottrain manager-unit {job.name} --install"
            )
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


def _run_on_manager_vm(
    job: JobDir, offers: Sequence[Offer], detach: bool, output: Output
) -> None:
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


for command in (
    show_commands.status,
    show_commands.logs,
    show_commands.events,
    show_commands.report,
    show_commands.metrics,
    show_commands.inspect,
    show_commands.cost,
    export.export,
    export.profile,
    calibrate.calibrate,
    schedule.schedule,
    prices.prices,
    plan.plan,
    doctor.doctor,
    gc.gc,
    ssh.ssh,
):
    app.command()(command)
app.command("set")(limits.set_command)
config_commands = typer.Typer(help="Tools for job files.", no_args_is_help=True)
config_commands.command()(show_commands.schema)
app.add_typer(config_commands, name="config")
simulate_commands = typer.Typer(
    help="Simulate steps, traces, prices and deadlines in virtual time.",
    no_args_is_help=True,
    cls=trace.SimulateGroup,
)
for simulation in (
    schedule.step,
    mix.mix,
    trace.trace,
    simulated_prices.prices,
    deadlines.deadlines,
):
    simulate_commands.command()(simulation)
simulate_commands.command("promise", hidden=True)(
    deadlines.deadlines
)  # its former name
app.add_typer(simulate_commands, name="simulate")


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
        say(f"manager.log: {line}")


def main() -> None:
    """Run the command line; an error becomes one line and its exit code."""
    try:
        sys.exit(app(standalone_mode=False))
    except TyperException as error:
        say_error(error, _usage(error))
        sys.exit(error.exit_code)
    except SpottrainError as error:
        if isinstance(error, UserCodeError) and error.traceback:
            say(error.traceback.rstrip())
        say_error(error, str(error))
        sys.exit(error.exit_code)
    except typer.Abort:
        say("error: aborted")
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - a bug of ours is one line, too
        hint = "" if is_debugging() else "; run it again with --debug and report it"
        say_error(error, f"internal: {type(error).__name__}: {error}{hint}")
        sys.exit(1)


def _usage(error: TyperException) -> str:
    """Return what is wrong with a command line; empty where its help was printed."""
    message = error.format_message().rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command_path", None)
    return f"{message}; see '{command} -h'" if message and command else message


if __name__ == "__main__":
    main()
