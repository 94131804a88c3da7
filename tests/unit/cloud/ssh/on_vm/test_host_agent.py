"""Our hands on a host, without the way there."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import costly

from spottrain.cloud.port import lease
from spottrain.cloud.ssh.on_vm import host_agent
from spottrain.cloud.ssh.on_vm.host_agent import (
    HostAgent,
    RefusedError,
    gpu_names,
    serve,
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".spottrain"


def claim(owner: str, vm_id: str, valid_s: float = 60.0) -> dict[str, Any]:
    until_s = time.time() + valid_s
    return {"owner": owner, "job": owner, "vm_id": vm_id, "expires_at": until_s}


def test_the_first_claim_wins(root: Path) -> None:
    hands, first = HostAgent(root), claim("a", "a-1")
    assert hands.status() == {"claim": None, "state": "free"}
    assert hands.claim(first) == first
    assert HostAgent(root).claim(claim("b", "b-1")) == first
    assert hands.status() == {"claim": first, "state": "claimed"}
    assert hands.end("b-1") == {}
    assert hands.end("a-1") == {}
    assert not root.exists()


def test_hosts_with_the_same_home_folder_are_told(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HostAgent(root).claim(claim("a", "a-1"))
    monkeypatch.setattr(platform, "node", lambda: "another")
    for ask in (
        HostAgent(root).status,
        lambda: HostAgent(root).claim(claim("a", "a-2")),
        lambda: HostAgent(root).end("a-1"),
    ):
        with pytest.raises(RefusedError, match=r"ssh\.folder"):
            ask()
    assert root.exists()


def test_an_expired_claim_can_be_replaced(root: Path) -> None:
    hands = HostAgent(root)
    hands.claim(claim("a", "a-1", -1.0))
    assert hands.status()["state"] == "over"
    assert hands.claim(claim("b", "b-1"))["vm_id"] == "b-1"


@costly
@given(
    st.lists(
        st.tuples(st.sampled_from(["claim", "end"]), st.sampled_from("abc")),
        max_size=12,
    )
)
def test_a_host_has_one_vm_at_a_time(root: Path, steps: list[tuple[str, str]]) -> None:
    hands, holder = HostAgent(root), ""
    for what, who in steps:
        if what == "claim":
            holder = holder or who
            assert hands.claim(claim(who, f"{who}-1"))["owner"] == holder
        else:
            hands.end(f"{who}-1")
            holder = "" if holder == who else holder
        assert root.exists() == bool(holder)
    hands.end(f"{holder}-1")


def test_nothing_is_unpacked_for_an_ended_vm(root: Path) -> None:
    root.mkdir()
    archive = root / "arriving"
    archive.write_bytes(b"")
    with pytest.raises(RefusedError, match="gone: VM a-1 is no longer on this host"):
        HostAgent(root).unpack("a-1", "a-1/workdir", archive)
    assert not root.exists()


def packed(archive: Path, name: str) -> Path:
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return archive


def test_a_vm_ends_while_our_software_is_half_unpacked(root: Path) -> None:
    hands = HostAgent(root)
    hands.claim(claim("a", "a-1"))
    archive = packed(root / "arriving-1-2", "spottrain/__init__.py")
    reached, may_go = threading.Event(), threading.Event()

    class Slow(HostAgent):
        def _extract(self, vm_id: str, archive: Path, draft: Path) -> None:
            super()._extract(vm_id, archive, draft)
            reached.set()
            may_go.wait(600)

    with ThreadPoolExecutor() as pool:
        unpacking = pool.submit(Slow(root).unpack, "a-1", "package-0123", archive)
        assert reached.wait(600)
        assert hands.end("a-1") == {}
        may_go.set()
        assert isinstance(unpacking.exception(20), RefusedError)
    assert not root.exists()


def test_an_unpacked_archive_replaces_the_old_folder(root: Path) -> None:
    hands = HostAgent(root)
    hands.claim(claim("a", "a-1"))
    for name in ("one", "two"):
        archive = packed(root / "arriving-1-2", name)
        hands.unpack("a-1", "a-1/workdir", archive)
    assert [path.name for path in (root / "a-1/workdir").iterdir()] == ["two"]
    assert sorted(path.name for path in root.iterdir()) == ["a-1", "claim.json"]


@pytest.mark.parametrize("python", ["3.11.3", "any newer"])
def test_an_archive_cannot_leave_its_folder(
    root: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if python == "3.11.3":
        monkeypatch.delattr(tarfile, "data_filter")
    hands = HostAgent(root)
    hands.claim(claim("a", "a-1"))
    archive = root / "arriving"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo("../../out"))
    with pytest.raises(RefusedError, match="a-1/workdir cannot be unpacked"):
        hands.unpack("a-1", "a-1/workdir", archive)
    assert not (root.parent / "out").exists()
    assert hands.has(["a-1/workdir"]) == [False]


def test_what_setup_installed_for_the_user_is_found(tmp_path: Path) -> None:
    """pip makes ~/.local at its first use, after this process looked for it."""
    script = tmp_path / "hands.py"
    script.write_text(
        f"""
import pathlib, runpy, site
hands = runpy.run_path({host_agent.__file__!r})["HostAgent"](pathlib.Path("root"))
print(hands.probe()["safetensors"])
made = pathlib.Path(site.getusersitepackages(), "safetensors-99.9.dist-info")
made.mkdir(parents=True)
(made / "METADATA").write_text("Metadata-Version: 2.1\\nName: safetensors\\nVersion: 99.9")
print(hands.probe()["safetensors"])
"""
    )
    told = subprocess.run(
        [os.path.realpath(sys.executable), script],
        env={"HOME": str(tmp_path), "PATH": os.defpath},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = told.stdout.splitlines()
    assert before != after == "99.9"


def test_requests_and_a_long_setup_renew_the_lease(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setup and data may take longer than the lease; the agent starts after them."""
    assert host_agent.LEASE_FILE == lease.FILE
    file = root.parent / "lease"
    monkeypatch.setattr(host_agent, "LEASE_FILE", file)
    monkeypatch.setattr(host_agent, "_RENEW_S", 0.01)

    def asked(**request: Any) -> bool:
        os.utime(file, (0, 0))
        line = json.dumps({"id": 1, **request}).encode() + b"\n"
        serve(io.BytesIO(line), io.BytesIO(), root)
        return file.stat().st_mtime > 0

    file.touch()
    assert asked(op="status")
    hands = HostAgent(root)
    hands.claim(claim("a", "a-1"))
    (root / "a-1" / "workdir").mkdir(parents=True)
    os.utime(file, (0, 0))
    until_renewed = f'while [ "$(stat -c %Y {file})" = 0 ]; do sleep 0.01; done'
    done = hands.setup("a-1", until_renewed, {}, 60.0)
    assert done["code"] == 0
    ahead_s = time.time() + 900
    os.utime(file, (ahead_s, ahead_s))
    host_agent.renew_lease()
    assert file.stat().st_mtime == pytest.approx(ahead_s)


def test_a_host_that_is_cleared_has_no_data_and_is_refused_once_it_ends(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = root.parent / "lib" / "lease"
    monkeypatch.setattr(host_agent, "LEASE_FILE", file)
    hands, data = HostAgent(root), root.with_name(f"{root.name}-data")
    hands.claim(claim("a", "a-1"))
    data.mkdir()
    (data / "of-a-user").touch()
    with pytest.raises(host_agent.RefusedError, match="no longer"):
        hands.clear("b-1")
    assert data.exists()
    assert hands.clear("a-1") == {}
    assert not data.exists()
    assert not root.exists()
    file.parent.mkdir()
    file.touch()  # there is a lease, and it is kept
    hands.clear("a-1")
    lease.give_up(file)
    with pytest.raises(host_agent.RefusedError, match="lease"):
        hands.clear("a-1")


def test_requests_are_answered_by_number_and_end_with_the_connection(
    root: Path,
) -> None:
    lines = [
        {"id": 1, "op": "status"},
        {"id": 2, "op": "set_manager_address", "vm_id": "x", "address": "a:1"},
        {"id": 3, "op": "has", "names": "no list of folders"},
    ]
    answers = io.BytesIO()
    asked = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    serve(io.BytesIO(asked), answers, root)
    deadline = time.monotonic() + 600
    while answers.getvalue().count(b"\n") < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    said = {x["id"]: x for x in map(json.loads, answers.getvalue().splitlines())}
    assert said[1]["ok"] == {"claim": None, "state": "free"}
    assert said[2]["error"].startswith("gone: ")
    assert set(said) == {0, 1, 2, 3}


def test_gpus_are_named_as_the_driver_names_them(tmp_path: Path) -> None:
    assert gpu_names(tmp_path) == ""
    for bus, name in (("01", "NVIDIA A10"), ("02", "Tesla T4"), ("03", "NVIDIA A10")):
        file = tmp_path / "gpus" / f"0000:{bus}:00.0" / "information"
        file.parent.mkdir(parents=True)
        file.write_text(f"Model: \t\t {name}\nIRQ:   \t\t 33\nGPU UUID: \t GPU-{bus}\n")
    assert gpu_names(tmp_path) == "NVIDIA A10 and Tesla T4"


def ready(root: Path) -> HostAgent:
    hands = HostAgent(root)
    hands.claim(claim("a", "a-1"))
    (root / "a-1" / "workdir").mkdir(parents=True)
    return hands


def test_what_setup_installs_is_bound_to_the_fleets_versions(root: Path) -> None:
    script = 'cat "$PIP_CONSTRAINT"; test "$PIP_CONSTRAINT" = "$UV_CONSTRAINT"'
    hands = ready(root)
    done = hands.setup("a-1", script, {}, 60.0, ["torch==2.10.0"])
    assert done["code"] == 0
    assert (root / "a-1" / "setup.log").read_text() == "torch==2.10.0\n"


def test_constraints_of_the_users_own_win(root: Path) -> None:
    hands = ready(root)
    own = {"PIP_CONSTRAINT": "mine.txt"}
    hands.setup("a-1", 'echo "$PIP_CONSTRAINT"', own, 60.0, ["torch==2.10.0"])
    assert (root / "a-1" / "setup.log").read_text() == "mine.txt\n"
