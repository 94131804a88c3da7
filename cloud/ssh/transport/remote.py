"""Commands on a host over one SSH connection, with input and deadline."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import paramiko

from spottrain.cloud.ssh.transport import hosts
from spottrain.cloud.ssh.transport.conversation import CALL_S
from spottrain.cloud.ssh.transport.session import Dial, connect, dial
from spottrain.cloud.ssh.transport.shell import CommandResult

_CHUNK_BYTES = 1 << 15


class Remote:
    """An SSH connection that runs commands in the host's shell.

    Args:
        host: The host; its key is checked, as by ``session.connect``.
        dial: Opens the TCP connection.

    Raises:
        CloudError: it does not answer, has a wrong key, or refuses us.
    """

    def __init__(self, host: hosts.Host, dial: Dial = dial) -> None:
        self._host = host
        self._client = connect(host, dial)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def run(self, command: str, data: bytes = b"", timeout_s: float = CALL_S) -> CommandResult:
        """Run a command and return its result.

        Args:
            data: Its standard input.

        Raises:
            UnreachableHostError: the connection broke, or it took too long.
        """
        late = threading.Timer(timeout_s, self._client.close)
        late.start()
        try:
            return self._run(command, data)
        except (paramiko.SSHException, OSError, EOFError) as error:
            why = str(error) or type(error).__name__
            if not late.is_alive():
                why = f"no answer in {timeout_s:g} s"
            raise hosts.UnreachableHostError(f"{self._host.place}: {why}") from error
        finally:
            late.cancel()

    def check(self, command: str, data: bytes = b"", timeout_s: float = CALL_S) -> str:
        """Run a command that must succeed; return its output.

        Raises:
            UnfitHostError: it failed.
            UnreachableHostError: as ``run``.
        """
        done = self.run(command, data, timeout_s)
        if done.code:
            raise hosts.UnfitHostError(f"{self._host.place}: {done.last_line}")
        return done.output

    def _run(self, command: str, data: bytes) -> CommandResult:
        transport = self._client.get_transport()
        if transport is None:
            raise EOFError("the connection is closed")
        channel = transport.open_session(timeout=CALL_S)
        channel.set_combine_stderr(True)
        channel.exec_command(command)
        # Output is read after the input; more than a window of it would block.
        channel.sendall(data)
        channel.shutdown_write()
        printed = bytearray()
        while chunk := channel.recv(_CHUNK_BYTES):
            printed += chunk
        code = channel.recv_exit_status()
        if code < 0:
            raise EOFError("the connection broke")
        return CommandResult(code, printed.decode(errors="replace"))
