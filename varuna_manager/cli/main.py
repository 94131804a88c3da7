"""The command line: ``spottrain``. Commands that change something; see cli_read.py, cli_plan.py.

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
from spottrain.errors import SpottrainError, UserCodeError
from spottrain.storage.store import is_url
from spottrain.varuna_manager.cli import (
    calibrate,
    cost,
    doctor,
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
from spottrain.varuna_manager.cli.watch import INTERRUPTED, Watcher
from spottrain.varuna_manager.config.job import JobConfig, load_config
from spottrain.varuna_manager.config.ssh import check_secrets
from spottrain.varuna_manager.format import size
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.launch import control, data, inspect, submit

EXIT_CODES = (
    "Exit codes: 0 done, 1 an error of spottrain's own, 2 usage or job file, "
    "3 failed by user code, 4 budget or deadline cannot be met, 5 no capacity, "
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
        bool, typer.Option("--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train large models on preemptible VMs that come and go."""


@app.command("launch", epilog=EXIT_CODES)
def launch_command(
    file: FileArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="As 'plan': check and plan, rent nothing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Do not watch the job.")
    ] = False,
    with_vm: Annotated[
        bool, typer.Option("--manager-vm", help="Put the manager on a VM of its own.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Start a job and watch it; Ctrl-C stops it, a closed terminal does not.

    With --manager-vm Ctrl-C only ends the watching.
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
    from spottrain.varuna_manager.offers.feasibility import check_deadline

    if forecast := check_deadline(config, facts, offers, say):
        say(forecast)
    job, packed_bytes = submit.submit(config, facts, data_bytes)
    say(
        f"{facts.num_parameters:,} parameters in {len(facts.sections)} sections; "
        f"workdir packed: {size(packed_bytes)}"
    )
    if with_vm:
        _run_on_manager_vm(job, offers or (), detach, output)
    else:
        _run_here(job, submit.start_manager(job), detach, output)


def _check_here(config: JobConfig, *, on_vm: bool) -> None:
    """Check what can be told before a cloud is asked, or data fetched."""
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
        bool, typer.Option("--now", help="Without a checkpoint: VMs go back at once.")
    ] = False,
) -> None:
    """Stop a job: checkpoint, return its VMs, keep it for 'resume'."""
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
            help="Name of a job; or, from any machine, the URL where its checkpoints are.",
            callback=run_at_manager,
        ),
    ],
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Do not watch the job.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Go on with a job that was stopped or whose manager is gone, and watch it."""
    if is_url(name):
        # Not above: other commands have no use for it.
        from spottrain.varuna_manager.launch.takeover import take_over

        job = take_over(name, say)
    else:
        job = find(name)
    _run_here(job, control.resume_job(job), detach, output)


@app.command()
def down(name: NameArgument) -> None:
    """Return everything that a job rents and end it for good; its report stays."""
    job = find(name)
    returned = control.end_job(job)
    say(f"job {name} is ended; VMs returned after its manager: {returned}")


def _run_here(
    job: JobDir, manager: subprocess.Popen[bytes], detach: bool, output: Output
) -> None:
    """Watch a job whose manager was just started; exits with the job's exit code."""
    if detach:
        control.await_manager(job, manager)
        if output is Output.JSON:
            show_json({"name": job.name, "pid": manager.pid, "folder": str(job.path)})
        say(f"job {job.name} is on its way: 'spottrain status {job.name} --watch'")
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
    """Start the manager of a job on a VM and look on; exits with the job's exit code."""
    # Not above: it imports what rents, which other commands do not need.
    from spottrain.varuna_manager.cli import remote

    remote.begin(job, offers)
    if detach:
        if output is Output.JSON:
            show_json({"name": job.name, "folder": str(job.path)})
        say(f"job {job.name} is on its way: 'spottrain status {job.name} --watch'")
        return
    code = remote.watch(job)
    if not job.remote_manager_file.exists():
        show_commands.show_report(job, output)
    raise typer.Exit(code)


show_commands.register(app)
cost.register(app)
calibrate.register(app)
schedule.register(app)
prices.register(app)
plan.register(app)
limits.register(app)
doctor.register(app)
gc.register(app)
ssh.register(app)


def _say_how_to_resume(job: JobDir) -> None:
    if submit.can_be_resumed(job):
        say(
            f"go on with 'spottrain resume {job.name}', or end the job with "
            f"'spottrain down {job.name}'"
        )


def _show_log_tail(job: JobDir) -> None:
    most = 200 if is_debugging() else 5
    for line in job.log.read_text(errors="replace").splitlines()[-most:]:
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
