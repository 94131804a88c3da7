"""The identity of one job's manager: its certificate, its secret and its tokens.

Everything lies in one file of the job's folder, ``identity.pem`` (0600): the server's key
and certificate, and a secret from which every VM's bearer token is derived. It is made once
and reused on resume, so that agents, which pin the certificate, trust the resumed manager.
The certificate is signed by its own key and is no authority's: it can sign no other.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import ipaddress
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from spottrain.errors import SpottrainError
from spottrain.files import PRIVATE, write_whole

_FILE = "identity.pem"
_VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""A VM or a manager whose clock is wrong by years must still be able to connect: what ends a
certificate is that its job is over. The last moment is RFC 5280's for no end."""
_CERTIFICATE = "-----BEGIN CERTIFICATE-----\n"
_SECRET_LABEL = "spottrain-secret: "


class IdentityError(SpottrainError):
    """The stored identity of a job's manager is damaged."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The credentials by which agents and the manager authenticate each other."""

    path: Path
    """Server key and certificate, as ``ssl`` and uvicorn read them."""
    ca_pem: str
    """The certificate that agents pin."""
    secret: bytes

    def vm_token(self, vm_id: str) -> str:
        """Return the bearer token of a VM; the same one every time.

        Derived, not random: a StartAgent that is repeated after a crash must not lock out
        an agent that already runs.
        """
        return hmac.new(self.secret, f"vm:{vm_id}".encode(), hashlib.sha256).hexdigest()

    def admin_token(self) -> str:
        """Return the bearer token of whoever may read the job's folder."""
        return hmac.new(self.secret, b"admin", hashlib.sha256).hexdigest()

    def metrics_token(self) -> str:
        """Return the bearer token that may only read metrics and health."""
        return hmac.new(self.secret, b"metrics", hashlib.sha256).hexdigest()


def token_sha256(token: str) -> str:
    """Return the only form in which a token is stored or compared."""
    return hashlib.sha256(token.encode()).hexdigest()


def ensure_identity(job_dir: Path, addresses: tuple[str, ...]) -> Identity:
    """Return the job's identity, made on the first call.

    Args:
        job_dir: The job's folder.
        addresses: IP addresses and host names at which agents reach the manager; used
            only when the identity is made.

    Raises:
        IdentityError: The file exists but is damaged.
    """
    path = job_dir / _FILE
    if not path.exists():
        write_whole(path, _mint(addresses), mode=PRIVATE, durable=True)
    return load_identity(job_dir)


def load_identity(job_dir: Path) -> Identity:
    """Return the identity that ``ensure_identity`` made.

    Raises:
        IdentityError: The file is missing or damaged.
    """
    path = job_dir / _FILE
    try:
        first, _, rest = path.read_text().partition("\n")
        secret = base64.b64decode(first.removeprefix(_SECRET_LABEL), validate=True)
        ca_pem = rest[rest.index(_CERTIFICATE) :]
        x509.load_pem_x509_certificate(ca_pem.encode())
    except (OSError, ValueError) as error:
        raise IdentityError(
            f"{path}: the manager's identity is damaged ({error}); end the job with "
            "'spottrain down' and launch it again"
        ) from error
    return Identity(path, ca_pem, secret)


def client_context(ca_pem: str) -> ssl.SSLContext:
    """Return a TLS context that trusts this job's manager and nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca_pem)
    return context


def _mint(addresses: tuple[str, ...]) -> str:
    """Return the text of a new identity file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "spottrain manager")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_alternative_names(addresses), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    secret = base64.b64encode(secrets.token_bytes(32)).decode()
    pem = private + certificate.public_bytes(serialization.Encoding.PEM)
    return f"{_SECRET_LABEL}{secret}\n{pem.decode()}"


def _alternative_names(addresses: tuple[str, ...]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for address in addresses:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            names.append(x509.DNSName(address))
    return x509.SubjectAlternativeName(names)
