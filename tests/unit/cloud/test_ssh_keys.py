from __future__ import annotations

import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spottrain.cloud.ssh_keys import ensure_key


def test_a_job_keeps_its_key(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "cloud"
    assert ensure_key(folder) == ensure_key(folder)
    assert ensure_key(tmp_path / "other")[1] != ensure_key(folder)[1]


def test_concurrent_processes_share_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(ensure_key, [tmp_path] * 32))
    assert len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ssh_key"]


def test_only_the_user_can_read_the_private_key(tmp_path: Path) -> None:
    path, public = ensure_key(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kind, _, comment = public.split()
    assert (kind, comment) == ("ssh-ed25519", "spottrain")
    assert public.split()[1] not in path.read_text()


def test_openssh_reads_it(tmp_path: Path) -> None:
    path, public = ensure_key(tmp_path)
    said = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(path)],
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert said.stdout.split()[:2] == public.split()[:2]
