"""A program of ours on a host that the ``ssh`` command of this machine reaches.

OpenSSH and not paramiko where it matters what the user's ~/.ssh/config says: it alone can use
a connection that a person has opened with a second factor (ssh_config(5), ``ControlMaster``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from spottrain.cloud.port.errors import AuthError, CloudError, MisconfiguredError
from spottrain.cloud.ssh.on_vm.package import package
from spottrain.cloud.ssh.transport.conversation import answer_in
from spottrain.cloud.ssh.transport.proxy import ProxySocket
from spottrain.cloud.ssh.transport.session import agent_command

_CALL_S = 60.0
_START_S = 120.0
"""How long a login may take until our program answers there."""
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "20",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "3",
    "ExitOnForwardFailure": "yes",
}
_REFUSED = re.compile("Permission denied|Host key verification failed|authentication failures")
_MAIN = """
import io, pathlib, sys, tarfile, tempfile
with tempfile.TemporaryDirectory(prefix="spottrain-") as root:
    with tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read(%d))) as tar:
        tar.extractall(root, filter="data")
    sys.path.insert(0, root)
    from %s import main
    main(pathlib.Path(root))
"""


class OpensshProgram:
    """One ``ssh`` whose standard input and output lead to a program of ours.

    Args:
        where: What ``ssh`` is told, such as ``user@host``.
        python: The host's.
        module: Has the ``main`` that serves (``on_vm.host_agent.serve``), given a folder that
            holds this software and is removed with the connection; standard library only.
        options: Further ones of ``ssh``.

    Raises:
        CloudError: the host cannot be reached, or has no suitable Python.
    """

    def __init__(self, where: str, python: str, module: str, *options: str) -> None:
        given = (f"-o{name}={value}" for name, value in _OPTIONS.items())
        self._where = where
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._lock = threading.Lock()
        self.alive = True
        try:
            self._socket = ProxySocket(
                ["ssh", *given, *options, "--", where, agent_command(python)]
            )
        except OSError as error:
            raise MisconfiguredError(f"{where}: this machine has no ssh: {error}") from error
        threading.Thread(target=self._read, name=f"ssh-{where}", daemon=True).start()
        ours = package().archive
        code = (_MAIN % (len(ours), module)).encode()
        self._send(b"%d\n%b%b" % (len(code), code, ours))
        self._wait(0, "hello", _START_S)

    def call(self, operation: str, data: bytes | None = None, **arguments: Any) -> Any:
        """Return the result of an operation of the program.

        Args:
            data: An archive for it, which it gets as the path of a file.

        Raises:
            CloudError: it failed, or the connection has ended.
        """
        number = next(self._numbers)
        self._waiting[number] = Future()
        size = {} if data is None else {"bytes": len(data)}
        line = json.dumps({"id": number, "op": operation, **arguments, **size})
        self._send(line.encode() + b"\n" + (data or b""))
        return self._wait(number, operation, _CALL_S)

    def close(self) -> None:
        """Close the connection, which ends the program."""
        self.alive = False
        self._socket.close()

    def _send(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader says why
            self._socket.sendall(data)

    def _wait(self, number: int, operation: str, timeout_s: float) -> Any:
        if not self.alive:
            self._fail()
        try:
            return self._waiting[number].result(timeout_s)
        except FutureTimeoutError as error:
            self.close()
            raise CloudError(
                f"{self._where}: no answer to {operation} in {timeout_s:g} s"
            ) from error
        finally:
            self._waiting.pop(number, None)

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as answers:
            for line in answers:
                answer = answer_in(line)
                waiting = self._waiting.get(answer["id"]) if answer else None
                if answer is None or waiting is None:
                    continue  # printed by a login shell's files, or too late
                if "error" in answer:
                    waiting.set_exception(CloudError(f"{self._where}: {answer['error']}"))
                else:
                    waiting.set_result(answer["ok"])
        self.close()
        self._fail()

    def _fail(self) -> None:
        """Fail what waits with what ``ssh`` or the program has said last."""
        said = self._socket.complaint or "the connection is closed"
        error = CloudError(f"{self._where}: {said}")
        if _REFUSED.search(said):
            must = f"'ssh -o BatchMode=yes {self._where} true' must work on this machine"
            error = AuthError(f"{self._where}: {said}; {must}")
        for waiting in tuple(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(error)
