"""What is carried to hosts."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

from spottrain.cloud.ssh.package import package

AGENT = "import spottrain.varuna_manager.agent, spottrain.cloud.ssh.keeper, sys; "
THEIRS = "print([m for m in sys.modules if 'site-packages' in str(sys.modules[m])])"


def test_the_agent_needs_nothing_but_what_is_carried(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(package().archive)) as archive:
        assert all(m.isfile() and m.name.endswith(".py") for m in archive)
        archive.extractall(tmp_path, filter="data")
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", AGENT + THEIRS],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[]\n", done.stderr


def test_the_runtime_is_carried_too() -> None:
    with tarfile.open(fileobj=io.BytesIO(package().archive)) as archive:
        names = archive.getnames()
    assert "spottrain/__init__.py" in names
    assert "spottrain/pipeline/supervisor.py" in names
    assert "spottrain/morphing/loops/play.py" in names
    assert len(names) == len(set(names))


ONCE = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from spottrain.cloud.ssh.package import package
barrier = Barrier(8)
def pack(_):
    barrier.wait()
    return id(package())
with ThreadPoolExecutor(8) as threads:
    print(len(set(threads.map(pack, range(8)))))
"""


def test_many_hosts_at_once_have_it_packed_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONCE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n", done.stderr
