"""The house stands as pyproject.toml and the scripts say."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["cloud", "morphing", "pipeline", "pricing", "varuna_manager"]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_sizes = load(ROOT / "scripts" / "check_sizes.py")


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
    assert {name.replace("_", "-") for name in names} == {
        name.replace("_", "-") for name in pinned
    }


@pytest.mark.parametrize("script", ["quickstart", "test", "check", "bench"])
def test_scripts_can_be_run_and_parsed(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["sh", "-n", path], check=True)


def test_the_readme_begins_with_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:24]
    assert "scripts/quickstart" in first_screen
    assert "scripts/test" in first_screen


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys, spottrain.varuna_manager.cli.main\n"
        "assert not {'torch', 'boto3', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def lines_of(source: str) -> list[int]:
    tree = ast.parse(source)
    return [check_sizes.function_lines(f) for _, f in check_sizes.functions(tree)]


def test_docstrings_and_inner_functions_do_not_count() -> None:
    plain = "def f():\n    a = 1\n    return a\n"
    told = 'def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n'
    nested = "def f():\n    def g():\n        a = 1\n        return a\n    return g\n"
    assert lines_of(plain) == lines_of(told) == [3]
    assert lines_of(nested) == [2, 3]


def test_too_large_is_told_until_it_is_allowed_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "cloud").mkdir()
    (tmp_path / "scripts").mkdir()
    body = "    x = 1\n" * 41
    allowed = tmp_path / "scripts" / "sizes-allowed.txt"
    allowed.write_text("")
    (tmp_path / "cloud" / "a.py").write_text("def f():\n" + body)
    assert check_sizes.check(tmp_path) == ["cloud/a.py:f: 42 lines, at most 40"]
    allowed.write_text("cloud/a.py:f 42  # a table\n")
    assert check_sizes.check(tmp_path) == []
    allowed.write_text("cloud/a.py:f 42\n")
    with pytest.raises(SystemExit, match="give the reason"):
        check_sizes.check(tmp_path)
    (tmp_path / "cloud" / "a.py").write_text("def f():\n    return 1\n")
    allowed.write_text("cloud/a.py:f 42  # a table\n")
    assert check_sizes.check(tmp_path) == ["cloud/a.py:f: needs no allowance any more"]
