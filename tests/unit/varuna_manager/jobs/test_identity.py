from __future__ import annotations

import re
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509

from spottrain.varuna_manager.jobs.identity import (
    IdentityError,
    client_context,
    ensure_identity,
    load_identity,
    token_sha256,
)

LOOPBACK = ("127.0.0.1", "localhost")


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Connect both over a socket pair; raises what the client's side raises."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as connection:
                connection.recv(1)
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=name) as connection:
            connection.send(b"x")
    finally:
        ours.close()
        thread.join()


def server_context(path: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


@pytest.mark.parametrize("name", LOOPBACK)
def test_agent_that_pins_the_authority_accepts_the_manager(tmp_path: Path, name: str) -> None:
    identity = ensure_identity(tmp_path, LOOPBACK)
    client = client_context(identity.ca_pem)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    handshake(server_context(identity.path), client, name)


def test_agent_refuses_another_jobs_manager(tmp_path: Path) -> None:
    for job in ("a", "b"):
        (tmp_path / job).mkdir()
    ours = ensure_identity(tmp_path / "a", LOOPBACK)
    other = ensure_identity(tmp_path / "b", LOOPBACK)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server_context(other.path), client_context(ours.ca_pem), "127.0.0.1")


def test_agent_refuses_another_address(tmp_path: Path) -> None:
    identity = ensure_identity(tmp_path, LOOPBACK)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server_context(identity.path), client_context(identity.ca_pem), "10.0.0.1")


def test_identity_is_made_once_and_private(tmp_path: Path) -> None:
    first = ensure_identity(tmp_path, LOOPBACK)
    assert ensure_identity(tmp_path, LOOPBACK) == first == load_identity(tmp_path)
    assert first.path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == [first.path.name]


def test_tokens_differ_by_vm_and_job_and_stay_the_same(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    ours = ensure_identity(tmp_path, LOOPBACK)
    other = ensure_identity(tmp_path / "b", LOOPBACK)
    tokens = [i.vm_token(v) for i in (ours, other) for v in ("vm-1", "vm-2")]
    tokens += [ours.admin_token(), other.admin_token()]
    assert len(set(tokens)) == len(tokens)
    assert load_identity(tmp_path).vm_token("vm-1") == tokens[0]
    assert tokens[0] not in token_sha256(tokens[0])


@pytest.mark.parametrize("damage", ["", "spottrain-secret: !!\n", "junk"])
def test_damaged_identity_is_named(tmp_path: Path, damage: str) -> None:
    path = ensure_identity(tmp_path, LOOPBACK).path
    path.write_text(damage)
    with pytest.raises(IdentityError, match=r"identity\.pem"):
        ensure_identity(tmp_path, LOOPBACK)


def test_clocks_that_are_wrong_by_years_do_not_keep_agents_out(tmp_path: Path) -> None:
    identity = ensure_identity(tmp_path, ("localhost",))
    for pem in re.findall(
        r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n",
        identity.path.read_text(),
        re.DOTALL,
    ):
        found = x509.load_pem_x509_certificate(pem.encode())
        assert found.not_valid_before_utc.year <= 2001
        assert found.not_valid_after_utc.year >= 2100
