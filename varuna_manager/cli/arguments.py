"""Arguments that several commands share: names of jobs, and changes of a job file.

A command runs where the manager of the job that it names is.
"""

from __future__ import annotations

from typing import Annotated

import typer

from spottrain.errors import ConfigError
from spottrain.eventlog.folder import is_folder_name
from spottrain.varuna_manager.jobs.folder import job_dir


def run_at_manager(context: typer.Context, name: str | None) -> str | None:
    """Run the command on the VM of the job's manager, if it has one of its own.

    Args:
        context: Of the command.
        name: The job that the command is about, if it is about one.
    """
    if name is None or not is_folder_name(name):
        return name
    if (job := job_dir(name)).remote_manager_file.exists():
        # Not above: it imports the cloud adapters, which most commands do not need.
        from spottrain.varuna_manager.cli.remote import forward_command

        forward_command(job, context.info_name or "")
    return name


def _run_all_at_manager(context: typer.Context, names: list[str]) -> list[str]:
    """As ``run_at_manager``; several jobs are read on this machine."""
    if len(names) == 1:
        run_at_manager(context, names[0])
        return names
    for name in names:
        if is_folder_name(name) and job_dir(name).remote_manager_file.exists():
            raise ConfigError(
                f"job {name} has its manager on a VM of its own, and cannot be compared "
                "with others before it has ended; leave it out"
            )
    return list(dict.fromkeys(names))


NamesArgument = Annotated[
    list[str], typer.Argument(help="Names of jobs.", callback=_run_all_at_manager)
]
NameArgument = Annotated[str, typer.Argument(help="Name of a job.", callback=run_at_manager)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the job file, such as budget.max_usd=60; repeatable.",
    ),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="Set a variable of env, as text; repeatable."),
]
FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")
]
