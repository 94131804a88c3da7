"""The three fake clouds behind one interface, and the faults of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.fakes import aws, azure, gcp

from spottrain.cloud.port.provider import CloudProvider

Clock = Callable[[], float]
Error = tuple[str, int]


@dataclass(frozen=True)
class Row:
    """What a cloud bills for one VM."""

    vm_id: str
    from_s: float
    until_s: float | None


@dataclass(frozen=True)
class FakeCloud:
    """One fake and how it goes wrong."""

    name: str
    ask: Callable[..., Any]
    """Calls a method of the fake's world."""
    reset: Callable[[], None]
    """Empties the account."""
    connect: Callable[..., CloudProvider]
    """Makes one more client, as a new manager does, of a clock and settings."""
    restock: Callable[[random.Random], None]
    """Lets zones have other numbers of machines."""
    bill: Callable[[], list[Row]]
    evict: Callable[[str], None]
    """Takes a spot VM back."""
    launch: str
    """The operation that makes VMs."""
    others: tuple[str, ...]
    """Further operations that may go wrong."""
    hiccups: tuple[Error, ...]
    """Throttling and failures of the cloud itself: (code, HTTP status)."""
    unmade: Callable[[], set[str]] = set
    """Returns VMs that were listed while they were made, though there was no machine
    for them; they are not on the bill."""


@contextmanager
def aws_cloud() -> Iterator[FakeCloud]:
    """AWS: moto and its layer, by way of boto3."""
    zones = ("us-east-1a", "us-east-1b", "us-east-1c")
    with aws.running() as fake:

        def reset() -> None:
            fake.reset()
            for number, zone in enumerate(zones[1:], 1):
                usd = 0.4 + number / 100
                fake.ask("price", zone=zone, instance_type=aws.KIND, usd=usd, at_s=0)

        reset()

        def restock(draw: random.Random) -> None:
            for zone in zones:
                count = draw.randint(0, 6)
                fake.ask("stock", zone=zone, instance_type=aws.KIND, count=count)
            fake.ask("quota", code="L-3819A6DF", vcpus=draw.choice([8, 20, 400]))

        def evict(vm_id: str) -> None:
            _, instance_id, region = vm_id.split(".")
            fake.ask("interrupt", region=region, instance_id=instance_id)

        yield FakeCloud(
            name="aws",
            ask=fake.ask,
            reset=reset,
            connect=fake.provider,
            restock=restock,
            bill=lambda: [
                Row(
                    f"aws.{row['instance_id']}.{row['zone'][:-1]}",
                    row["launched_at"],
                    row["ended_at"],
                )
                for row in fake.ask("bill")
            ],
            evict=evict,
            launch="RunInstances",
            others=("DescribeInstances", "TerminateInstances"),
            hiccups=(
                ("RequestLimitExceeded", 503),
                ("InternalError", 500),
                ("Unavailable", 503),
            ),
        )


@contextmanager
def azure_cloud() -> Iterator[FakeCloud]:
    """Azure: our own Resource Manager, by way of Azure's SDK."""
    with azure.running() as fake:
        fake.reset()

        def restock(draw: random.Random) -> None:
            for zone in ("eastus-1", "eastus-2"):
                count = draw.randint(0, 8)
                fake.ask("stock", zone=zone, instance_type=azure.KIND, count=count)
            vcpus = draw.choice([8, 20, 400])
            fake.ask("quota", region=azure.REGION, family="lowPriorityCores", vcpus=vcpus)
            fake.ask("moods", late=draw.random() < 0.3, strays=draw.random() < 0.3)

        yield FakeCloud(
            name="azure",
            ask=fake.ask,
            reset=fake.reset,
            connect=fake.provider,
            restock=restock,
            bill=lambda: [
                Row(
                    f"azure.{row['name']}.{row['group']}",
                    row["launched_at"],
                    row["ended_at"],
                )
                for row in fake.ask("bill")
                if row["ended_at"] != row["launched_at"]
            ],
            evict=lambda vm_id: fake.ask("evict", name=vm_id.split(".")[1]),
            unmade=lambda: {
                f"azure.{row['name']}.{row['group']}"
                for row in fake.ask("bill")
                if row["ended_at"] == row["launched_at"]
            },
            launch="PUT virtualMachines",
            others=(
                "LIST virtualMachines",
                "DELETE virtualMachines",
                "GET virtualMachines",
                "GET operations",
            ),
            hiccups=(
                ("TooManyRequests", 429),
                ("InternalServerError", 500),
                ("ServerTimeout", 503),
            ),
        )


@contextmanager
def gcp_cloud() -> Iterator[FakeCloud]:
    """GCP: our own Compute Engine, by way of Google's SDK."""
    zones = ("us-central1-a", "us-central1-b", "us-west1-a")
    with gcp.running() as fake:
        fake.reset()

        def restock(draw: random.Random) -> None:
            for zone in zones:
                fake.ask("stock", zone=zone, kind=gcp.KIND, count=draw.randint(0, 6))
            limit = draw.choice([3, 6, 400])
            fake.ask("quota", metric="PREEMPTIBLE_NVIDIA_A100_GPUS", limit=limit)

        def evict(vm_id: str) -> None:
            _, name, zone = vm_id.split(".")
            fake.ask("preempt", zone=zone, name=name)

        yield FakeCloud(
            name="gcp",
            ask=fake.ask,
            reset=fake.reset,
            connect=lambda clock, **settings: fake.provider(
                clock, regions=("us-central1", "us-west1"), **settings
            ),
            restock=restock,
            bill=lambda: [
                Row(
                    f"gcp.{row['name']}.{row['zone']}",
                    row["launched_at"],
                    row["ended_at"],
                )
                for row in fake.ask("bill")
            ],
            evict=evict,
            launch="instances.bulk_insert",
            others=(
                "instances.aggregated_list",
                "instances.list",
                "instances.get",
                "instances.delete",
                "zone_operations.list",
                "zone_operations.wait",
            ),
            hiccups=(("rateLimitExceeded", 403), ("backendError", 503)),
        )


CLOUDS = {"aws": aws_cloud, "azure": azure_cloud, "gcp": gcp_cloud}
