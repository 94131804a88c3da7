"""One SSH connection to a host and its host agent; every wait has a deadline.

Host keys are never trusted on first use: the key must be known beforehand.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.ssh_exception import IncompatiblePeer

from spottrain.cloud.port.errors import AuthError, CloudError, VmNotFoundError
from spottrain.cloud.ssh.on_vm import host_agent
from spottrain.cloud.ssh.transport import hosts, proxy
from spottrain.errors import one_line

CONNECT_S = 10.0
"""Time limit of each step of connecting."""
CALL_S = 30.0
"""Time limit of an answer."""
_KEEPALIVE_S = 15
_CHUNK_BYTES = 64 * 1024
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


class Session:
    """A connection to a running host agent; ``close`` it at the end.

    Args:
        dial: Opens the TCP connection.

    Raises:
        UnreachableHostError: it does not answer in time.
        HostKeyError: its host key is unknown or wrong.
        AuthError: it refuses us.
        UnfitHostError: it has no suitable Python.
    """

    def __init__(self, host: hosts.Host, dial: Dial = dial) -> None:
        self.host = host
        self._client = connect(host, dial)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._sending = threading.Lock()
        self._dead = threading.Event()
        try:
            self._channel = self._start_host_agent()
            hello = self._wait(0, "hello", CONNECT_S)
        except BaseException:
            self._client.close()
            raise
        self.private_address = host.private_address or hello["address"] or host.address
        """Address of this host for the others."""

    @property
    def alive(self) -> bool:
        """True while connected."""
        return not self._dead.is_set()

    def close(self) -> None:
        """Close the connection; processes on the host keep running."""
        self._client.close()

    def call(self, operation: str, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Return the result of an operation of ``host_agent.HostAgent``.

        Raises:
            VmNotFoundError: the VM is no longer on the host.
            UnfitHostError: the operation failed.
            UnreachableHostError: no answer in time.
        """
        return self._wait(self._send(operation, arguments), operation, timeout_s)

    def unpack(
        self, vm_id: str, name: str, archive: bytes, timeout_s: float, keep: str = ""
    ) -> None:
        """Send an archive (tar.gz) and have it unpacked into ``name``.

        Args:
            vm_id: The VM on the host.
            name: Folder below ours.
            keep: Its SHA-256, if the host is to keep it for other VMs.

        Raises:
            CloudError: as ``call``.
        """
        arguments = {"vm_id": vm_id, "name": name, "bytes": len(archive), "keep": keep}
        self._wait(self._send("unpack", arguments, archive), f"unpack {name}", timeout_s)

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

    def _start_host_agent(self) -> paramiko.Channel:
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
            threading.Thread(
                target=self._read, args=(channel,), name=self.host.name, daemon=True
            ).start()
            channel.sendall(b"%d\n%b" % (len(code), code))
        except (paramiko.SSHException, OSError, EOFError) as error:
            if not self._waiting[0].done():
                self._dead.wait(CONNECT_S)
            if self._waiting[0].done():
                self._waiting[0].result()
            raise hosts.UnreachableHostError(
                f"{self.host.place}: {error or type(error).__name__}"
            ) from error
        return channel

    def _send(self, op: str, arguments: dict[str, Any], data: bytes = b"") -> int:
        number = next(self._numbers)
        self._waiting[number] = Future()
        line = json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n"
        with self._sending:
            try:
                self._channel.sendall(line)
                self._channel.sendall(data)
            except (OSError, EOFError) as error:
                self._client.close()  # half a request may have been sent
                self._waiting.pop(number, None)
                raise hosts.UnreachableHostError(
                    f"{self.host.place}: connection lost: {error or 'closed'}"
                ) from error
        if self._dead.is_set():
            self._fail_all(hosts.UnreachableHostError(f"{self.host.place}: connection lost"))
        return number

    def _wait(self, number: int, operation: str, timeout_s: float) -> Any:
        try:
            return self._waiting[number].result(timeout_s)
        except FutureTimeoutError as error:
            raise hosts.UnreachableHostError(
                f"{self.host.place}: no answer to {operation} in {timeout_s:g} s"
            ) from error
        finally:
            self._waiting.pop(number, None)

    def _read(self, channel: paramiko.Channel) -> None:
        """Read answers until the connection ends."""
        try:
            for line in _lines(channel):
                answer = answer_in(line)
                if answer is None and 0 in self._waiting:
                    continue  # printed by the login shell's files, such as ~/.bashrc
                if answer is None:
                    raise ValueError(f"no answer: {line!r}")
                waiting = self._waiting.get(answer["id"])
                if waiting is None:
                    continue  # its call has timed out
                if "error" in answer:
                    waiting.set_exception(refusal(self.host.place, answer["error"]))
                else:
                    waiting.set_result(answer["ok"])
        except (OSError, ValueError):
            self._client.close()
        self._dead.set()
        self._fail_all(self._end_reason(channel))

    def _fail_all(self, error: CloudError) -> None:
        for waiting in tuple(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(error)

    def _end_reason(self, channel: paramiko.Channel) -> CloudError:
        """Return why the connection ended, such as no suitable Python."""
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


def refusal(place: str, reason: str) -> CloudError:
    """Return the error for an answer of the host agent that says why it refuses."""
    if reason.startswith("gone: "):
        return VmNotFoundError(f"{place}: {reason.removeprefix('gone: ')}")
    return hosts.UnfitHostError(f"{place}: {reason}")


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


def answer_in(line: bytes) -> dict[str, Any] | None:
    """Return what the host agent answers in a line; None: nothing."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    is_one = isinstance(answer, dict) and "id" in answer
    return answer if is_one and ("ok" in answer or "error" in answer) else None


def _lines(channel: paramiko.Channel) -> Iterator[bytes]:
    """Yield what a host says, line by line, until it ends; it may be silent for long.

    A channel has one time limit for both directions, and is idle while nothing is asked.
    """
    rest = b""
    while True:
        try:
            data = channel.recv(_CHUNK_BYTES)
        except TimeoutError:
            continue
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


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
