"""A fake AWS in a process of its own: moto, with what it lacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from tests.fakes.facts import FakeFacts
from tests.fakes.process import ANSWER_S, Fake, environment, serving

from spottrain.cloud.aws.clients import AwsClients
from spottrain.cloud.aws.provider import AwsProvider
from spottrain.cloud.aws.settings import AwsSettings

KIND, ZONE, REGION = "g5.xlarge", "us-east-1a", "us-east-1"
CPU_KIND = "c7i.large"
"""A type without GPUs, for workers that are real."""
SPOT_USD, ON_DEMAND_USD = 0.4, 1.006
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "FAKEKEY",
    "AWS_SECRET_ACCESS_KEY": "fake",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHNwb3R0cmFpbi10ZXN0LWtleS1ub3QtZm9yLXVzZS0t test"


FACTS = FakeFacts("aws", ("g5.", "p4d."), 24 * 10**9)


class FakeAws(Fake):
    """The server, seen from a test.

    Args:
        port: Where it listens on loopback.
    """

    def __init__(self, port: int) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self._clients: dict[tuple[str, int, float], AwsClients] = {}

    def reset(self) -> None:
        """Empty the account; zone a has three machines to rent."""
        self.http.post("/moto-api/reset").raise_for_status()
        self.ask("reset")
        for kind in (KIND, CPU_KIND):
            self.ask("stock", zone=ZONE, instance_type=kind, count=3)
            self.ask(
                "price",
                zone=ZONE,
                instance_type=kind,
                usd=SPOT_USD,
                at_s=time.time() - 3600,
            )

    def send(self, body: str) -> httpx.Response:
        """Send an EC2 request as it is, unsigned but for its scope."""
        scope = f"AWS4-HMAC-SHA256 Credential=FAKEKEY/20260101/{REGION}/ec2/aws4_request"
        headers = {
            "Authorization": f"{scope}, SignedHeaders=host, Signature=0",
            "Content-Type": "application/x-www-form-urlencoded; charset=utf-8",
        }
        return self.http.post("/", content=body, headers=headers)

    def provider(
        self, clock: Callable[[], float] = time.monotonic, /, **settings: Any
    ) -> AwsProvider:
        """Return a new client of the account that gives up at the first failure.

        It shares boto3's clients with others, which take half a second to make.
        """
        wished: dict[str, Any] = {
            "instance_types": (KIND,),
            "endpoint_url": self.url,
            "public_key": PUBLIC_KEY,
            "ssh_from": ("192.0.2.0/24",),
            "tries": 1,
            "answer_s": ANSWER_S,
        }
        made = AwsSettings(**wished | settings)
        key = (str(made.endpoint_url), made.tries, made.answer_s)
        clients = self._clients.setdefault(key, AwsClients(made))
        return AwsProvider(made, FACTS, lambda *_: ON_DEMAND_USD, clients, clock)


@contextmanager
def running() -> Iterator[FakeAws]:
    """Run the server and set the environment's credentials for it."""
    with (
        environment(**CREDENTIALS),
        serving("tests.fakes.aws_server") as port,
        contextlib.closing(FakeAws(port)) as fake,
    ):
        yield fake
