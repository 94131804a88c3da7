"""What a job runs, as one digest: whoever holds it knows that a store is not lying.

A job's copy in its checkpoint store names commands, environment and code, which the
machine that resumes it runs, and anybody who may write there can change them.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator

from spottrain.errors import ConfigError
from spottrain.manifest import hash_file
from spottrain.printable import printable
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.jobs.folder import JobDir

_DIGITS = 32
"""Of the digest, hexadecimal: 128 bits."""
_SHOWN = 200
"""Characters of a value that are shown."""


def digest_of(job: JobDir, there: bytes | None = None) -> str:
    """Return the digest of all that a job runs.

    Args:
        job: Its folder.
        there: Its ``config.json`` on another machine, if that is not the folder's.
    """
    digest = hashlib.sha256()
    # As they were written: another version may know of further keys.
    digest.update((job.path / "config.json").read_bytes() if there is None else there)
    digest.update((job.path / "facts.json").read_bytes())
    digest.update(hash_file(job.workdir).encode())
    return digest.hexdigest()[:_DIGITS]


def how_to_move(job: JobDir, there: bytes | None = None) -> str:
    """Return the command that continues a job, whose checkpoints are in a bucket, on
    another machine; arguments as of ``digest_of``."""
    path = job.config().checkpoint.path
    return f"spottrain resume {path} --trust {digest_of(job, there)}"


def what_runs(config: JobConfig) -> Iterator[str]:
    """Yield what a job would run, a line each, safe for a terminal."""
    environment = ", ".join(f"{name}={value}" for name, value in config.env.items())
    proxies = [cloud.ssh_proxy for cloud in config.clouds if cloud.ssh_proxy]
    shown = {
        "code": f"{config.entrypoint} in workdir.tar.gz",
        "env": environment,
        "setup": config.setup.strip(),
        "notify.command": shlex.join(config.notify.command),
        "ssh_proxy": ", ".join(proxies),
    }
    for name, value in shown.items():
        if value:
            line = printable(f"{name}: {value}")
            yield line if len(line) <= _SHOWN else f"{line[:_SHOWN]} …"


def check(job: JobDir, url: str, trusted: str) -> None:
    """Check that what a store has of a job is what is trusted.

    Args:
        job: The folder that it was copied into.
        url: Of the store.
        trusted: Digest; empty: nothing is.

    Raises:
        ConfigError: It is something else.
    """
    found = digest_of(job)
    if found == trusted:
        return
    if trusted:
        raise ConfigError(
            f"--trust: what {url} would run is {found}, not {trusted}: it was changed since, "
            "by 'resume --update-code' or by somebody else who may write there; leave "
            "--trust out to see it"
        )
    raise ConfigError(
        f"{url}: what it would run is not known to be yours, and all who may write there "
        f"can change it; if it is (launch printed the same number), run 'spottrain resume "
        f"{url} --trust {found}'"
    )
