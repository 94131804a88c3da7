"""The section of a job file about notices to people; see docs/operating.md."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationInfo

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.base import Section, below

NoticeKind = Literal["losses", "budget", "stall", "nonfinite", "end"]
_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


def _absolute(command: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """Return a command, whose program is relative to the job file if it is a path."""
    base: Path | None = info.context
    if base is None or not command or os.sep not in command[0]:
        return command
    return (str(below(base, command[0])), *command[1:])


class NotifyConfig(Section):
    """Whom the manager tells what a person may want to act on."""

    command: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(_absolute)
    ] = ()
    """Program to run, with its arguments; it gets the notice as JSON on stdin."""
    webhook: Annotated[str, Field(min_length=1)] | None = None
    """URL to post the notice to as JSON: https, or http on this machine. A URL that is a
    secret is given as `$NAME`, an environment variable that holds it."""
    apprise: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Where apprise sends the notice to: `mailto://…`, `slack://…`, `tgram://…` and others
    that it knows. An address that holds a secret is given as `$NAME`, too."""
    on: tuple[NoticeKind, ...] = ("losses", "budget", "stall", "nonfinite", "end")
    """Which notices to send: `losses` (many VMs lost within a short time), `budget`
    (each share of `budget.alerts`), `stall`, `nonfinite` (too many losses in a row were
    not finite) and `end`."""
    losses: PositiveInt = 3
    """Interruptions within `window_s` that are many."""
    window_s: PositiveFloat = 600.0
    """See `losses`."""
    stall_s: PositiveFloat = 600.0
    """A job that trained, and has committed nothing for so long, stalls."""

    @property
    def asked(self) -> bool:
        """True if anybody is to be told."""
        return bool(self.command or self.webhook or self.apprise)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that hold addresses, and the keys that name them."""
        given = [("webhook", self.webhook or ""), *(("apprise", one) for one in self.apprise)]
        found = ((key, _VARIABLE.fullmatch(one)) for key, one in given)
        return {variable[1]: key for key, variable in found if variable}


def address(key: str, given: str, environment: Mapping[str, str]) -> str:
    """Return the address that a job file gives, or names by a variable.

    Args:
        key: Of ``notify``.
        given: Its value.
        environment: Of the process that sends.

    Raises:
        ConfigError: The variable is not set.
    """
    variable = _VARIABLE.fullmatch(given)
    if variable is None:
        return given
    if not environment.get(variable[1]):
        raise ConfigError(
            f"notify.{key}: the environment variable {variable[1]} is not set; "
            "export it before launch and resume"
        )
    return environment[variable[1]]


def webhook_url(webhook: str, environment: Mapping[str, str]) -> str:
    """Return the URL that a webhook of a job file stands for.

    Raises:
        ConfigError: The variable is not set, or the URL is neither https nor local. The
            line does not show a URL that comes from a variable.
    """
    url = address("webhook", webhook, environment)
    shown = webhook if url == webhook else f"the value of {webhook}"
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        host = ""
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and _is_local(host))):
        raise ConfigError(
            f"notify.webhook: must be a URL of https, or of http on this machine: got {shown}"
        )
    return url


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_notify(notify: NotifyConfig, secrets: Collection[str], *, on_vm: bool) -> None:
    """Check that notices can be sent from where the manager will run.

    Args:
        notify: Of the job file.
        secrets: Names of environment variables that the manager will have.
        on_vm: On a VM of its own.

    Raises:
        ConfigError: They cannot.
    """
    if notify.command and on_vm:
        raise ConfigError(
            "notify.command: with --manager-vm it would run on the manager's VM; use notify.webhook"
        )
    if notify.command and shutil.which(notify.command[0]) is None:
        raise ConfigError(
            f"notify.command: there is no program {notify.command[0]}: install it, or give its path"
        )
    if notify.webhook is not None:
        webhook_url(notify.webhook, os.environ)
    if notify.apprise and find_spec("apprise") is None:
        raise ConfigError(
            "notify.apprise: the package apprise is not installed here; install it: "
            "pip install apprise"
        )
    for given in notify.apprise:
        _check_apprise(given)
    for variable, key in notify.variables.items():
        if on_vm and variable not in secrets:
            raise ConfigError(
                f"notify.{key}: with --manager-vm the URL must be known there; add "
                f"{variable} to secrets"
            )


def _check_apprise(given: str) -> None:
    import apprise

    url = address("apprise", given, os.environ)
    apprise.logger.disabled = True  # it prints what is in an address
    if apprise.Apprise.instantiate(url, suppress_exceptions=True) is None:
        shown = f"the value of {given}" if url != given else f"{url.partition('://')[0]}://…"
        raise ConfigError(
            f"notify.apprise: must be an address that apprise knows, such as "
            f"mailto://user:password@example.org: got {shown}"
        )
