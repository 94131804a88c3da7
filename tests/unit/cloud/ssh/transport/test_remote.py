"""Commands on a host, against a real SSH server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.sshd import WHY_NOT, Sshd, keygen

from spottrain.cloud.port.errors import AuthError
from spottrain.cloud.ssh.transport import session as session_module
from spottrain.cloud.ssh.transport.hosts import (
    FIND_PYTHON,
    HostKeyError,
    UnfitHostError,
    UnreachableHostError,
)
from spottrain.cloud.ssh.transport.proxy import through_jump
from spottrain.cloud.ssh.transport.remote import Remote
from spottrain.cloud.ssh.transport.session import Session

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("remote")
    keygen(folder / "key")
    server = Sshd(folder, folder / "key")
    server.start()
    yield server
    server.stop()


def test_a_command_gets_its_input_and_returns_its_exit_code(sshd: Sshd) -> None:
    data = bytes(range(256)) * 40_000
    with Remote(sshd.host("h")) as remote:
        assert remote.check("wc -c", data).strip() == str(len(data))
        done = remote.run("echo one; echo two >&2; exit 7")
        assert (done.code, done.last_line) == (7, "two")


def test_a_failed_command_is_reported_by_its_last_line(sshd: Sshd) -> None:
    with Remote(sshd.host("h")) as remote, pytest.raises(UnfitHostError) as failed:
        remote.check("echo first; echo what went wrong; exit 1")
    assert str(failed.value).endswith("): what went wrong")


def test_a_command_that_takes_too_long_fails(sshd: Sshd) -> None:
    late = pytest.raises(UnreachableHostError, match=r"no answer in 0\.3 s")
    with Remote(sshd.host("h")) as remote, late:
        remote.run("sleep 60", timeout_s=0.3)


def test_a_wrong_host_key_or_refused_login_is_an_error(sshd: Sshd, tmp_path: Path) -> None:
    other_key = keygen(tmp_path / "other")
    with pytest.raises(HostKeyError):
        Remote(sshd.host("h", host_key=other_key))
    with pytest.raises(AuthError):
        Remote(sshd.host("h", key_file=tmp_path / "other"))


def test_a_host_that_is_asked_nothing_stays_connected(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "CALL_S", 0.2)
    session = Session(sshd.host("h"))
    try:
        time.sleep(1.0)  # the time is what is tested
        assert session.alive
        assert session.call("probe", 30.0)["python"]
    finally:
        session.close()


def test_the_python_of_an_image_that_has_torch_is_found(sshd: Sshd) -> None:
    # None of the images' own environments is here: python3 it is.
    session = Session(sshd.host("h", python=FIND_PYTHON))
    try:
        assert session.call("probe")["python"]
    finally:
        session.close()


def test_a_host_behind_a_jump_host_is_reached_as_the_users_ssh_says(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = sshd.known_to_ssh("front", is_trusted=False)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    host = sshd.host("h", proxy_jump="front")
    with pytest.raises(UnreachableHostError, match="Host key verification failed"):
        Remote(host)
    sshd.known_to_ssh("front")
    with Remote(host) as remote:
        assert remote.check("echo $SSH_CONNECTION").split()[2] == sshd.address
    assert through_jump(sshd.host("h", proxy_jump="me@one:1,two"))[3:] == [
        "-J",
        "me@one:1",
        "-W",
        f"[{sshd.address}]:{sshd.port}",
        "--",
        "ssh://two",
    ]
