"""A fake Azure in a process of its own, driven by Azure's own SDK."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.fakes.azure_world import SUBSCRIPTION
from tests.fakes.process import ANSWER_S, Fake, environment, serving

from spottrain.cloud.azure.clients import AzureClients
from spottrain.cloud.azure.provider import AzureProvider
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.pricing.prices.catalogue import catalogue

KIND, REGION, ZONE = "Standard_NC4as_T4_v3", "eastus", "eastus-1"
CPU_KIND = "Standard_F2s_v2"
"""A type without GPUs, for workers that are real."""
FAMILY = "Standard NCASv3_T4 Family"
SPOT_USD, ON_DEMAND_USD = 0.2, 0.526
CREDENTIALS = {
    "AZURE_TENANT_ID": "22222222-0000-0000-0000-000000000000",
    "AZURE_CLIENT_ID": "33333333-0000-0000-0000-000000000000",
    "AZURE_CLIENT_SECRET": "fake",
}
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHNwb3R0cmFpbi10ZXN0LWtleS1ub3QtZm9yLXVzZS0t test"


class FakeAzure(Fake):
    """The server, seen from a test.

    Args:
        port: Where it listens on loopback.
        ca_file: What its certificate is checked with.
    """

    def __init__(self, port: int, ca_file: Path) -> None:
        self.ca_file = str(ca_file)
        verify = ssl.create_default_context(cafile=self.ca_file)
        super().__init__(f"https://127.0.0.1:{port}", verify)
        self._clients: dict[tuple[Any, ...], AzureClients] = {}
        self._prices_url = self.ask("prices_url")

    def reset(self) -> None:
        """Empty the subscription; zone 1 has three machines to rent."""
        self.ask("reset")
        for kind in (KIND, CPU_KIND):
            self.offer(REGION, kind)
            self.ask("stock", zone=ZONE, instance_type=kind, count=3)
        for family in ("lowPriorityCores", FAMILY, "cores", "standardDSv3Family"):
            self.ask("quota", region=REGION, family=family, vcpus=100)

    def offer(self, region: str, name: str, **size: Any) -> None:
        """Let a region have a type."""
        usd = size.pop("usd", [SPOT_USD, ON_DEMAND_USD])
        wished = {"vcpus": 4, "family": FAMILY} | size
        self.ask("offer", region=region, name=name, usd=usd, **wished)

    def send(
        self, method: str, path: str, query: dict[str, str], body: Any, **headers: str
    ) -> httpx.Response:
        """Send a request as it is."""
        told = {"Authorization": "Bearer fake", **headers}
        content = None if body is None else json.dumps(body).encode()
        return self.http.request(method, path, params=query, content=content, headers=told)

    def settings(self, **settings: Any) -> AzureSettings:
        """Return settings that give up at the first failure."""
        wished: dict[str, Any] = {
            "instance_types": (KIND,),
            "subscription": SUBSCRIPTION,
            "public_key": PUBLIC_KEY,
            "ssh_from": ("192.0.2.0/24",),
            "endpoint_url": self.url,
            "authority_url": self.url,
            "prices_url": self._prices_url,
            "ca_file": self.ca_file,
            "tries": 1,
            "answer_s": ANSWER_S,
            "poll_s": 0.02,
        }
        return AzureSettings(**wished | settings)

    def provider(
        self, clock: Callable[[], float] = time.monotonic, /, **settings: Any
    ) -> AzureProvider:
        """Return a new client of the account.

        It shares the SDK's clients with others, which take a while to make.
        """
        made = self.settings(**settings)
        key = made.tries, made.answer_s, made.poll_s, made.subscription
        clients = self._clients.setdefault(key, AzureClients(made))
        return AzureProvider(made, catalogue(), clients, clock, lambda: float(self.ask("now")))

    def close(self) -> None:
        """Close the connections."""
        for clients in self._clients.values():
            for each in (*clients._made.values(), *clients._shared.values()):
                each.close()
        super().close()


@contextmanager
def running() -> Iterator[FakeAzure]:
    """Run the server and set the environment's credentials for it."""
    with environment(**CREDENTIALS), tempfile.TemporaryDirectory() as folder:
        ca_file = Path(folder) / "ca.pem"
        key_file = str(_certificate(ca_file))
        with (
            serving("tests.fakes.azure_server", key_file) as port,
            contextlib.closing(FakeAzure(port, ca_file)) as fake,
        ):
            yield fake


def _certificate(ca_file: Path) -> Path:
    """Write a certificate for loopback; return the file that has its key as well."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    ca_file.write_bytes(pem)
    key_file = ca_file.with_name("server.pem")
    key_file.write_bytes(secret + pem)
    return key_file
