"""One SSH connection to a host and its host agent; every wait has a deadline.

Host keys are never trusted on first use: the key must be known beforehand.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.ssh_exception import IncompatiblePeer

from spottrain.cloud.port.errors import AuthError, CloudError
from spottrain.cloud.ssh.on_vm import host_agent
from spottrain.cloud.ssh.transport import hosts, proxy
from spottrain.cloud.ssh.transport.conversation import CALL_S, ByteStream, Conversation
from spottrain.errors import one_line

CONNECT_S = 10.0
"""Time limit of each step of connecting."""
_KEEPALIVE_S = 15
_LOADER = """
import sys
if sys.version_info < (3, 11):
    sys.exit("unfit: has Python %d.%d.%d, needs 3.11 or newer" % sys.version_info[:3])
sys.path.remove("")
print(flush=True)
stdin = sys.stdin.buffer
code = stdin.read(int(stdin.readline()))
exec(compile(code, "spottrain", "exec"), {"__name__": "spottrain_host_agent"})
"""
"""The empty line ends what a login shell's files have printed."""
# Images of clouds hold torch in an environment of its own: AWS's release notes name the
# first, older ones of Google and Azure had the second. Without torch: the system's.
_FINDING = (
    "for python in /opt/pytorch/bin/python /opt/conda/bin/python python3; do "
    """"$python" -c 'import importlib.util as u; exit(not u.find_spec("torch"))' """
    '2>/dev/null && break; done; exec "$python" -c "$1"'
)
_MAIN = """
import pathlib, sys
serve(sys.stdin.buffer, sys.stdout.buffer, pathlib.Path.home() / %r)
"""

_BAD_KEYS: tuple[type[Exception], ...] = (
    ValueError,  # binascii.Error, too
    TypeError,
    paramiko.SSHException,
    paramiko.pkey.UnknownKeyType,
    UnsupportedAlgorithm,
)
"""What paramiko and cryptography raise over a key that they do not understand."""
_FAILURES: tuple[type[Exception], ...] = (*_BAD_KEYS, OSError, EOFError)
"""What they raise while connecting."""

# Connection failures are reported as our own errors.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def dial(host: hosts.Host) -> socket.socket | paramiko.Channel:
    """Return a connection to a host's SSH server: by TCP, or through its ``proxy_jump``.

    Raises:
        OSError: no answer.
        UnfitHostError: this machine has no ``ssh`` for the jump.
    """
    if host.proxy_jump:
        return proxy.dial_through(proxy.through_jump)(host)
    connection = socket.create_connection((host.address, host.port), CONNECT_S)
    if sys.platform == "linux":  # elsewhere a dead host is noticed by keep-alives
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * _KEEPALIVE_S)
    return connection


Dial = Callable[[hosts.Host], socket.socket | paramiko.Channel]
"""Opens the connection to a host: ``dial``, or through a bastion or a tool."""


class Session(Conversation):
    """An SSH connection to a running host agent; ``close`` it at the end.

    Args:
        dial: Opens the TCP connection.

    Raises:
        UnreachableHostError: it does not answer in time.
        HostKeyError: its host key is unknown or wrong.
        AuthError: it refuses us.
        UnfitHostError: it has no suitable Python.
    """

    def __init__(self, host: hosts.Host, dial: Dial = dial) -> None:
        super().__init__(host)
        self._client = connect(host, dial)
        try:
            self._start_host_agent()
            hello = self.wait_for_hello(CONNECT_S)
        except BaseException:
            self._client.close()
            raise
        self.private_address = host.private_address or hello["address"] or host.address
        """Address of this host for the others."""

    def close(self) -> None:
        """Close the connection; processes on the host keep running."""
        self._client.close()

    def forward(self, handler: Callable[[paramiko.Channel], None]) -> int | None:
        """Make the host listen on its loopback; return the port, None if refused.

        Args:
            handler: Called with each connection; must not block.
        """
        transport = self._client.get_transport()
        if transport is None:
            return None
        try:
            return transport.request_port_forward(
                "127.0.0.1", 0, lambda channel, origin, server: handler(channel)
            )
        except (paramiko.SSHException, OSError, EOFError):
            return None

    def stop_forwarding(self, port: int) -> None:
        """Make the host stop listening on a port."""
        transport = self._client.get_transport()
        if transport is not None and transport.is_active():
            with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                transport.cancel_port_forward("127.0.0.1", port)

    def _start_host_agent(self) -> None:
        """Start the host agent; its first answer has the number 0."""
        source = Path(host_agent.__file__).read_text() + _MAIN % self.host.folder
        code = source.encode()
        command = agent_command(self.host.python)
        try:
            transport = self._client.get_transport()
            assert transport is not None
            channel = transport.open_session(timeout=CONNECT_S)
            channel.settimeout(CALL_S)
            channel.exec_command(command)
            self.listen(channel)
            channel.sendall(b"%d\n%b" % (len(code), code))
        except (paramiko.SSHException, OSError, EOFError) as error:
            if not self._waiting[0].done():
                self._dead.wait(CONNECT_S)
            if self._waiting[0].done():
                self._waiting[0].result()
            raise hosts.UnreachableHostError(
                f"{self.host.place}: {error or type(error).__name__}"
            ) from error

    def end_reason(self, stream: ByteStream) -> CloudError:
        """Return why the connection ended, such as no suitable Python."""
        channel = cast(paramiko.Channel, stream)
        place, python = self.host.place, self.host.python
        named = "python3" if python == hosts.FIND_PYTHON else python
        channel.status_event.wait(1.0)  # the exit status follows the output
        code = channel.exit_status
        said = b"".join(iter(lambda: _recv_stderr(channel), b"")).decode(errors="replace")
        for line in said.splitlines():
            if line.startswith("unfit: "):
                advice = "" if "Python" not in line else "; name another with python:"
                return hosts.UnfitHostError(f"{place}: {line.removeprefix('unfit: ')}{advice}")
        if code in (126, 127):
            return hosts.UnfitHostError(
                f"{place}: has no {named}; install Python 3.11 or newer, or name one with python:"
            )
        last = (said.strip().splitlines() or ["connection lost"])[-1]
        if code > 0:
            return hosts.UnfitHostError(f"{place}: {named} ended with {code}: {last}")
        if code == 0 and 0 in self._waiting:
            return hosts.UnfitHostError(
                f"{place}: the login shell of {self.host.user} ends before it runs a "
                "command; correct its files, such as ~/.bashrc, for shells without a "
                "terminal"
            )
        return hosts.UnreachableHostError(f"{place}: {last}")


def agent_command(python: str) -> str:
    """Return the command line that starts the host agent.

    In one line, as csh and tcsh need it within quotes. With exec: its parent is then the
    sshd process of this connection.
    """
    loader = base64.b64encode(_LOADER.encode()).decode()
    name = "spottrain_host_agent"  # for people who list processes
    code = shlex.quote(f'import base64; {name} = 1; exec(base64.b64decode("{loader}"))')
    if python == hosts.FIND_PYTHON:
        return f"exec /bin/sh -c {shlex.quote(_FINDING)} sh {code}"
    return f"exec {shlex.quote(python)} -c {code}"


def _recv_stderr(channel: paramiko.Channel) -> bytes:
    return channel.recv_stderr(4096) if channel.recv_stderr_ready() else b""


def connect(host: hosts.Host, dial: Dial = dial) -> paramiko.SSHClient:
    """Return an authenticated connection to a host whose key was checked.

    Raises:
        CloudError: it does not answer, has a wrong key, or refuses us.
    """
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    for key in trusted_keys(host):
        client.get_host_keys().add(_known_as(host), key.get_name(), key)
    tool: proxy.ProxySocket | None = None
    try:
        way = dial(host)
        tool = way if isinstance(way, proxy.ProxySocket) else None
        client.connect(
            host.address,
            host.port,
            host.user,
            sock=way,
            key_filename=str(host.key_file) if host.key_file else None,
            allow_agent=host.key_file is None,
            look_for_keys=host.key_file is None,
            timeout=CONNECT_S,
            banner_timeout=proxy.CONNECT_S if tool else CONNECT_S,
            auth_timeout=CONNECT_S,
        )
        transport = client.get_transport()
        assert transport is not None
        transport.set_keepalive(_KEEPALIVE_S)
    except _FAILURES as error:
        client.close()
        translated = _translate(host, error)
        if tool is not None:
            tool.close()
            if tool.complaint and isinstance(translated, hosts.UnreachableHostError):
                translated = hosts.UnreachableHostError(f"{host.place}: {tool.complaint}")
        raise translated from error
    return client


def _known_as(host: hosts.Host) -> str:
    """Return a host's name in known_hosts files."""
    return host.address if host.port == 22 else f"[{host.address}]:{host.port}"


def trusted_keys(host: hosts.Host) -> list[paramiko.PKey]:
    """Return the host keys to accept.

    Raises:
        HostKeyError: ``host_key`` is not a public key.
    """
    if host.host_keys:
        return _cloud_keys(host)
    if host.host_key is None:
        return _known_keys(host.known_hosts, _known_as(host))
    try:
        kind, data = host.host_key.split()[:2]
        return [paramiko.PKey.from_type_string(kind, base64.b64decode(data))]
    except _BAD_KEYS as error:
        raise hosts.HostKeyError(
            f"{host.place}: host_key must be 'type base64', as ssh-keyscan prints it: {error}"
        ) from error


def _known_keys(file: Path, name: str) -> list[paramiko.PKey]:
    """Return the keys of a host in a known_hosts file, the first of each type.

    Lines that are not understood are others' concern: comments, types of keys that
    paramiko does not know, and markers (a revoked key must not be taken for a good one).
    """
    if not file.is_file():
        return []
    keys: dict[str, paramiko.PKey] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        names, _, rest = line.strip().partition(" ")
        if not names or names[0] in "#@" or not _is_named(name, names.split(",")):
            continue
        with contextlib.suppress(*_BAD_KEYS, IndexError):
            kind, data = rest.split()[:2]
            key = paramiko.PKey.from_type_string(kind, base64.b64decode(data))
            keys.setdefault(key.get_name(), key)
    return list(keys.values())


def _is_named(name: str, names: list[str]) -> bool:
    for one in names:
        if one == name:
            return True
        if one.startswith("|1|"):
            with contextlib.suppress(*_BAD_KEYS, IndexError, AssertionError):
                if paramiko.HostKeys.hash_host(name, one) == one:
                    return True
    return False


def _cloud_keys(host: hosts.Host) -> list[paramiko.PKey]:
    """Return the keys reported by a cloud that have a supported type."""
    keys = []
    for line in host.host_keys:
        kind, data = line.split()[:2]
        with contextlib.suppress(*_BAD_KEYS):
            keys.append(paramiko.PKey.from_type_string(kind, base64.b64decode(data)))
    # The first type is requested from the host: ed25519 is the fastest.
    keys.sort(key=lambda key: key.get_name() != "ssh-ed25519")
    return keys


def _translate(host: hosts.Host, error: Exception) -> CloudError:
    """Return our error for a failed connection."""
    place = host.place
    match error:
        case paramiko.BadHostKeyException():
            got = error.key.fingerprint
            wanted = error.expected_key.fingerprint
            if host.host_keys:
                return hosts.HostKeyError(
                    f"{place}: its host key is not the one that its cloud reports: got "
                    f"{got}, expected {wanted}; possible man-in-the-middle attack"
                )
            where = "host_key" if host.host_key else str(host.known_hosts)
            return hosts.HostKeyError(
                f"{place}: its host key is not the known one: got {got}, expected "
                f"{wanted}; if the host was reinstalled, change {where}; "
                "otherwise this is a possible man-in-the-middle attack"
            )
        case paramiko.PasswordRequiredException():
            return AuthError(
                f"{place}: {host.key_file or 'the key'} needs a passphrase; add it to an "
                "SSH agent (ssh-add) and leave key_file out"
            )
        case paramiko.AuthenticationException():
            return AuthError(
                f"{place}: does not accept {host.user} with "
                f"{host.key_file or 'any key of the SSH agent or ~/.ssh'}; check user and "
                "key_file"
            )
        case paramiko.SSHException() if "No authentication methods" in str(error):
            return AuthError(
                f"{place}: there is no key in the SSH agent or ~/.ssh; add one (ssh-add), "
                "or name it with key_file"
            )
        case paramiko.SSHException() if "not found in known_hosts" in str(error):
            return hosts.HostKeyError(
                f"{place}: its host key is unknown; give host_key:, or compare the key "
                f"and add it to {host.known_hosts}"
            )
        case OSError() if host.key_file and error.filename == str(host.key_file):
            return AuthError(f"{host.key_file}: {error.strerror}; check key_file")
        case IncompatiblePeer() | paramiko.ConfigParseError():
            return hosts.UnfitHostError(
                f"{place}: {_reason(error)}; correct what its sshd_config and this "
                "machine's SSH allow"
            )
        case paramiko.SSHException() if not _is_bad_key(error):
            return hosts.UnreachableHostError(f"{place}: {_reason(error)}")
        case OSError() | EOFError():
            return hosts.UnreachableHostError(f"{place}: {_reason(error)}")
        case _:
            key = host.key_file or "a key of ~/.ssh"
            return AuthError(
                f"{place}: {key} is no private key that can be read here: "
                f"{_reason(error)}; check key_file"
            )


def _reason(error: Exception) -> str:
    return one_line(error) or type(error).__name__


def _is_bad_key(error: paramiko.SSHException) -> bool:
    """Return whether paramiko could not read a private key; it has no class for that."""
    text = str(error)
    parts = ("private key", "encountered", "Invalid key", "base64", "Key object")
    return any(part in text for part in parts)
