"""Module names that stand in strings: ``-m``, imports by name, patches, pyproject."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("cloud", "morphing", "pipeline", "pricing", "varuna_manager", "src", "tests")
TOY = "test_structure.py"  # its modules are made up
SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.name != TOY
)
NAME = re.compile(r"\b(?:spottrain|tests)(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?(?!\w*[/@-])")
TOP = {path.stem for path in (ROOT / "src" / "spottrain").iterdir()} | {
    path.stem for path in (ROOT / "tests").iterdir()
}


def names_in(text: str) -> set[str]:
    """Return the names in a text; files such as ``spottrain.zip`` are none of ours."""
    found = (match.group().replace(":", ".") for match in NAME.finditer(text))
    return {name for name in found if name.split(".")[1] in TOP}


@cache
def is_known(name: str) -> bool:
    """Return whether a name is a module or leads to an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            if importlib.util.find_spec(module) is None:
                continue
        except ModuleNotFoundError:
            continue
        if length == len(parts):
            return True
        target: Any = importlib.import_module(module)
        for part in parts[length:]:
            if not hasattr(target, part):
                return False
            target = getattr(target, part)
        return True
    return False


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def run_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that command lines in a file run by ``-m`` or ``start``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            values = [getattr(element, "value", None) for element in node.elts]
            for flag, module in pairwise(values):
                runs = flag in ("-m", "spottrain.start")
                if runs and isinstance(module, str) and names_in(module):
                    yield module


def values(document: Any) -> Iterator[str]:
    """Yield all keys and strings of a TOML document."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key
            yield from values(value)
    elif isinstance(document, list):
        for value in document:
            yield from values(value)
    elif isinstance(document, str):
        yield document


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}


@pytest.mark.nightly
def test_every_module_named_in_a_string_exists(trees: dict[str, ast.Module]) -> None:
    unknown = {
        (file, name)
        for file, tree in trees.items()
        for text in strings(tree)
        for name in names_in(text)
        if not is_known(name)
    }
    assert unknown == set()


@pytest.mark.nightly
def test_every_module_run_by_name_has_a_main_program(
    trees: dict[str, ast.Module],
) -> None:
    run = {module for tree in trees.values() for module in run_modules(tree)}
    assert "spottrain.varuna_manager.daemon.main" in run
    for module in run:
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{module}.__main__") is not None, module
        else:
            assert spec.origin is not None
            assert '__name__ == "__main__"' in Path(spec.origin).read_text(), module


@pytest.mark.nightly
def test_no_module_name_is_put_together_from_parts(
    trees: dict[str, ast.Module],
) -> None:
    """What cannot be searched for is missed when a module moves."""
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                for part in node.values:
                    text = str(part.value) if isinstance(part, ast.Constant) else ""
                    assert re.search(r"\bspottrain(\.\w+)*\.$", text) is None, file


def test_every_module_named_in_pyproject_exists() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        document = tomllib.load(file)
    named = {name for text in values(document) for name in names_in(text)}
    assert "spottrain.varuna_manager.cli.main.main" in named
    assert {name for name in named if not is_known(name)} == set()
    for package, patterns in document["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / "src" / package.replace(".", "/")
        for pattern in patterns:
            assert any(folder.glob(pattern)), (package, pattern)
