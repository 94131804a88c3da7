from __future__ import annotations

import asyncio
import io
import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from spottrain import spawn
from spottrain.cloud.local import image
from spottrain.cloud.process import tree

PROGRAM = """
import os, pathlib, sys
child = int(os.environ["SPOTTRAIN_WAITING"].partition(":")[0])
facts = os.getsid(0) == os.getpid(), os.getsid(child) == os.getpid(), os.getpgid(child) == child
pathlib.Path(sys.argv[1]).write_text(f"{child} {all(facts)}")
os.kill(os.getpid(), 19)
"""
"""Tells its child and whether that is in its session, and stops."""


@pytest.mark.rotated
def test_a_vm_boots_with_a_child_that_ends_with_it(tmp_path: Path) -> None:
    told = tmp_path / "told"
    argv = [sys.executable, "-c", PROGRAM, str(told)]

    vms = image.VmImage("mine")

    async def boot() -> tuple[int, int] | None:
        assert await vms.ready()
        with (tmp_path / "log").open("ab") as log:
            program = spawn.Program(argv, str(tmp_path), {**os.environ})
            return vms.boot(program, log)

    booted = asyncio.run(boot())
    assert booted is not None, (tmp_path / "log").read_text()
    pid, handle = booted
    deadline = time.monotonic() + 600
    while not told.exists() or " " not in told.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child, is_ours = told.read_text().split()
    assert is_ours == "True"
    kept = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    assert b"SPOTTRAIN_JOB=mine" in kept, "its GPU would be taken by a stranger"
    gone = os.pidfd_open(int(child))
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    assert select.select([gone], [], [], 600)[0]
    assert tree.groups([], [pid]) == frozenset()
    for one in (handle, gone):
        os.close(one)
    vms.close()


def test_without_an_image_vms_are_started_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "_IMAGE_ARGV", (sys.executable, "-c", "import notorch"))

    async def start() -> None:
        vms = image.VmImage("mine")
        assert not await vms.ready()
        assert vms.boot(spawn.Program([], "", {}), io.BytesIO()) is None
        vms.close()

    asyncio.run(start())
