"""The files for the VM of a manager: this software, the job, and how to run them.

~/<folder>/manager/software-…/  our own modules, as they are here
                   venv/        what they need, where the image does not have it
                   run          runs one of our modules there
                   state/       SPOTTRAIN_HOME; jobs/<name> is the job, and
                                market.sqlite the prices that are known here.
                                On a cluster, where others are, <unique id>/
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import TemporaryDirectory

from spottrain.errors import ConfigError
from spottrain.files import PRIVATE, packed
from spottrain.pricing.prices.history import History
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.vm_history import PRICES, open_history
from spottrain.version import sources

_BUNDLE = ("facts.json", "workdir.tar.gz", "journal.sqlite", "measurements.sqlite", "folder.id")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)[^;]*(?:;(.*))?")
_PREPARE = """\
set -eu
umask 077
root={root}
mkdir -p "$root/state"
cd "$root"
if [ -d {software} ]; then
    cat > /dev/null
else
    rm -rf arriving
    mkdir arriving
    tar -xzf - -C arriving
    mv arriving {software}
fi
fits() {{
    "$1" -c 'import sys, importlib.metadata as m
sys.version_info >= (3, 11) or sys.exit(1)
[m.version(name) for name in sys.argv[1:]]' {names} 2>/dev/null
}}
python={python}
if ! fits "$python"; then
    "$python" -c 'import sys
sys.version_info >= (3, 11) or sys.exit("{key}: needs Python 3.11 or newer")'
    python="$root/venv/bin/python"
    if ! fits "$python"; then
        rm -rf venv
        {make_venv}
        venv/bin/pip install --quiet --disable-pip-version-check {pins}
    fi
fi
cat > run <<END
#!/bin/sh
export SPOTTRAIN_HOME="\\${{SPOTTRAIN_HOME:-$root/state}}" PYTHONPATH='$root/{software}'
exec '$python' -P -m "\\$@"
END
chmod 700 run
"""
_VENV = "{python} -m venv venv >/dev/null 2>&1"
_VENV_OF_OURS = """\
{venv} || {{
            # An image that has just booted is installing things itself.
            cloud-init status --wait >/dev/null 2>&1 || true
            tries=0
            until sudo apt-get -qq update &&
                sudo apt-get -qq -o DPkg::Lock::Timeout=300 install -y python3-venv; do
                tries=$((tries + 1))
                [ $tries -lt 10 ] || exit 1
                sleep 10
            done
            {python} -m venv venv
        }}"""
"""On a machine that is ours alone."""


def root_of(folder: str) -> str:
    """Return our folder where a manager goes, as a word for the shell there.

    Args:
        folder: ``folder`` of the section of its cloud or cluster, below the user's home if it
            is not absolute.
    """
    if folder.startswith("/"):
        return shlex.quote(f"{folder}/manager")
    below = f"{folder.removeprefix('~/')}/manager"
    return f'"$HOME"/{shlex.quote(below)}'


def software() -> bytes:
    """Return spottrain's own modules and tables, packed (tar.gz)."""
    files = (*sources(), *sources("csv"))
    return packed(((name, path.read_bytes()) for name, path in files), PRIVATE)


def bundle(job: JobDir, config: bytes, others: Mapping[str, bytes]) -> bytes:
    """Return a job's folder as its manager needs it elsewhere, packed (tar.gz).

    Args:
        job: The job as submitted here.
        config: Its ``config.json`` there.
        others: Files that it has there alone.
    """
    files = {name: (job.path / name).read_bytes() for name in _BUNDLE}
    files |= {"config.json": config, **others}
    placed = [(f"jobs/{job.name}/{name}", data) for name, data in files.items()]
    return packed([*placed, (PRICES, _last_prices())], PRIVATE)


def _last_prices() -> bytes:
    """Return a database of the newest price of each offer, as a manager reads it.

    Its own refresh may fail, and a cloud without prices rents nothing.
    """
    with TemporaryDirectory() as folder, open_history() as history:
        path = Path(folder) / PRICES
        with History(path) as last:
            last.record_prices(history.latest())
        return path.read_bytes()


def prepare_script(
    root: str, python: str, extras: Collection[str], ours: bytes, *, is_ours: bool = True
) -> str:
    """Return the shell script that prepares a machine to run a manager.

    Safe to repeat. What the image's Python lacks is installed in the versions used here.

    Args:
        root: From ``root_of``.
        python: The image's Python.
        extras: Extras of spottrain that are needed: the cloud, and trackers.
        ours: From ``software``; the script reads it from stdin.
        is_ours: The machine is ours alone, and what makes environments may be installed.

    Raises:
        ConfigError: spottrain is not installed here, so its dependencies are unknown.
    """
    pins = pinned(extras)
    venv = _VENV.format(python=shlex.quote(python))
    return _PREPARE.format(
        root=root,
        python=shlex.quote(python),
        key="manager_vm.python" if is_ours else "slurm.python",
        make_venv=_VENV_OF_OURS.format(venv=venv, python=shlex.quote(python)) if is_ours else venv,
        software=f"software-{hashlib.sha256(ours).hexdigest()[:12]}",
        names=" ".join(pins),
        pins=" ".join(f"{name}=={number}" for name, number in pins.items()),
    )


def pinned(extras: Collection[str]) -> dict[str, str]:
    """Return the distributions that a manager needs, with the versions used here.

    Args:
        extras: Extras of spottrain that are needed.

    Raises:
        ConfigError: They are not installed.
    """
    try:
        wanted = needed(requires("spottrain") or [], extras)
        return {name: version(name) for name in wanted}
    except PackageNotFoundError as error:
        raise ConfigError(
            f"--manager-vm: {error.name} is not installed here; run pip install {error.name}"
        ) from error


def needed(requirements: list[str], extras: Collection[str]) -> list[str]:
    """Return the names of requirements: the general ones and those of some extras."""
    found, asked = [], "|".join(map(re.escape, extras))
    for line in requirements:
        match = _REQUIREMENT.match(line)
        assert match is not None, line
        name, marker = match[1], match[2] or ""
        if "extra" not in marker or re.search(rf"extra == ['\"]({asked})['\"]", marker):
            found.append(name)
    return found
