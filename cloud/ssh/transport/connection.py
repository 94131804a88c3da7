"""One host of the fleet: its connection while it lasts, and what was last seen of it."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from spottrain.cloud.port.errors import AuthError, CloudError
from spottrain.cloud.ssh.transport.hosts import (
    Host,
    UnfitHostError,
    UnreachableHostError,
)
from spottrain.cloud.ssh.transport.session import Dial, Session, dial
from spottrain.cloud.ssh.transport.tunnel import Tunnel

logger = logging.getLogger(__name__)

_STATUS_S = 10.0
_END_S = 60.0
"""How long the processes of a VM may take to die, and its logs to arrive."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0


class HostConnection:
    """The manager's line to one host; opened on need, and again when it broke.

    ``lock`` is held over whatever looks at the host and notes what it saw, so that
    nobody notes what is out of date.

    Args:
        host: To reach.
        dial: How bytes get there.
    """

    def __init__(self, host: Host, dial: Dial = dial) -> None:
        self.host = host
        self._dial = dial
        self.lock = threading.RLock()
        self.last_error: CloudError | None = None
        """Why the host cannot be used now."""
        self.unfit_error: CloudError | None = None
        """Why it cannot be used at all."""
        self.unreachable_since_s: float | None = None
        """When it was first missed (monotonic), if it cannot be reached."""
        self.taken_by = ""
        """Who has it, as last seen; nobody if empty."""
        self._session: Session | None = None
        self._tunnel: Tunnel | None = None
        self._port: int | None = None
        self._forward_address = ""
        self._pause_s = _MIN_PAUSE_S
        self._next_try_s = 0.0
        self._answered_s = 0.0

    @property
    def free(self) -> bool:
        """Whether it could be taken, as far as is known."""
        return self.connected and not (
            self.last_error or self.unfit_error or self.taken_by
        )

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        session = self._session
        return session is not None and session.alive

    @property
    def forwards_calls(self) -> bool:
        """Whether calls of agents travel over it now."""
        return self.connected and self._forward_address != ""

    @property
    def silent_s(self) -> float:
        """How long nothing has come over it, as far as calls travel over it."""
        tunnel = self._tunnel
        last_received_s = self._answered_s if tunnel is None else tunnel.last_received_s
        return time.monotonic() - max(last_received_s, self._answered_s)

    def session(self) -> Session:
        """Return the connection.

        Raises:
            CloudError: there is none; the next try may be due later.
        """
        with self.lock:
            if self._session is not None and self._session.alive:
                return self._session
            self.hang_up()
            if self.last_error is not None and time.monotonic() < self._next_try_s:
                raise self.last_error
            try:
                self._session = Session(self.host, self._dial)
            except CloudError as error:
                self._note_failure(error)
                raise
            if self.last_error is not None:
                logger.info("%s: connected again", self.host.place)
            self.last_error, self.unreachable_since_s = None, None
            self._pause_s = _MIN_PAUSE_S
            return self._session

    def _note_failure(self, error: CloudError) -> None:
        if str(error) != str(self.last_error):
            logger.warning("%s", error)
        self.last_error = error
        if self.unreachable_since_s is None:
            self.unreachable_since_s = time.monotonic()
        # Whoever refuses our key may ban us if we go on asking.
        refused = isinstance(error, AuthError | UnfitHostError)
        self._pause_s = _MAX_PAUSE_S if refused else self._pause_s
        self._next_try_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def status(self, timeout_s: float = _STATUS_S) -> tuple[dict[str, Any] | None, str]:
        """Return the claim on the host and how its VM is; see ``host_agent.Hands.status``.

        Raises:
            CloudError: it cannot be looked at.
        """
        session = self.session()
        try:
            seen = session.call("status", timeout_s)
        except UnreachableHostError as error:
            session.close()
            self._note_failure(error)
            raise
        self._answered_s = time.monotonic()
        return seen["claim"], seen["state"]

    def end(self, vm_id: str, timeout_s: float = _END_S) -> dict[str, str]:
        """End a VM and give the host back; return the VM's logs by name.

        Raises:
            CloudError: it cannot be ended now.
        """
        session = self.session()
        logs: dict[str, str] = session.call("end", timeout_s, vm_id=vm_id)
        self._stop_forwarding(session)
        return logs

    def forward_calls(
        self, vm_id: str, manager: tuple[str, int], *, relay: bool = False
    ) -> str:
        """Carry calls to the manager from now on; the VM's agent is told.

        Args:
            vm_id: The VM on this host.
            manager: Its address and port.
            relay: Take the calls of other VMs as well, at the host's private address.

        Returns:
            Address and port where calls are taken.

        Raises:
            CloudError: the host does not let us.
        """
        with self.lock:
            session = self.session()
            if self._tunnel is not None:
                return self._forward_address
            self._tunnel = Tunnel(manager, self.host.name)
            self._port = session.forward(self._tunnel.take)
            try:
                if self._port is None:
                    raise UnfitHostError(
                        f"{self.host.place}: refuses to forward ports; set "
                        "AllowTcpForwarding yes in its sshd_config"
                    )
                at = session.private_address if relay else ""
                self._forward_address = session.call(
                    "forward_calls", vm_id=vm_id, port=self._port, relay_at=at
                )
            except CloudError:
                self._stop_forwarding(session)
                raise
            return self._forward_address

    def hang_up(self) -> None:
        """Close the connection; what runs on the host goes on."""
        with self.lock:
            if self._session is not None:
                self._session.close()
                self._session = None
            self._close_tunnel()

    def _stop_forwarding(self, session: Session) -> None:
        if self._port is not None:
            session.stop_forwarding(self._port)
        self._close_tunnel()

    def _close_tunnel(self) -> None:
        self._port, self._forward_address = None, ""
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None
