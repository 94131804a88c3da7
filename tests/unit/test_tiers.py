from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import ALL_EXAMPLES, COSTLY, GATE_EXAMPLES, PARTS, in_gate

from tests import tiers


class Item:
    """What a tier is decided by."""

    def __init__(self, nodeid: str, mark: pytest.MarkDecorator | None) -> None:
        self.nodeid = nodeid
        self._mark = None if mark is None else mark.mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._mark if self._mark is not None and self._mark.name == name else None


def chosen(items: Sequence[Any], part: int) -> list[str]:
    return [i.nodeid for i, runs in zip(items, in_gate(items, part), strict=True) if runs]


def cases(test: str, count: int, mark: pytest.MarkDecorator | None) -> list[Item]:
    return [Item(f"{test}[{n}]", mark) for n in range(count)]


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(1, 40), max_size=8))
def test_each_rotated_case_runs_in_one_part_and_parts_are_alike(
    tests: dict[str, int],
) -> None:
    items = [x for t, n in tests.items() for x in cases(t, n, pytest.mark.rotated)]
    parts = [chosen(items, part) for part in range(PARTS)]
    assert Counter(name for part in parts for name in part) == Counter(
        item.nodeid for item in items
    )
    for test, count in tests.items():
        shares = [sum(x.startswith(f"{test}[") for x in part) for part in parts]
        assert max(shares) - min(shares) <= 1
        assert sum(shares) == count


def test_what_names_its_parts_runs_in_them_and_what_is_nightly_in_none() -> None:
    items = [
        *cases("always", 2, None),
        *cases("night", 2, pytest.mark.nightly),
        *cases("lab/tests/markets/test_replay.py::test", 2, None),
        *cases("job", 2, pytest.mark.rotated(parts=[3, 8])),
    ]
    for part in range(PARTS):
        job = ["job[0]", "job[1]"] if part in (3, 8) else []
        assert chosen(items, part) == ["always[0]", "always[1]", *job]


def test_the_tree_decides_the_part_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(tiers.VARIABLE, raising=False)
    assert tiers.part() == int(tiers.head_tree() or "0", 16) % PARTS
    monkeypatch.setenv(tiers.VARIABLE, "7")
    assert tiers.part() == 7
    for wrong in ("10", "-1", "x", ""):
        monkeypatch.setenv(tiers.VARIABLE, wrong)
        with pytest.raises(pytest.UsageError, match=tiers.VARIABLE):
            tiers.part()


def test_a_costly_property_draws_a_fifth() -> None:
    drawn = []

    @tiers.costly
    @given(st.integers())
    def draw(number: int) -> None:
        drawn.append(number)

    draw()
    usual = settings().max_examples
    assert usual in (GATE_EXAMPLES, ALL_EXAMPLES)
    assert 1 < len(drawn) <= usual // COSTLY


def test_tests_of_a_cloud_run_in_one_process_and_others_by_file() -> None:
    aws = "tests/unit/cloud/aws/"
    assert tiers.scope(f"{aws}test_a.py::test") == tiers.scope(f"{aws}test_b.py::test[x]")
    file = "tests/unit/cloud/test_rates.py"
    assert tiers.scope(f"{file}::test[a/b::c]") == file


NUMBERED = """
import os, pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number):
    with open("ran", "a") as file:
        file.write(str(number))
    assert number != 2 or "MAY_PASS" in os.environ
"""


@pytest.mark.rotated(parts=[3, 6, 9])
def test_all_goes_on_with_what_has_not_passed_on_the_same_tree(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("tests/tiers.py", "tests/processes.py", "conftest.py"):
        shutil.copy(tiers.ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "test_numbers.py").write_text(NUMBERED)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / ".gitignore").write_text("ran\n.pytest_cache\n__pycache__\n")

    def git(*arguments: str) -> None:
        author = ("-c", "user.name=x", "-c", "user.email=x@localhost")
        subprocess.run(["git", "-C", tmp_path, *author, *arguments], check=True)

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        ran = tmp_path / "ran"
        ran.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--import-mode=importlib", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
            check=False,
            stdout=subprocess.DEVNULL,
        )
        return done.returncode, "".join(sorted(ran.read_text()))

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert run("--all") == (1, "0123")
    assert run("--all", "--processes", "2") == (1, "2")
    (tmp_path / "tests" / "new.txt").touch()
    assert run("--all") == (1, "0123"), "another tree"
    (tmp_path / "tests" / "new.txt").unlink()
    assert run("--all", MAY_PASS="1") == (0, "2")
    assert run("--all", MAY_PASS="1") == (0, "0123"), "all had passed"
