"""Connections to VMs without a public address, through a jump host's SSH server."""

from __future__ import annotations

import contextlib
import threading

import paramiko

from spottrain.cloud.ssh.transport import hosts
from spottrain.cloud.ssh.transport.session import CONNECT_S, connect

_PROHIBITED = 1
"""SSH_OPEN_ADMINISTRATIVELY_PROHIBITED, RFC 4254 section 5.1."""


class Bastion:
    """A jump host; all connections share one connection to it."""

    def __init__(self, host: hosts.Host) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._client: paramiko.SSHClient | None = None

    def dial(self, host: hosts.Host) -> paramiko.Channel:
        """Return a connection from the bastion to a host's SSH server.

        Raises:
            UnreachableHostError: the bastion, or the host behind it, does not answer.
            UnfitHostError: the bastion forbids forwarding.
            AuthError: the bastion refuses us, or has a wrong host key.
        """
        transport = self._transport()
        target = (host.address, host.port)
        try:
            return transport.open_channel(
                "direct-tcpip", target, ("127.0.0.1", 0), timeout=CONNECT_S
            )
        except paramiko.ChannelException as error:
            if error.code == _PROHIBITED:
                raise hosts.UnfitHostError(
                    f"{self._host.place}: refuses to forward connections; set "
                    "AllowTcpForwarding yes in its sshd_config"
                ) from error
            reason: Exception = error
        except (paramiko.SSHException, OSError, EOFError) as error:
            reason = error
        raise hosts.UnreachableHostError(
            f"{host.place}: not reachable from {self._host.place}: "
            f"{reason or type(reason).__name__}"
        )

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._client is not None:
                with contextlib.suppress(EOFError):
                    self._client.close()
                self._client = None

    def _transport(self) -> paramiko.Transport:
        with self._lock:
            transport = self._client.get_transport() if self._client else None
            if transport is None or not transport.is_active():
                self._client = connect(self._host)
                transport = self._client.get_transport()
                assert transport is not None
            return transport
