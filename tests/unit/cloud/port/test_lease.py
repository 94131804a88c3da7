"""The script by which a VM ends itself, run by a real shell in a folder of the test."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from spottrain.cloud.port import lease


def play(tmp_path: Path, *, looks: int = 1, renewed_at: int = 0, age_s: float | None = 0.0) -> bool:
    """Return whether the watch switches a machine off.

    Args:
        tmp_path: For its files.
        looks: How often it looks.
        renewed_at: Before which look the lease is renewed; 0: never.
        age_s: How old the file is by the machine's clock; None: it is as it was left.
    """
    file = tmp_path / "lease"
    if age_s is not None:
        file.touch()
        os.utime(file, (time.time() - age_s, time.time() - age_s))
    script = lease.boot_script(600).replace(str(lease.FILE.parent), str(tmp_path))
    watch = script.partition("watch <<'END'\n")[2].partition("\nEND\n")[0]
    commands, slept = tmp_path / "bin", tmp_path / "slept"
    commands.mkdir()
    for name, body in {
        "systemctl": f"touch {tmp_path}/off",
        "sleep": f"""
            n=$(($(cat {slept} 2>/dev/null || echo 0) + 1)); echo $n > {slept}
            [ $n = {renewed_at} ] && touch {file}
            [ $n -le {looks} ]""",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-c", watch], env=env, check=False, timeout=600)
    return (tmp_path / "off").exists()


BOUND = (600 + lease.GRACE_S) // 10
"""Looks without a manager after which a machine ends itself."""
BOOT = lease.BOOT_S // 10
"""Looks more until a manager was first heard."""


def test_a_vm_with_a_manager_keeps_running(tmp_path: Path) -> None:
    assert not play(tmp_path, looks=BOUND, renewed_at=1)


def test_a_vm_without_a_manager_ends_itself(tmp_path: Path) -> None:
    assert play(tmp_path, looks=BOUND + 2, renewed_at=1)


def test_a_vm_that_boots_has_more_time(tmp_path: Path) -> None:
    assert not play(tmp_path, looks=BOUND + BOOT)


def test_a_vm_whose_manager_never_comes_ends_itself(tmp_path: Path) -> None:
    assert play(tmp_path, looks=BOUND + BOOT + 1)


@pytest.mark.rotated
@pytest.mark.parametrize("age_s", [8 * 3600.0, -8 * 3600.0])
def test_a_clock_that_was_set_neither_ends_nor_keeps_a_vm(tmp_path: Path, age_s: float) -> None:
    assert not play(tmp_path, looks=2, age_s=age_s)
    for folder in (tmp_path / "bin").iterdir():
        folder.unlink()
    (tmp_path / "bin").rmdir()
    (tmp_path / "slept").unlink()
    assert play(tmp_path, looks=BOUND + BOOT + 1, age_s=age_s)


def test_a_vm_whose_agent_gave_up_the_lease_ends_itself(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    file.touch()
    lease.give_up(file)
    lease.give_up(file)
    assert play(tmp_path, age_s=None)


def test_a_lease_is_given_up_where_the_file_cannot_be_removed(tmp_path: Path) -> None:
    """Its folder is root's; workers are not."""
    (tmp_path / "lease").write_text("given up\n")
    assert play(tmp_path)


def test_whoever_works_on_a_vm_may_renew_its_lease_but_not_replace_the_watch(
    tmp_path: Path,
) -> None:
    script = lease.boot_script(600).replace(str(lease.FILE.parent), str(tmp_path))
    lines = [x for x in script.splitlines() if x.startswith(("touch ", "chmod "))]
    subprocess.run(["/bin/sh", "-e", "-c", "\n".join(lines)], check=True)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "lease").stat().st_mode) == 0o666


def test_an_answer_of_the_manager_renews_the_lease(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    lease.renew(file)
    assert not file.exists()
    file.touch()
    os.utime(file, (0, 0))
    lease.renew(file)
    assert time.time() - file.stat().st_mtime < 60


def test_the_script_is_a_script_and_waits_for_the_boot(tmp_path: Path) -> None:
    script = lease.boot_script(599.5)
    subprocess.run(["/bin/sh", "-n", "-c", script], check=True)
    assert f" {600 + lease.GRACE_S} " in script
    assert str(lease.BOOT_S) in script
