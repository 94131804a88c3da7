"""All data of a job on one machine, as its process there brings it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.web import Web, serve_web

from spottrain.cloud.data.background import BackgroundPreparation
from spottrain.cloud.data.cache import Cache
from spottrain.cloud.data.prepare import fetch_data, mount
from spottrain.cloud.data.request import (
    DataError,
    DataRequest,
    DataUnavailableError,
    from_json,
    to_json,
)


@pytest.fixture
def web() -> Iterator[Web]:
    with serve_web() as web:
        web.files["/a"] = b"from the web"
        yield web


def test_requests_survive_json() -> None:
    requests = (
        DataRequest(name="a", url="s3://b/a", unpack=True, sha256="0" * 64),
        DataRequest(name="b", path="/data"),
        DataRequest(name="c", mount="server:/", type="nfs4", options="ro"),
    )
    assert from_json(to_json(requests)) == requests
    with pytest.raises(DataError, match="another version of spottrain"):
        from_json('[{"name": "a", "colour": "red"}]')


def test_every_dataset_has_its_variable(web: Web, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    requests = (
        DataRequest(name="web", url=f"{web.url}/a"),
        DataRequest(name="own", path=str(tmp_path / "own")),
    )
    found = fetch_data(requests, Cache(tmp_path / "cache"))
    assert found.keys() == {"SPOTTRAIN_DATA_WEB", "SPOTTRAIN_DATA_OWN"}
    assert found["SPOTTRAIN_DATA_OWN"] == str(tmp_path / "own")
    assert Path(found["SPOTTRAIN_DATA_WEB"]).read_bytes() == b"from the web"


def test_a_missing_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data own \(/nowhere\): does not exist"):
        fetch_data([DataRequest(name="own", path="/nowhere")], Cache(tmp_path))


def run(folder: Path, *requests: DataRequest, limit_s: float = 60.0) -> tuple[int, list[str]]:
    running = BackgroundPreparation(
        folder / "cache", folder / "log", os.environ, to_json(requests), limit_s
    )
    code = running.poll(60.0)["code"]
    return code, (folder / "log").read_text().splitlines()


def test_the_process_prints_the_environment_last(web: Web, tmp_path: Path) -> None:
    code, lines = run(tmp_path, DataRequest(name="web", url=f"{web.url}/a"))
    assert code == 0
    assert lines[:-1] == [
        "web: 0 B of 12 B received",
        "web: 12 B of 12 B received",
    ]
    path = Path(json.loads(lines[-1])["SPOTTRAIN_DATA_WEB"])
    assert path.read_bytes() == b"from the web"


@pytest.mark.parametrize(
    ("path", "says", "code"), [("/a", 503, 75), ("/a", 403, 3), ("/nothing", None, 3)]
)
def test_the_exit_code_says_whether_to_retry(
    web: Web, tmp_path: Path, path: str, says: int | None, code: int
) -> None:
    web.says = says
    got, lines = run(tmp_path, DataRequest(name="web", url=f"{web.url}{path}"))
    assert got == code
    assert len(lines) == 1
    assert lines[0].startswith(f"data web ({web.url}{path}): its server answered")


def test_the_time_limit_is_enforced(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "spottrain.cloud.data", str(tmp_path / "cache"), "0.2"],
        stdin=subprocess.PIPE,  # whose end never comes
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    with child.stdout, child.stdin:
        assert child.wait(600) == 3
        told = child.stdout.read()
    assert told == "data: took longer than 0.2 s; raise data_limit_s\n"


def has_own_mounts() -> bool:
    """Return True if a process can have its own mounts here."""
    try:
        return not subprocess.run(["unshare", "-m", "true"], check=False).returncode
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not has_own_mounts(), reason="needs root and unshare")
def test_a_file_system_is_mounted_once(tmp_path: Path) -> None:
    bringing = f"{sys.executable} -m spottrain.cloud.data {tmp_path}/cache 60"
    requests = to_json([DataRequest(name="own", mount="none", type="tmpfs", options="size=1m")])
    (tmp_path / "requests").write_text(requests)
    twice = f"{bringing} <requests && {bringing} <requests && grep {tmp_path} /proc/mounts"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", twice],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    first, second, *mounts = done.stdout.splitlines()
    assert first == second
    (target,) = json.loads(first).values()
    assert Path(target).parent == tmp_path / "cache-mounts"
    assert [line.split()[1:3] for line in mounts] == [[target, "tmpfs"]]


NFS = DataRequest(name="shared", mount="server:/", type="nfs4", options="ro,hard")


@pytest.fixture
def mounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a ``mount`` first in the path that notes its arguments and does nothing."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    script = tools / "mount"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        f"cat {tmp_path}/says >&2\nexit $(cat {tmp_path}/code)\n"
    )
    script.chmod(0o755)
    (tmp_path / "says").touch()
    (tmp_path / "code").write_text("0")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def test_mount_gets_type_and_options(mounting: Path) -> None:
    target = mount(NFS, mounting / "cache")
    assert target.is_dir()
    asked = (mounting / "asked").read_text()
    assert asked == f"-t nfs4 -o ro,hard server:/ {target}\n"


def test_an_existing_mount_is_reused(mounting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    mount(NFS, mounting / "cache")
    assert not (mounting / "asked").exists()


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("mount: bad option; you might need a helper program", DataError),
        ("mount.nfs4: access denied by server", DataError),
        ("mount.nfs4: Connection timed out", DataUnavailableError),
    ],
)
def test_the_error_of_mount_is_reported(mounting: Path, says: str, kind: type[Exception]) -> None:
    (mounting / "says").write_text(says)
    (mounting / "code").write_text("32")
    with pytest.raises(kind, match=rf"^data shared \(server:/\): {says}"):
        mount(NFS, mounting / "cache")


def test_without_root_mount_uses_sudo(mounting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(mounting / "tools"))
    with pytest.raises(DataError, match="this machine has no sudo; install it"):
        mount(NFS, mounting / "cache")
