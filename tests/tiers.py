"""Which tests the gate runs, and which only ``scripts/test --all``.

The gate (``scripts/test``) leaves out what is marked ``nightly``, runs a tenth of the cases
of what is marked ``rotated``, and draws few examples for properties, always the same ones.
CONTRIBUTING.md says what is marked so. ``--all`` runs everything, with many examples, and
goes on where it was interrupted: what has passed on the very same tree is not run again.
A test that is named in full (``file.py::test``) always runs.
"""

from __future__ import annotations

import gc
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

Test = TypeVar("Test", bound=Callable[..., None])

ROOT = Path(__file__).parents[1]
PARTS = 10
LAB = "lab/"
"""What evaluates policies and plans has all its tests in ``--all``."""
VARIABLE = "SPOTTRAIN_PART"
"""Names the part of the rotated cases, 0 to 9; without it the commit's tree decides."""
GATE_EXAMPLES, ALL_EXAMPLES = 20, 200
COSTLY = 5
CLOUDS = frozenset(f"tests/unit/cloud/{name}" for name in ("aws", "azure", "gcp"))

# A loaded machine may stop for longer than any deadline of an example. Health checks fail
# a test for the time that data takes, or for its size or rejections in a first few draws,
# which is chance; an example that uses a fixture does not mind what the one before left.
_CALM = settings(deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile(
    "gate", _CALM, max_examples=GATE_EXAMPLES, derandomize=True, database=None
)
settings.register_profile("all", _CALM, max_examples=ALL_EXAMPLES, print_blob=True)


def costly(test: Test) -> Test:
    """Draw a fifth of the usual number of examples."""
    return settings(max_examples=settings().max_examples // COSTLY)(test)


def first_always(cases: Iterable[object]) -> list[object]:
    """Let the gate run the first case each time, and the others in turn."""
    first, *others = cases
    return [first, *(pytest.param(one, marks=pytest.mark.rotated) for one in others)]


def head_tree() -> str:
    """Return the hash of the last commit's tree; empty where there is none."""
    return _git("rev-parse", "HEAD^{tree}")


def part() -> int:
    """Return the part of the rotated cases that runs.

    Raises:
        pytest.UsageError: The variable names none.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        return int(head_tree() or "0", 16) % PARTS
    if not named.isdecimal() or int(named) >= PARTS:
        raise pytest.UsageError(f"{VARIABLE}={named}: use a number from 0 to 9")
    return int(named)


def in_gate(items: Sequence[pytest.Item], part: int) -> Iterator[bool]:
    """Yield whether each test belongs to the gate, of which a part of the cases runs.

    What is rotated names its parts, or its cases are dealt out to the parts one after the
    other, from one on that the test's name decides, so that all parts are about as long.
    """
    cases: dict[str, int] = defaultdict(int)
    for item in items:
        if item.get_closest_marker("nightly") or item.nodeid.startswith(LAB):
            yield False
        elif (rotated := item.get_closest_marker("rotated")) is None:
            yield True
        elif parts := rotated.kwargs.get("parts"):
            yield part in parts
        else:
            test = item.nodeid.partition("[")[0]
            yield (crc32(test.encode()) + cases[test]) % PARTS == part
            cases[test] += 1


def scope(nodeid: str) -> str:
    """Return what runs in one process: a file, or a cloud, whose SDK and fake take seconds."""
    folder, _, file = nodeid.partition("::")[0].rpartition("/")
    return folder if folder in CLOUDS else f"{folder}/{file}"


class Tiers:
    """The plugin that leaves out what a run is not to run."""

    def __init__(self, config: pytest.Config) -> None:
        self._all: bool = config.option.all
        self._named = any("::" in argument for argument in config.args)
        settings.load_profile("all" if self._all else "gate")
        self.part = part()
        self._log = _log(config)
        self._passed = self._read()
        self._called: set[str] = set()

    def _read(self) -> list[str]:
        if self._log is None or not self._log.exists():
            return []
        return self._log.read_text().splitlines()

    def pytest_report_header(self) -> str:
        if self._all:
            return f"all tests, of which {len(self._passed)} have passed on this tree"
        return f"the gate, part {self.part} of the rotated cases ({VARIABLE})"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._all:
            passed = frozenset(self._passed)
            runs = [item.nodeid not in passed for item in items]
        else:
            runs = [self._named or is_in for is_in in in_gate(items, self.part)]
        if not all(runs):
            left_out = [item for item, run in zip(items, runs, strict=True) if not run]
            config.hook.pytest_deselected(items=left_out)
            items[:] = compress(items, runs)

    def pytest_collection_finish(self) -> None:
        """Collect garbage from now on, but never look at what was imported."""
        gc.collect()
        gc.freeze()
        gc.enable()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._log is None or not report.passed:
            return
        if report.when == "call":
            self._called.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self._called:
            with self._log.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Begin anew the next time, once everything has passed."""
        of_all = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
        if self._log is not None and of_all and not exitstatus:
            self._log.unlink(missing_ok=True)


def _log(config: pytest.Config) -> Path | None:
    """Return the file that names the tests that passed on the tree that is checked out."""
    cache = getattr(config, "cache", None)  # with -p no:cacheprovider there is none
    if not config.option.all or cache is None or _git("status", "--porcelain"):
        return None
    folder: Path = cache.mkdir("passed")
    return folder / tree if (tree := head_tree()) else None


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
