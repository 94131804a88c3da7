"""Packaging and scripts are as pyproject.toml and the README say."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import spottrain
from spottrain.varuna_manager.cli import init

ROOT = Path(__file__).parents[2]
FOLDERS = ["cloud", "morphing", "pipeline", "pricing", "varuna_manager"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_room_is_a_link_to_its_top_level_folder(folder: str) -> None:
    link = ROOT / "src" / "spottrain" / folder
    assert link.is_symlink()
    assert link.resolve() == (ROOT / folder).resolve()
    assert not os.path.isabs(os.readlink(link))


def checkout(to: Path) -> Path:
    """Copy what a build reads."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in (*FOLDERS, "src", "examples"):
        shutil.copytree(ROOT / folder, to / folder, symlinks=True, ignore=skip)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, to)
    return to


def build(checkout: Path, kind: str) -> subprocess.CompletedProcess[str]:
    """Call the hook of the build's back end, as pip and build do, in a process of its own."""
    hook = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    (checkout / "dist").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", hook], cwd=checkout, capture_output=True, text=True, check=False
    )


def modules_of(wheel: Path) -> set[str]:
    """Return the names of a wheel's files but for those that describe it."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_a_checkout_without_links_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    copy = checkout(tmp_path)
    for folder in FOLDERS:  # what git leaves where core.symlinks is false
        link = copy / "src" / "spottrain" / folder
        told = os.readlink(link)
        link.unlink()
        link.write_text(told)
    done = build(copy, kind)
    assert (done.returncode, list((copy / "dist").iterdir())) == (1, [])
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: src/spottrain/cloud ")
    assert "git clone -c core.symlinks=true" in line


@pytest.mark.rotated
def test_wheels_hold_every_file_also_when_built_from_an_sdist(tmp_path: Path) -> None:
    copy = checkout(tmp_path / "checkout")
    for kind in ("wheel", "sdist"):
        done = build(copy, kind)
        assert done.returncode == 0, done.stderr
    (sdist,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not any(member.issym() for member in archive)
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert build(unpacked, "wheel").returncode == 0
    wheels = [next(one.glob("dist/*.whl")) for one in (copy, unpacked)]
    wanted = {
        f"spottrain/{folder}/{path.relative_to(ROOT / folder)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held, again = map(modules_of, wheels)
    assert wanted - held == set()
    starters = {name.rpartition("/")[2] for name in held if "/share/spottrain/examples/" in name}
    assert starters >= {name for names in init.STARTERS.values() for name in names}
    assert held == again


def test_every_direct_dependency_is_pinned() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["dev"]]
    names = {re.split(r"[>=;\[ ]", line)[0].lower() for line in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    assert {name.replace("_", "-") for name in names} == {name.replace("_", "-") for name in pinned}


@pytest.mark.parametrize(
    "script", ["quickstart", "test", "check", "bench", "release", "docs", "pictures"]
)
def test_scripts_can_be_run_and_parsed(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["sh", "-n", path], check=True)


def test_the_readme_begins_with_what_installs_and_shows_it() -> None:
    assert "scripts/quickstart" in (ROOT / "README.md").read_text().splitlines()[:24]


def test_a_release_sets_version_date_and_tag_once(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "src" / "spottrain").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    kept = ("scripts/release", "src/spottrain/__init__.py", "lab/pyproject.toml", "CHANGELOG.md")
    for name in kept:
        shutil.copy(ROOT / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(f"# Changelog\n\n## 9.8.7 (unreleased)\n{changes.read_text()}")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        named = {
            f"GIT_{who}_{what}": "x"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        environment = {**os.environ, **named, "GIT_CONFIG_GLOBAL": os.devnull}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        assert run("git", *command).returncode == 0
    for wrong in ("", "9.8", "9.8.6"):
        assert run("scripts/release", wrong).returncode == 1
    done = run("scripts/release", "9.8.7")
    assert done.returncode == 0, done.stderr
    assert run("git", "tag").stdout == "v9.8.7\n"
    assert run("git", "status", "--porcelain").stdout == ""
    assert re.search(r"^## 9\.8\.7 \(\d{4}-\d\d-\d\d\)$", changes.read_text(), re.MULTILINE)
    for name in kept[1:3]:
        assert '"9.8.7"' in (tmp_path / name).read_text()
    again = run("scripts/release", "9.8.7")
    assert (again.returncode, "exists already" in again.stderr) == (1, True)


def test_both_distributions_have_one_version() -> None:
    with open(ROOT / "lab" / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["version"] == spottrain.__version__
