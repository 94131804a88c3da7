"""The image that the Dockerfile describes, built upon a Debian that debootstrap makes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spottrain import __version__

ROOT = Path(__file__).parents[2]
BASE, SUITE = "debian:bookworm-slim", "bookworm"
OWN_SETTINGS = "etc/apt/apt.conf.d", "etc/pip.conf", "usr/local/share/ca-certificates"
"""How this machine reaches packages; the image's base has none of it."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("buildah") and shutil.which("debootstrap")),
        reason="needs root, buildah and debootstrap (Debian's packages)",
    ),
]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return what runs a command in a container of the image."""
    folder = tmp_path_factory.mktemp("container")
    store = "--root", str(folder / "store"), "--runroot", str(folder / "run")
    environment = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}

    def buildah(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["buildah", *store, *arguments],
            check=False,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    debian = folder / "debian"
    subprocess.run(["debootstrap", "--variant=minbase", SUITE, debian], check=True)
    for name in OWN_SETTINGS:
        if (own := Path("/", name)).is_dir():
            shutil.copytree(own, debian / name, dirs_exist_ok=True)
        elif own.exists():
            shutil.copy(own, debian / name)
    container = buildah("from", "scratch").stdout.strip()
    buildah("add", "--quiet", container, str(debian), "/")
    buildah("commit", "--rm", "--quiet", container, BASE)
    shutil.rmtree(debian)
    buildah("build", "--pull-never", "--quiet", "--tag", "spottrain", str(ROOT))
    made = buildah("from", "--pull-never", "spottrain").stdout.strip()
    yield lambda *command: buildah("run", made, "--", *command, check=False)
    buildah("rm", "--all")
    buildah("rmi", "--all", "--force")


def test_the_image_has_this_version_and_no_torch(run: Run) -> None:
    assert run("spottrain", "--version").stdout == f"spottrain {__version__}\n"
    assert run("/opt/spottrain/bin/python", "-c", "import torch").returncode != 0


def test_it_plans_and_lists_jobs_as_a_user_who_is_not_root(run: Run) -> None:
    planned = run("spottrain", "plan", "--params", "1e8", "--tokens", "1e9", "--context", "1024")
    listed = run("spottrain", "status")

    assert planned.returncode == 0, planned.stderr
    assert "$" in planned.stdout
    assert listed.returncode == 0, listed.stderr
    assert run("id", "--user").stdout.strip() != "0"
    assert run("test", "-w", "/state").returncode == 0
