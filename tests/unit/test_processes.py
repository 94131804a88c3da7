from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.tiers import ROOT

CONFTEST = """
import os
import pytest
from tests.processes import Processes

def pytest_configure(config):
    config.pluginmanager.register(Processes(2, lambda nodeid: nodeid.partition("::")[0]))

@pytest.fixture(scope="session")
def mine(tmp_path_factory):
    (tmp_path_factory.getbasetemp() / "made").touch()
    yield os.getpid()
    print("torn down", file=open(os.environ["LOG"], "a"))

@pytest.fixture(scope="module")
def of_file():
    yield
    print("file left", file=open(os.environ["LOG"], "a"))
"""


def run(folder: Path, **files: str) -> tuple[int, str]:
    """Run tests in two processes; return the exit code and the output."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LOG": str(folder / "log"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--rootdir={folder}", f"--basetemp={folder / 'temp'}", str(folder)],
        env=environment,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_each_test_runs_once_and_a_file_in_one_process(tmp_path: Path) -> None:
    text = """
import os, pytest
@pytest.mark.parametrize("n", range(20))
def test_it(mine, of_file, n, tmp_path):
    assert mine == os.getpid()
    print(mine, tmp_path.parent, file=open(os.environ["LOG"], "a"))
"""
    code, out = run(tmp_path, a=text, b=text, c=text)
    assert (code, "60 passed" in out) == (0, True), out
    log = (tmp_path / "log").read_text().splitlines()
    assert log.count("file left") == 3
    ran = [line for line in log if "process-" in line]
    assert log.count("torn down") == len(set(ran)) == 2
    assert len(ran) == 60


def test_what_fails_is_told_with_its_output(tmp_path: Path) -> None:
    failing = "def test_it():\n    print('said')\n    assert 1 == 2\n"
    code, out = run(tmp_path, a=failing, b="def test_it():\n    pass\n")
    assert code == 1
    assert "assert 1 == 2" in out
    assert "said" in out
    assert "1 failed, 1 passed" in out


def test_a_process_that_ends_fails_its_tests_and_no_others(tmp_path: Path) -> None:
    ends = """
import os
def test_before(): pass
def test_ends(): os._exit(7)
def test_after(): pass
"""
    fine = dict.fromkeys("bcd", "def test_it(): pass\n")
    code, out = run(tmp_path, a=ends, **fine)
    assert code == 1
    assert re.search(r"test process \d ended with 7 in it", out)
    assert "2 failed, 4 passed" in out


def test_errors_of_collection_run_nothing(tmp_path: Path) -> None:
    code, out = run(tmp_path, a="import nothing_of_this_name\n", b="def test_it(): 1 / 0\n")
    assert code == 2
    assert "ZeroDivisionError" not in out


def test_the_first_failure_ends_it_if_asked(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -x\n")
    slow = "import time\ndef test_it(): time.sleep(60)\n"
    code, out = run(tmp_path, a="def test_it(): 1 / 0\n", b=slow, c=slow)
    assert code == 1
    assert "1 failed" in out
    assert "stopping after 1 failures" in out
