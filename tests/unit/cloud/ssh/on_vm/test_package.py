"""The package that is sent to hosts."""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.fakes.object_store import CREDENTIALS

from spottrain.cloud.ssh.on_vm.package import carries_obstore, package

AGENT = "import spottrain.varuna_manager.agent.main, spottrain.cloud.ssh.on_vm.keeper, sys; "
THEIRS = "print([m for m in sys.modules if 'site-packages' in str(sys.modules[m])])"


def test_the_agent_needs_only_the_package(tmp_path: Path) -> None:
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


def test_the_package_contains_the_runtime() -> None:
    with tarfile.open(fileobj=io.BytesIO(package().archive)) as archive:
        names = archive.getnames()
    assert "spottrain/__init__.py" in names
    assert "pynvml.py" in names
    assert "spottrain/pipeline/process/supervisor.py" in names
    assert "spottrain/morphing/simulate/loops/play.py" in names
    assert len(names) == len(set(names))


def test_obstore_is_packed_for_the_same_platform_if_needed(
    tmp_path: Path,
) -> None:
    here = {"system": platform.system(), "machine": platform.machine()}
    assert carries_obstore(here)
    assert not carries_obstore({**here, "machine": "another"})
    with tarfile.open(fileobj=io.BytesIO(package(True).archive)) as archive:
        archive.extractall(tmp_path, filter="data")
    code = (
        "from spottrain.storage.open import open_store; import obstore; "
        "open_store('s3://b/x'); print(obstore.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        env={"PYTHONPATH": str(tmp_path), **CREDENTIALS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{tmp_path}/obstore/__init__.py\n", done.stderr


ONCE = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from spottrain.cloud.ssh.on_vm.package import package
barrier = Barrier(8)
def pack(_):
    barrier.wait()
    return id(package())
with ThreadPoolExecutor(8) as threads:
    print(len(set(threads.map(pack, range(8)))))
"""


def test_many_hosts_share_one_package() -> None:
    done = subprocess.run([sys.executable, "-c", ONCE], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
