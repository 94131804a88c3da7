"""Packaging and scripts are as pyproject.toml and the README say."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["cloud", "morphing", "pipeline", "pricing", "varuna_manager"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_room_is_a_link_to_its_top_level_folder(folder: str) -> None:
    link = ROOT / "src" / "spottrain" / folder
    assert link.is_symlink()
    assert link.resolve() == (ROOT / folder).resolve()
    assert not os.path.isabs(os.readlink(link))


def test_every_direct_dependency_is_pinned() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["dev"]]
    names = {re.split(r"[>=;\[ ]", line)[0].lower() for line in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    assert {name.replace("_", "-") for name in names} == {name.replace("_", "-") for name in pinned}


@pytest.mark.parametrize("script", ["quickstart", "test", "check", "bench"])
def test_scripts_can_be_run_and_parsed(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["sh", "-n", path], check=True)


def test_the_readme_begins_with_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:24]
    assert "scripts/quickstart" in first_screen
    assert "scripts/test" in first_screen
