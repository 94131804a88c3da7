"""The connection to one host, and its last known state."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from spottrain.cloud.port.errors import AuthError, CloudError
from spottrain.cloud.ssh.transport import hosts
from spottrain.cloud.ssh.transport.session import Dial, Session, dial
from spottrain.cloud.ssh.transport.tunnel import Tunnel

logger = logging.getLogger(__name__)

_STATUS_S = 10.0
_END_S = 60.0
"""Time limit for killing the processes of a VM and fetching its logs."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0


class HostConnection:
    """The manager's connection to one host; opened on demand, and again when it breaks.

    ``lock`` is held while the host is polled and the result recorded, so that no stale
    state is recorded.

    Args:
        dial: Opens the TCP connection.
    """

    def __init__(self, host: hosts.Host, dial: Dial = dial) -> None:
        self.host = host
        self._dial = dial
        self.lock = threading.RLock()
        self.last_error: CloudError | None = None
        """Why the host is unavailable now."""
        self.unfit_error: CloudError | None = None
        """Why the host is unsuitable for the job."""
        self.unreachable_since_s: float | None = None
        """Since when it is unreachable (monotonic), if it is."""
        self.taken_by = ""
        """Who uses the host, as last seen; empty if it is free."""
        self.gpu: str | None = None
        """Name of the GPUs that its slots use; ``None``: not known yet."""
        self._session: Session | None = None
        self._tunnel: Tunnel | None = None
        self._port: int | None = None
        self._forward_address = ""
        self._pause_s = _MIN_PAUSE_S
        self._next_try_s = 0.0
        self._answered_s = 0.0

    @property
    def free(self) -> bool:
        """True if the host could be claimed, as far as is known."""
        return self.connected and not (self.last_error or self.unfit_error or self.taken_by)

    @property
    def connected(self) -> bool:
        """True while connected."""
        session = self._session
        return session is not None and session.alive

    @property
    def forwards_calls(self) -> bool:
        """True while it forwards calls of agents."""
        return self.connected and self._forward_address != ""

    @property
    def silent_s(self) -> float:
        """Time since data was last received over it."""
        tunnel = self._tunnel
        last_received_s = self._answered_s if tunnel is None else tunnel.last_received_s
        return time.monotonic() - max(last_received_s, self._answered_s)

    def session(self) -> Session:
        """Return the session, connecting if needed.

        Raises:
            CloudError: not connected; the next attempt may be due later.
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
        # A host that refuses our key may ban us if we keep trying.
        refused = isinstance(error, AuthError | hosts.UnfitHostError)
        self._pause_s = _MAX_PAUSE_S if refused else self._pause_s
        self._next_try_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def status(self, timeout_s: float = _STATUS_S) -> tuple[dict[str, Any] | None, str]:
        """Return the claim on the host and its state; see ``HostAgent.status``.

        Raises:
            CloudError: the host is unreachable.
        """
        session = self.session()
        try:
            seen = session.call("status", timeout_s)
        except hosts.UnreachableHostError as error:
            session.close()
            self._note_failure(error)
            raise
        self._answered_s = time.monotonic()
        return seen["claim"], seen["state"]

    def end(self, vm_id: str, timeout_s: float = _END_S) -> dict[str, str]:
        """End a VM and free the host; return the VM's logs by name.

        Raises:
            CloudError: it cannot be ended now.
        """
        return self._end("end", vm_id, timeout_s)

    def clear(self, vm_id: str) -> dict[str, str]:
        """End a VM and remove all that it has on the host; return its logs by name.

        Raises:
            CloudError: something is left there, or it is not known.
        """
        return self._end("clear", vm_id, _END_S)

    def _end(self, operation: str, vm_id: str, timeout_s: float) -> dict[str, str]:
        session = self.session()
        logs: dict[str, str] = session.call(operation, timeout_s, vm_id=vm_id)
        self._stop_forwarding(session)
        return logs

    def forward_calls(self, vm_id: str, manager: tuple[str, int], *, relay: bool = False) -> str:
        """Forward calls to the manager from now on, and give the agent the address.

        Args:
            vm_id: The VM on this host.
            manager: Address and port of the manager.
            relay: Accept calls of other VMs as well, at the host's private address.

        Returns:
            Address and port that accept calls.

        Raises:
            CloudError: the host is unreachable or forbids forwarding.
        """
        with self.lock:
            session = self.session()
            if self._tunnel is not None:
                return self._forward_address
            self._tunnel = Tunnel(manager, self.host.name)
            self._port = session.forward(self._tunnel.take)
            try:
                if self._port is None:
                    raise hosts.UnfitHostError(
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
        """Close the connection; processes on the host keep running."""
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
