"""The way to one pod, by port-forward: requests to its program, and calls of its agent."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from spottrain.cloud.kubernetes.on_pod import BEAT_S, CALLED, IDLE, pump
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.ssh.transport.conversation import ByteStream, Conversation
from spottrain.cloud.ssh.transport.hosts import Host, UnreachableHostError

logger = logging.getLogger(__name__)

_HELLO_S = 20.0
_DEAD_S = 4 * BEAT_S
"""An idle connection that is silent for so long is dead."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0
_OUTAGE_S = 30.0
"""How long a broken link explains a pod's silence; after that the pod may be the cause."""


class PodSession(Conversation):
    """Requests to the program of a pod.

    Args:
        host: The pod.
        connection: To its port.

    Raises:
        UnreachableHostError: it does not answer.
    """

    def __init__(self, host: Host, connection: socket.socket) -> None:
        super().__init__(host)
        self.private_address = host.address
        self._connection = connection
        try:
            connection.sendall(b"agent\n")
            self.listen(connection)
            self.wait_for_hello(_HELLO_S)
        except OSError as error:
            connection.close()
            raise self.end_reason(connection) from error
        except CloudError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; processes in the pod keep running."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def end_reason(self, stream: ByteStream) -> CloudError:
        """Return that it is lost: port-forwards end without a reason."""
        return UnreachableHostError(f"{self.host.place}: connection lost")


class PodLink:
    """The way to one pod. As ``bring_up`` uses it, it is a connection to a host.

    Args:
        host: The pod.
        dial: Opens a connection to the port of its program.
    """

    def __init__(self, host: Host, dial: Callable[[], socket.socket]) -> None:
        self.host = host
        self._dial = dial
        self._session: PodSession | None = None
        self._lock = threading.Lock()
        self._manager: tuple[str, int] | None = None
        self._idle: socket.socket | None = None
        self._closed = threading.Event()
        self._down_since_s: float | None = None

    def session(self) -> PodSession:
        """Return the session, connecting if needed.

        Raises:
            CloudError: the pod cannot be reached.
        """
        with self._lock:
            session = self._session
            if session is None or not session.alive:
                session = self._session = PodSession(self.host, self._dial())
            if self._closed.is_set():
                session.close()
                raise UnreachableHostError(f"{self.host.place}: its link is closed")
            return session

    def status(self) -> tuple[dict[str, Any] | None, str]:
        """Return the claim on the pod and its state; see ``HostAgent.status``."""
        seen = self.session().call("status")
        return seen["claim"], seen["state"]

    def hang_up(self) -> None:
        """Close the session; calls are still carried."""
        session, self._session = self._session, None  # without the lock: a dial may take long
        if session is not None:
            session.close()

    def notice(self) -> None:
        """Tell the agent that its pod will end, at a time that is not known.

        Raises:
            CloudError: the pod cannot be reached.
        """
        connection = self._dial()
        try:
            connection.sendall(b"notice 0\n")
            connection.settimeout(_HELLO_S)
            is_told = connection.recv(1) == IDLE
        except OSError:
            is_told = False
        _end(connection)
        if not is_told:
            raise UnreachableHostError(f"{self.host.place}: connection lost")

    def carry(self, manager: tuple[str, int]) -> None:
        """Carry the agent's calls to a manager, from now on until ``close``."""
        with self._lock:
            before, self._manager = self._manager, manager
        if before is None:
            name = f"calls-{self.host.name}"
            threading.Thread(target=self._carry, name=name, daemon=True).start()

    @property
    def may_cause_silence(self) -> bool:
        """True if calls cannot arrive, and not for longer than an outage lasts."""
        since_s = self._down_since_s
        return since_s is not None and time.monotonic() - since_s < _OUTAGE_S

    def close(self) -> None:
        """Close all connections; the pod keeps running."""
        self._closed.set()
        self.hang_up()
        if self._idle is not None:
            _end(self._idle)

    def _carry(self) -> None:
        """Keep one idle connection to the pod; begin another when a call is on it."""
        pause_s = _MIN_PAUSE_S
        while not self._closed.is_set():
            began_s = time.monotonic()
            try:
                self._idle = connection = self._dial()
                if self._closed.is_set():
                    break
                connection.sendall(b"call\n")
                connection.settimeout(_DEAD_S)
                is_called = self._await_call(connection)
            except (CloudError, OSError) as error:
                logger.debug("%s: %s", self.host.place, error)
                is_called = False
            if is_called:
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
                continue
            if self._idle is not None:
                _end(self._idle)
            if self._down_since_s is None:
                self._down_since_s = time.monotonic()
            held = time.monotonic() - began_s > _MAX_PAUSE_S
            pause_s = _MIN_PAUSE_S if held else min(2 * pause_s, _MAX_PAUSE_S)
            self._closed.wait(pause_s)
        if self._idle is not None:
            _end(self._idle)

    def _await_call(self, connection: socket.socket) -> bool:
        """Return whether there is a call on a connection; else it has ended."""
        while sign := connection.recv(1):
            self._down_since_s = None
            if sign == CALLED:
                return not self._closed.is_set()
            assert sign == IDLE, sign
        return False

    def _answer(self, connection: socket.socket) -> None:
        """Carry one call."""
        assert self._manager is not None
        connection.settimeout(None)
        try:
            manager = socket.create_connection(self._manager, _HELLO_S)
        except OSError:
            _end(connection)  # the agent tries again
            return
        manager.settimeout(None)
        pump(connection, manager)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
