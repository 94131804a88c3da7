"""Requests to a host agent over a stream of bytes, whatever carries it."""

from __future__ import annotations

import itertools
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.ssh.transport.hosts import Host, UnfitHostError, UnreachableHostError

CALL_S = 30.0
"""Time limit of an answer."""
_CHUNK_BYTES = 64 * 1024


class ByteStream(Protocol):
    """The bytes from and to a host agent: a socket, or a channel of SSH."""

    def sendall(self, data: bytes, /) -> object:
        """Send all of it."""

    def recv(self, size: int, /) -> bytes:
        """Return what has come, empty at the end."""


class Conversation(ABC):
    """One connection to a host agent (``on_vm.host_agent``), with many calls at a time.

    Args:
        host: The host, for messages.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._stream: ByteStream
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._sending = threading.Lock()
        self._dead = threading.Event()

    @abstractmethod
    def close(self) -> None:
        """Close the connection; processes on the host keep running."""

    @abstractmethod
    def end_reason(self, stream: ByteStream) -> CloudError:
        """Return why the connection ended."""

    @property
    def alive(self) -> bool:
        """True while connected."""
        return not self._dead.is_set()

    def listen(self, stream: ByteStream) -> None:
        """Take answers from a stream from now on, and send requests to it."""
        self._stream = stream
        name = self.host.name
        threading.Thread(target=self._read, args=(stream,), name=name, daemon=True).start()

    def wait_for_hello(self, timeout_s: float) -> Any:
        """Return what the host agent says first.

        Raises:
            CloudError: as ``call``.
        """
        return self._wait(0, "hello", timeout_s)

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

    def _send(self, op: str, arguments: dict[str, Any], data: bytes = b"") -> int:
        number = next(self._numbers)
        self._waiting[number] = Future()
        line = json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n"
        with self._sending:
            try:
                self._stream.sendall(line)
                self._stream.sendall(data)
            except (OSError, EOFError) as error:
                self.close()  # half a request may have been sent
                self._waiting.pop(number, None)
                raise UnreachableHostError(
                    f"{self.host.place}: connection lost: {error or 'closed'}"
                ) from error
        if self._dead.is_set():
            self._fail_all(UnreachableHostError(f"{self.host.place}: connection lost"))
        return number

    def _wait(self, number: int, operation: str, timeout_s: float) -> Any:
        try:
            return self._waiting[number].result(timeout_s)
        except FutureTimeoutError as error:
            raise UnreachableHostError(
                f"{self.host.place}: no answer to {operation} in {timeout_s:g} s"
            ) from error
        finally:
            self._waiting.pop(number, None)

    def _read(self, stream: ByteStream) -> None:
        """Read answers until the connection ends."""
        try:
            for line in _lines(stream):
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
            self.close()
        self._dead.set()
        self._fail_all(self.end_reason(stream))

    def _fail_all(self, error: CloudError) -> None:
        for waiting in tuple(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(error)


def refusal(place: str, reason: str) -> CloudError:
    """Return the error for an answer of the host agent that says why it refuses."""
    if reason.startswith("gone: "):
        return VmNotFoundError(f"{place}: {reason.removeprefix('gone: ')}")
    return UnfitHostError(f"{place}: {reason}")


def answer_in(line: bytes) -> dict[str, Any] | None:
    """Return what the host agent answers in a line; None: nothing."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    is_one = isinstance(answer, dict) and "id" in answer
    return answer if is_one and ("ok" in answer or "error" in answer) else None


def _lines(stream: ByteStream) -> Iterator[bytes]:
    """Yield what a host says, line by line, until it ends; it may be silent for long.

    A stream has one time limit for both directions, and is idle while nothing is asked.
    """
    rest = b""
    while True:
        try:
            data = stream.recv(_CHUNK_BYTES)
        except TimeoutError:
            continue
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
