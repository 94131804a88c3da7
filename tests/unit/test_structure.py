"""The rules of the house, each broken once in a small house of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "check_structure", ROOT / "scripts" / "check_structure.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for folder in ("src/spottrain", "cloud", "pricing", "scripts", "tests", "examples"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path, "scripts/structure-allowed.txt", "# none\n")
    return tmp_path


def write(house: Path, path: str, text: str) -> None:
    (house / path).parent.mkdir(parents=True, exist_ok=True)
    (house / path).write_text(text)


def broken(checker: ModuleType, house: Path) -> list[tuple[str, str]]:
    return [(one.rule, one.place) for one in checker.breaches(house)]


def test_files_have_a_size(checker: ModuleType, house: Path) -> None:
    write(house, "cloud/a.py", "x = 1\n" * 801)
    write(house, "tests/b.py", "x = 1\n" * 800)
    assert broken(checker, house) == [("file", "cloud/a.py")]


def test_a_folder_holds_few_modules(checker: ModuleType, house: Path) -> None:
    for letter in "abcdefghijklmnopqrstuvwxyz":
        write(house, f"cloud/{letter}.py", "X = 1\n")
    assert broken(checker, house) == [("folder", "spottrain.cloud")]


def test_a_family_of_three_is_a_folder(checker: ModuleType, house: Path) -> None:
    for name in ("vm", "vm_keys", "vm_size"):
        write(house, f"cloud/{name}.py", "X = 1\n")
    assert broken(checker, house) == [("prefix", "spottrain.cloud.vm")]


def test_a_circle_is_seen_through_type_checking(checker: ModuleType, house: Path) -> None:
    write(house, "cloud/a.py", "from spottrain.cloud.b import X\n")
    write(
        house,
        "cloud/b.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from spottrain.cloud import a\n",
    )
    assert [rule for rule, _ in broken(checker, house)] == ["circle"]


def test_a_small_module_with_one_importer_is_a_crumb(checker: ModuleType, house: Path) -> None:
    write(house, "cloud/a.py", "from spottrain.cloud.b import f\n")
    write(house, "cloud/b.py", "def f():\n    pass\n")
    write(house, "cloud/c.py", "from spottrain.cloud.d import X\n")
    write(house, "cloud/d.py", "class X:\n    pass\n")  # a leaf type
    assert broken(checker, house) == [("crumb", "spottrain.cloud.b")]


def test_a_class_name_stands_once(checker: ModuleType, house: Path) -> None:
    write(house, "cloud/a.py", "class Market:\n    pass\n")
    write(house, "cloud/b.py", "class Market:\n    pass\n")
    write(house, "pricing/a.py", "class Market:\n    pass\nclass Plan:\n    pass\n")
    write(house, "src/spottrain/a.py", "class Plan:\n    pass\n")
    assert broken(checker, house) == [("class", "cloud.Market"), ("word", "Plan")]


def test_a_base_with_one_subclass_next_door_is_one_class(checker: ModuleType, house: Path) -> None:
    write(house, "cloud/a.py", "class Base:\n    pass\n")
    write(house, "cloud/b.py", "class Derived(Base):\n    pass\n")
    assert broken(checker, house) == [("base", "spottrain.cloud.a.Base")]


def test_an_allowance_needs_a_reason_and_a_breach(checker: ModuleType, house: Path) -> None:
    write(house, "scripts/structure-allowed.txt", "class cloud.X  # history\n")
    assert checker.check(house) == ["class: cloud.X: needs no allowance"]
    write(house, "scripts/structure-allowed.txt", "class cloud.X\n")
    with pytest.raises(SystemExit, match="give the reason"):
        checker.check(house)
