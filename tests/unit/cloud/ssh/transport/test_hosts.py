"""The payload of hosts."""

from __future__ import annotations

from pathlib import Path

from spottrain.cloud.ssh.transport.hosts import Payload


def test_setup_may_install_into_system_python_on_rented_vms() -> None:
    given = Payload(workdir=Path("workdir"), environment={"A": "1"})
    rented = given.on_rented()
    assert rented.environment == {"A": "1", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    assert given.environment == {"A": "1"}
    no = Payload(workdir=Path("workdir"), environment={"PIP_BREAK_SYSTEM_PACKAGES": "0"})
    assert no.on_rented().environment == no.environment
