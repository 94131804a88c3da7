"""The section of a job file about the user's hosts; their environment and secrets."""

from __future__ import annotations

import getpass
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    model_validator,
)

from spottrain.cloud.local.market import ZoneSpec
from spottrain.cloud.ssh.transport.hosts import Host
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.base import LocalPath, Section
from spottrain.varuna_manager.config.slots import SlotSection

_SAME_BY_TYPE = ("slots", "gpu", "slot_memory_bytes", "slot_speed", "usd_per_hour")
OURS = ("SPOTTRAIN_", "OMP_NUM_THREADS")
"""Prefixes of variables that a job file cannot set."""


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name.startswith(OURS):
        raise ValueError("must be the name of a variable that spottrain does not set")
    return name


def _text_of(value: object) -> object:
    """Return a number, true or false as text; anything else as it is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _value(text: str) -> str:
    if "\0" in text:
        raise ValueError("must hold no NUL character, which ends a variable")
    return text


def _folder(text: str) -> str:
    if not text.strip("./") or ".." in text.split("/"):
        raise ValueError("must be a folder used by spottrain only")
    return text


Variable = Annotated[str, AfterValidator(_variable)]
"""The name of an environment variable."""
VariableValue = Annotated[
    str,
    AfterValidator(_value),
    BeforeValidator(_text_of, json_schema_input_type=str | int | float | bool),
]
"""Its value: a text, or a number, true or false, which become text."""
Folder = Annotated[str, AfterValidator(_folder)]
"""A folder of spottrain's on a host."""


def _jump(text: str) -> str:
    # A name that begins with a dash would be an option of ssh.
    if not all(re.fullmatch(r"[\w.@:\[\]][\w.@:\[\]-]*", one) for one in text.split(",")):
        raise ValueError("must be [user@]host[:port], several by commas")
    return text


class SshHostConfig(SlotSection):
    """One of your hosts."""

    address: str = Field(min_length=1)
    """Name or IP address."""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    """Port of its SSH server."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name of the host; by default its address, with the port unless that is 22."""
    user: str | None = None
    """Login name; by default `ssh.user`."""
    host_key: str | None = None
    """Its public key as printed by `ssh-keyscan`, without the name, such as
    `ssh-ed25519 AAAA…`; by default it must be in `ssh.known_hosts`."""
    key_file: LocalPath | None = None
    """Private key file, relative to the job file; by default `ssh.key_file`."""
    proxy_jump: Annotated[str, AfterValidator(_jump)] | None = None
    """Host through which the `ssh` command of this machine reaches it, `[user@]host[:port]`;
    several by commas."""
    python: str | None = None
    """Its Python; by default `ssh.python`."""
    private_address: str | None = None
    """Its address for the other hosts; by default the one that accepts SSH."""
    type: str = Field(default="host", min_length=1)
    """Name of its type; hosts of one type must have the same slots and price."""
    usd_per_hour: NonNegativeFloat = 0.0
    """Its price per hour, as you value it."""

    @property
    def chosen_name(self) -> str:
        """The name given, or the default."""
        address = re.sub(r"[^A-Za-z0-9._-]+", "-", self.address).strip("-.")
        return self.name or (address if self.port == 22 else f"{address}-{self.port}")


def _by_name(value: object) -> object:
    """Return what ~/.ssh/config says of a host that is given by its name there.

    Raises:
        ValueError: That file cannot be read.
    """
    if not isinstance(value, str) or not value:
        return value
    # Not above: no other job needs it.
    from paramiko.config import SSHConfig
    from paramiko.ssh_exception import ConfigParseError, CouldNotCanonicalize

    file = Path("~/.ssh/config").expanduser()
    try:
        known = SSHConfig.from_path(str(file)) if file.exists() else SSHConfig()
        found = known.lookup(value)
    except (OSError, ConfigParseError, CouldNotCanonicalize, ImportError) as error:
        raise ValueError(f"{file} cannot be used for {value}: {error}; give address") from error
    if "proxycommand" in found:
        raise ValueError(f"{value} has a ProxyCommand in {file}; use ProxyJump there")
    jump = found.get("proxyjump", "none")
    keys = (key for key in found.get("identityfile", ()) if Path(key).exists())
    said = {
        "address": found["hostname"],
        "name": None if value == found["hostname"] else value,
        "port": int(found.get("port", 22)),
        "user": found.get("user"),
        "key_file": next(keys, None),
        "proxy_jump": None if jump == "none" else jump,
    }
    return {key: one for key, one in said.items() if one is not None}


class SshConfig(Section):
    """Your own hosts, for `provider: ssh`; see docs/clouds/hosts.md."""

    hosts: tuple[
        Annotated[
            SshHostConfig,
            BeforeValidator(_by_name, json_schema_input_type=SshHostConfig | str),
        ],
        ...,
    ] = ()
    """The hosts; the job uses each as one VM. A host may be given by its name alone:
    ~/.ssh/config then says its HostName, User, Port, IdentityFile and ProxyJump."""
    user: str | None = None
    """Login name; by default your own on this machine."""
    key_file: LocalPath | None = None
    """Private key file, relative to the job file; by default the keys of your SSH agent
    and of ~/.ssh."""
    known_hosts: LocalPath = "~/.ssh/known_hosts"
    """File with the keys of hosts that have no `host_key`, relative to the job file. It
    is never changed."""
    python: str = "python3"
    """Python 3.11 or newer on the hosts, with torch, numpy and safetensors."""
    folder: Folder = ".spottrain"
    """spottrain's folder on the hosts, relative to the home folder; removed when a host
    is released. Hosts with a shared home need a local folder, such as
    /tmp/spottrain."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        types: dict[str, SshHostConfig] = {}
        names: set[str] = set()
        for host in self.hosts:
            if host.chosen_name in names:
                raise ValueError(f"two hosts are named {host.chosen_name}; rename one")
            names.add(host.chosen_name)
            first = types.setdefault(host.type, host)
            for field in _SAME_BY_TYPE:
                one, other = getattr(first, field), getattr(host, field)
                if one != other:
                    raise ValueError(
                        f"hosts of type {host.type} must have the same {field}: got "
                        f"{one} and {other}; give one of them another type"
                    )
        return self

    @property
    def specs(self) -> tuple[ZoneSpec, ...]:
        """The types of hosts, as zones for planners."""
        counts = Counter(host.type for host in self.hosts)
        return tuple(
            host.spec(kind, kind, counts[kind], host.usd_per_hour)
            for kind, host in {host.type: host for host in self.hosts}.items()
        )

    def fleet(self, *, uses_gpus: bool = True) -> tuple[Host, ...]:
        """Return the hosts for the provider.

        Args:
            uses_gpus: False: their slots are CPU slots.
        """
        return tuple(
            Host(
                name=host.chosen_name,
                address=host.address,
                port=host.port,
                user=host.user or self.user or getpass.getuser(),
                host_key=host.host_key,
                known_hosts=Path(self.known_hosts).expanduser(),
                key_file=Path(key) if (key := host.key_file or self.key_file) else None,
                proxy_jump=host.proxy_jump or "",
                python=host.python or self.python,
                folder=self.folder,
                private_address=host.private_address,
                instance_type=host.type,
                usd_per_hour=host.usd_per_hour,
                **host.slot_settings(uses_gpus=uses_gpus),
            )
            for host in self.hosts
        )


def check_ssh(ssh: SshConfig, checkpoint_path: str | None, objective: str) -> None:
    """Check the rest of a job file with ``provider: ssh``.

    Raises:
        ValueError: It is wrong.
    """
    if not ssh.hosts:
        raise ValueError("resources.provider ssh needs hosts; list them in ssh.hosts")
    if checkpoint_path is None:
        raise ValueError(
            "resources.provider ssh needs a checkpoint.path that all hosts and this "
            "machine can access, such as s3://bucket/prefix or a network folder; hosts share "
            "nothing else"
        )
    if objective == "examples_per_dollar" and not all(h.usd_per_hour for h in ssh.hosts):
        raise ValueError(
            "morphing.objective examples_per_dollar needs prices; give every host its usd_per_hour"
        )


def environment_of(env: Mapping[str, str], secrets: Iterable[str]) -> dict[str, str]:
    """Return the environment of setup and workers, with the secrets that are set here."""
    found = {name: os.environ[name] for name in secrets if name in os.environ}
    return {**env, **found}


def check_secrets(secrets: Iterable[str]) -> None:
    """Check that this environment has every secret that a job file names.

    Raises:
        ConfigError: One is missing.
    """
    for name in secrets:
        if not os.environ.get(name):
            raise ConfigError(
                f"secrets: {name} is not set in the environment; set it before you launch or resume"
            )
