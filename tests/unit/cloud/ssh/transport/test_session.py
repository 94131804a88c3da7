"""What connects to a host: its login shell, known keys, and paramiko's errors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import paramiko
import pytest
from paramiko import ssh_exception
from tests.fakes.sshd import keygen

from spottrain.cloud.port.errors import AuthError, CloudError
from spottrain.cloud.ssh.transport import session
from spottrain.cloud.ssh.transport.hosts import (
    FIND_PYTHON,
    Host,
    UnfitHostError,
    UnreachableHostError,
)

HOST = Host(name="a", address="10.0.0.1", user="me", key_file=Path("/keys/me"))
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish")


@pytest.mark.parametrize("python", [sys.executable, FIND_PYTHON])
@pytest.mark.parametrize("shell", SHELLS)
def test_the_host_agent_starts_from_any_login_shell(shell: str, python: str) -> None:
    command, code = session.agent_command(python), b"print('hello', __name__)"
    # csh ends a quoted text with the line, and takes what follows a ! from its history.
    assert "\n" not in command
    assert "!" not in command
    if (found := shutil.which(shell)) is None:
        return
    done = subprocess.run(
        [found, "-c", command],
        input=b"%d\n%b" % (len(code), code),
        capture_output=True,
        check=True,
    )
    assert done.stdout.splitlines() == [b"", b"hello spottrain_host_agent"]


def test_known_hosts_may_hold_lines_that_are_not_ours(tmp_path: Path) -> None:
    ours, other = (keygen(tmp_path / name) for name in ("ours", "other"))
    hashed = paramiko.HostKeys.hash_host("10.0.0.1")
    file = tmp_path / "known_hosts"
    file.write_bytes(
        b"# comment \xff\n\n10.0.0.1\n10.0.0.1 ssh-ed25519 no-base64!\n"
        b"10.0.0.1 sk-ssh-ed25519@openssh.com AAAA\n|1|broken|x y z\n"
        + f"@revoked 10.0.0.1 {other}\n@cert-authority * {other}\n"
        f"10.0.0.2 {other}\n{hashed} {ours}\n".encode()
    )
    (key,) = session._known_keys(file, "10.0.0.1")
    assert f"{key.get_name()} {key.get_base64()}" == ours
    assert session._known_keys(file, "10.0.0.3") == []
    assert session._known_keys(tmp_path / "none", "10.0.0.1") == []


def made(kind: type[Exception]) -> Exception:
    match kind.__name__:
        case "BadHostKeyException":
            key = paramiko.ECDSAKey.generate()
            return kind("h", key, key)
        case "BadAuthenticationType":
            return kind("refused", ["publickey"])
        case "PartialAuthentication":
            return kind(["publickey"])
        case "ChannelException":
            return kind(1, "refused")
        case "NoValidConnectionsError":
            return kind({("10.0.0.1", 22): OSError("refused")})
        case "UnknownKeyType":
            return kind("rot13", b"x")
        case "ProxyCommandFailure":
            return kind("ssh", 1)
        case _:
            return kind("refused")


TRANSLATED: dict[type[Exception], type[CloudError]] = {
    ssh_exception.SSHException: UnreachableHostError,
    ssh_exception.AuthenticationException: AuthError,
    ssh_exception.PasswordRequiredException: AuthError,
    ssh_exception.BadAuthenticationType: AuthError,
    ssh_exception.PartialAuthentication: AuthError,
    ssh_exception.UnableToAuthenticate: AuthError,
    ssh_exception.BadHostKeyException: AuthError,
    ssh_exception.ChannelException: UnreachableHostError,
    ssh_exception.IncompatiblePeer: UnfitHostError,
    ssh_exception.ProxyCommandFailure: UnreachableHostError,
    ssh_exception.NoValidConnectionsError: UnreachableHostError,
    ssh_exception.CouldNotCanonicalize: UnreachableHostError,
    ssh_exception.ConfigParseError: UnfitHostError,
    ssh_exception.MessageOrderError: UnreachableHostError,
    paramiko.pkey.UnknownKeyType: AuthError,
    ValueError: AuthError,
    TimeoutError: UnreachableHostError,
    EOFError: UnreachableHostError,
}


@pytest.mark.parametrize(("kind", "translated"), TRANSLATED.items())
def test_every_error_of_paramiko_is_one_that_somebody_can_act_on(
    kind: type[Exception], translated: type[CloudError]
) -> None:
    error = session._translate(HOST, made(kind))
    assert isinstance(error, translated)
    assert "\n" not in str(error)


def test_no_class_of_paramiko_is_forgotten() -> None:
    classes = [x for x in vars(ssh_exception).values() if isinstance(x, type)]
    ours = {x for x in classes if x.__module__ == ssh_exception.__name__}
    assert ours <= TRANSLATED.keys()


@pytest.mark.parametrize(
    "text",
    [
        "not a valid OPENSSH private key file",
        "encountered RSA key, expected OPENSSH key",
        "base64 decoding error: Incorrect padding",
    ],
)
def test_a_key_that_cannot_be_read_is_named(text: str) -> None:
    error = session._translate(HOST, paramiko.SSHException(text))
    assert isinstance(error, AuthError)
    assert "/keys/me" in str(error)
