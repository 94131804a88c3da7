"""A fake GCP in a process of its own."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.fakes.facts import FakeFacts
from tests.fakes.process import ANSWER_S, Fake, environment, serving

from spottrain.cloud.gcp.clients import GcpClients
from spottrain.cloud.gcp.provider import GcpProvider
from spottrain.cloud.gcp.settings import GcpSettings

PROJECT = "fake-project"
UNIVERSE = "gcp.invalid"
"""Not Google's own: there the SDK would ask Google for the credentials' regions."""
VARIABLES = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_UNIVERSE_DOMAIN")
KIND, ZONE, REGION = "a2-highgpu-1g", "us-central1-a", "us-central1"
CPU_KIND = "n2-standard-2"
"""A type without GPUs, for workers that are real."""
ATTACHED = "n1-standard-8+1xT4"
SPOT_USD, ON_DEMAND_USD = 1.1, 3.67
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHNwb3R0cmFpbi10ZXN0LWtleS1ub3QtZm9yLXVzZS0t test"


FACTS = FakeFacts("gcp", ("a2-", "g2-", "n1-"), 40 * 10**9)


class FakePrices:
    """The prices of machines, the same everywhere.

    Args:
        why: A line on why there is none; empty: there are.
    """

    def __init__(self, why: str = "") -> None:
        self._why = why

    def usd_per_hour(self, region: str, instance_type: str, spot: bool) -> float | None:
        """Return what a machine costs."""
        if self._why:
            return None
        return SPOT_USD if spot else ON_DEMAND_USD

    def warning(self) -> str:
        """Return why there is no price."""
        return self._why


class FakeGcp(Fake):
    """The server, seen from a test.

    Args:
        port: Where it listens on loopback.
    """

    def __init__(self, port: int) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self._clients: dict[tuple[str, float, float], GcpClients] = {}

    def reset(self) -> None:
        """Empty the project; zone a has three machines to rent."""
        self.ask("reset")
        for kind in (KIND, CPU_KIND):
            self.ask("stock", zone=ZONE, kind=kind, count=3)

    def send(self, method: str, target: str, body: Any, token: str) -> httpx.Response:
        """Send a request as it is."""
        headers = {"Authorization": f"Bearer {token}"}
        content = None if body is None else json.dumps(body)
        return self.http.request(method, target, content=content, headers=headers)

    def provider(
        self,
        clock: Callable[[], float] = time.monotonic,
        prices: FakePrices | None = None,
        /,
        **settings: Any,
    ) -> GcpProvider:
        """Return a new client of the project that gives up at the first failure.

        It shares the SDK's clients with others, which take a while to make.
        """
        wished: dict[str, Any] = {
            "project": PROJECT,
            "instance_types": (KIND,),
            "endpoint": self.url,
            "public_key": PUBLIC_KEY,
            "ssh_from": ("192.0.2.0/24",),
            "patience_s": 0.0,
            "answer_s": ANSWER_S,
        }
        made = GcpSettings(**wished | settings)
        key = (made.project, made.patience_s, made.answer_s)
        clients = self._clients.setdefault(key, GcpClients(made))
        return GcpProvider(made, FACTS, prices or FakePrices(), clients, clock)


def service_account(url: str) -> dict[str, str]:
    """Return a service account's key file, with which the SDK signs for itself."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return {
        "type": "service_account",
        "project_id": PROJECT,
        "private_key_id": "fake",
        "private_key": pem.decode(),
        "client_email": f"us@{PROJECT}.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": f"{url}/token",
        "universe_domain": UNIVERSE,
    }


@contextmanager
def running() -> Iterator[FakeGcp]:
    """Run the server and set the environment's credentials for it."""
    with (
        serving("tests.fakes.gcp_server") as port,
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(FakeGcp(port)) as fake,
    ):
        file = Path(folder) / "key.json"
        file.write_text(json.dumps(service_account(fake.url)))
        with environment(**dict(zip(VARIABLES, (str(file), UNIVERSE), strict=True))):
            yield fake
