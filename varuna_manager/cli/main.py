"""The command line ``spottrain``, and the commands that change a job.

Exit codes: see EXIT_CODES, which ``spottrain --help`` shows.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

import spottrain
from spottrain.errors import ConfigError, SpottrainError, UserCodeError
from spottrain.suggest import did_you_mean
from spottrain.varuna_manager.api.trouble import trouble_of_machine
from spottrain.varuna_manager.cli.console import is_debugging, say, say_error, show

EXIT_CODES = (
    "Exit codes: 0 success, 1 internal or other error, 2 usage or job file, "
    "3 user code failed, 4 budget or deadline cannot be met, 5 no capacity, "
    "6 cloud or credentials, 130 interrupted."
)

COMMANDS: Mapping[str, str] = {
    "quickstart": "spottrain.varuna_manager.cli.init:quickstart",
    "init": "spottrain.varuna_manager.cli.init:init",
    "launch": "spottrain.varuna_manager.cli.run:launch",
    "sweep": "spottrain.varuna_manager.cli.pool.sweep:sweep",
    "stop": "spottrain.varuna_manager.cli.run:stop",
    "resume": "spottrain.varuna_manager.cli.run:resume",
    "down": "spottrain.varuna_manager.cli.run:down",
    "manager-unit": "spottrain.varuna_manager.cli.run:manager_unit",
    "status": "spottrain.varuna_manager.cli.status:status",
    "ui": "spottrain.varuna_manager.cli.ui:ui",
    "logs": "spottrain.varuna_manager.cli.logs:logs",
    "events": "spottrain.varuna_manager.cli.show:events",
    "explain": "spottrain.varuna_manager.cli.show:explain",
    "report": "spottrain.varuna_manager.cli.show:report",
    "metrics": "spottrain.varuna_manager.cli.show:metrics",
    "inspect": "spottrain.varuna_manager.cli.show:inspect",
    "cost": "spottrain.varuna_manager.cli.show:cost",
    "export": "spottrain.varuna_manager.cli.export:export",
    "profile": "spottrain.varuna_manager.cli.traces.profile:profile",
    "timeline": "spottrain.varuna_manager.cli.traces.timeline:timeline",
    "calibrate": "spottrain.varuna_manager.cli.calibrate:calibrate",
    "schedule": "spottrain.varuna_manager.cli.simulate.schedule:schedule",
    "prices": "spottrain.varuna_manager.cli.prices:prices",
    "plan": "spottrain.varuna_manager.cli.plan:plan",
    "doctor": "spottrain.varuna_manager.cli.doctor:doctor",
    "verify": "spottrain.varuna_manager.cli.verify:verify",
    "gc": "spottrain.varuna_manager.cli.gc:gc",
    "ssh": "spottrain.varuna_manager.cli.ssh:ssh",
    "set": "spottrain.varuna_manager.cli.run:set_command",
}
"""Module and function of each command, in the order of ``--help``."""


SIMULATIONS: Mapping[str, str] = {
    "step": "spottrain.varuna_manager.cli.simulate.schedule:step",
    "pool": "spottrain.varuna_manager.cli.simulate.pool:pool",
}
LAB = ("mix", "trace", "prices", "deadlines", "planners", "async-schedule", "async-step")
"""Commands of ``spottrain-lab``."""


class Commands(typer.core.TyperGroup):
    """The commands. Only the one that is called is imported: all take a second and more."""

    places = COMMANDS
    _is_listing = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the help of the group, with the first line of each command's."""
        with self._listing():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return what a shell may complete to."""
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        self._is_listing = True
        try:
            yield
        finally:
            self._is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*self.places, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is none of this name."""
        if (place := self.places.get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        module, function = place.split(":")
        if self._is_listing:
            return typer.core.TyperCommand(cmd_name, help=first_line(module, function))
        # Nothing that is imported becomes garbage, and to look for some takes a while.
        gc.disable()
        loaded = importlib.import_module(module)
        gc.freeze()
        gc.enable()
        alone = typer.Typer(add_completion=False)
        epilog = EXIT_CODES if cmd_name == "launch" else None
        alone.command(cmd_name, epilog=epilog)(getattr(loaded, function))
        return typer.main.get_command(alone)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return what ``args`` call, as the base class; an error names the nearest command."""
        try:
            return super().resolve_command(ctx, args)
        except TyperException as error:
            hint = did_you_mean(args[0], self.list_commands(ctx))
            if hint and not args[0].startswith("-"):
                error.message = f"No such command {args[0]!r}; {hint}"
            raise


def first_line(module: str, function: str) -> str:
    """Return the first line of a function's docstring, without importing its module."""
    spec = find_spec(module)
    assert spec is not None, f"{module} is one of ours"
    assert spec.origin is not None, f"{module} is a file"
    source = Path(spec.origin).read_text(encoding="utf-8")
    found = re.search(rf'^def {function}\(.*?"""(.*?)(?:\n|""")', source, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{module} has {function}, and that a docstring"
    return found[1]


class ConfigTools(Commands):
    """``spottrain config``."""

    places: Mapping[str, str] = {"schema": "spottrain.varuna_manager.cli.show:schema"}


class PoolTools(Commands):
    """``spottrain pool``."""

    places: Mapping[str, str] = {
        "create": "spottrain.varuna_manager.cli.pool.commands:create",
        "status": "spottrain.varuna_manager.cli.pool.commands:status",
        "report": "spottrain.varuna_manager.cli.pool.commands:report",
        "set": "spottrain.varuna_manager.cli.pool.commands:set_command",
        "pause": "spottrain.varuna_manager.cli.pool.commands:pause",
        "resume": "spottrain.varuna_manager.cli.pool.commands:resume",
        "down": "spottrain.varuna_manager.cli.pool.commands:down",
    }


class Simulations(Commands):
    """``spottrain simulate FILE`` means ``spottrain simulate trace FILE``.

    ``spottrain-lab`` adds commands by entry points.
    """

    @functools.cached_property
    def places(self) -> Mapping[str, str]:  # type: ignore[override]
        """The commands, those of other distributions among them."""
        added = entry_points(group="spottrain.simulations")
        return {**SIMULATIONS, **{one.name: one.value for one in added}}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is none of this name.

        Raises:
            ConfigError: It is of a distribution that is not installed.
        """
        if cmd_name in LAB and cmd_name not in self.places:
            raise ConfigError(
                f"simulate {cmd_name} is in spottrain-lab, which is not installed: 'pip "
                "install ./lab' in a checkout"
            )
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command ``trace`` before a file name."""
        known = {*self.places, *LAB}
        if args and args[0] not in known and _is_file_name(args[0]):
            args = ["trace", *args]
        return super().parse_args(ctx, args)


def _is_file_name(argument: str) -> bool:
    """Return whether a file is meant, existing or not."""
    path = Path(argument)
    return not argument.startswith("-") and (bool(path.suffix) or path.is_file())


app = typer.Typer(
    name="spottrain",
    cls=Commands,
    help="Train large models on preemptible VMs that come and go.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(
    typer.Typer(help="Tools for job files.", no_args_is_help=True, cls=ConfigTools),
    name="config",
)
app.add_typer(
    typer.Typer(
        help="Many jobs on one pool of VMs and one budget.",
        no_args_is_help=True,
        cls=PoolTools,
    ),
    name="pool",
)
app.add_typer(
    typer.Typer(
        help="Simulate steps, traces, prices, deadlines and pools in virtual time.",
        no_args_is_help=True,
        cls=Simulations,
    ),
    name="simulate",
)


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
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train large models on preemptible VMs that come and go."""


def main() -> None:
    """Run the command line; an error becomes one line and its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # else a test's
            stream.reconfigure(errors="backslashreplace")  # ASCII terminals, odd names
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
        if trouble := trouble_of_machine(error):
            say_error(error, trouble)
            sys.exit(1)
        hint = "" if is_debugging() else "; run it again with --debug and report it"
        say_error(error, f"internal: {type(error).__name__}: {error}{hint}")
        sys.exit(1)


def _usage(error: TyperException) -> str:
    """Return what is wrong with a command line; empty where its help was printed."""
    message = error.format_message().rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command_path", None)
    if not message or not command or message.endswith("?"):
        return message
    return f"{message}; see '{command} -h'"


if __name__ == "__main__":
    main()
