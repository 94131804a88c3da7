"""A GCP project: its machines, networks, stock, quotas, and what becomes of operations.

An operation is done when somebody waits for it, or by itself after ``OPERATION_S``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tests.fakes.script import CloudScript
from tests.fakes.throttling import GCP_PER_MINUTE, Throttle, per_minute

PROJECT = "fake-project"
BASE = "https://www.googleapis.com/compute/v1"
ZONES = ("us-central1-a", "us-central1-b", "us-west1-a")
IMAGE_PROJECT = "deeplearning-platform-release"
IMAGE_FAMILY = "pytorch-2-9-cu129-ubuntu-2404-nvidia-580"
OPERATION_S = 10.0
LIVE = ("PROVISIONING", "STAGING", "RUNNING")
GPUS = {
    "a2-highgpu-1g": ("NVIDIA_A100_GPUS", 1),
    "g2-standard-4": ("NVIDIA_L4_GPUS", 1),
    "n1-standard-8+nvidia-tesla-t4": ("NVIDIA_T4_GPUS", 1),
    "n2-standard-2": ("N2_CPUS", 2),
}
"""Quota and number of GPUs, or of virtual CPUs, by machine."""

Json = dict[str, Any]


@dataclass
class Pending:
    """An operation and what it does in the end."""

    told: Json
    due_s: float
    then: Callable[[], None]


@dataclass
class Instance:
    """A machine that is or was."""

    told: Json
    kind: str
    """Machine type, and what is attached to it."""
    made_s: float
    ended_s: float | None = None


class World(CloudScript):
    """One project; every public method may be called from the test's process."""

    def __init__(self) -> None:
        super().__init__(lambda: Throttle(per_minute(GCP_PER_MINUTE)))
        self.reset()

    def reset(self) -> None:
        """Back to an empty project with no machine to rent."""
        self.forget_script()
        self.capacity: dict[str, int] = {}
        self.offered = {f"{zone}/{kind}" for zone in ZONES for kind in GPUS}
        self.limits: dict[str, float] = {}
        self.scores: dict[str, float] = {}
        self.policies: set[str] = set()
        self.tells_missing = False
        self.images = {f"{IMAGE_FAMILY}-v20260901": "ACTIVE"}
        self.preemptions: dict[str, list[float]] = {}
        self.host_keys: dict[str, str] = {}
        self.instances: list[Instance] = []
        self.networks: dict[str, Json] = {}
        self.subnets: dict[str, Json] = {}
        self.firewalls: dict[str, Json] = {}
        self.operations: dict[str, Pending] = {}
        self.silent_zones: set[str] = set()
        self.number = 1000
        self.moment_s = 0.0

    # --- knobs ------------------------------------------------------------------------

    def stock(self, zone: str, kind: str, count: int) -> None:
        """Set how many machines of one kind a zone has for us, spot or not."""
        self.capacity[f"{zone}/{kind}"] = count

    def withdraw(self, zone: str, kind: str) -> None:
        """No longer offer a machine type in a zone at all."""
        self.offered.discard(f"{zone}/{kind}")

    def quota(self, metric: str, limit: float) -> None:
        """Bound the GPUs of one kind in every region."""
        self.limits[metric] = limit

    def score(self, zone: str, score: float) -> None:
        """Set how obtainable machines are in a zone."""
        self.scores[zone] = score

    def publish(self, name: str, state: str = "ACTIVE") -> None:
        """Set the state of an image of the family, such as DEPRECATED."""
        self.images[name] = state

    def tell_missing(self) -> None:
        """Let bulk inserts that gave fewer machines than asked for end with an error too.

        Whether they do is not documented.
        """
        self.tells_missing = True

    def enforce(self, constraint: str) -> None:
        """Let the organisation have a policy, such as ``vmExternalIpAccess``."""
        self.policies.add(constraint)

    def preempted(self, zone: str, shares: list[float]) -> None:
        """Set the share of stopped spot VMs of a zone that was preempted, day by day."""
        self.preemptions[zone] = shares

    def tell_host_key(self, name: str, key: str) -> None:
        """Let a VM's guest agent tell its host key, as ``type base64``."""
        self.host_keys[name] = key

    def silence(self, zone: str) -> None:
        """Let a zone not answer when it is listed with others."""
        self.silent_zones.add(zone)

    def preempt(self, zone: str, name: str) -> None:
        """Take a spot VM back."""
        instance = self.instance(zone, name)
        assert instance is not None
        kind = "compute.instances.preempted"
        self.begin(kind, zone, "instances", name, lambda: self.end(instance), by="system")
        self.finish_all()

    def switch_off(self, zone: str, name: str) -> None:
        """Let a VM shut itself down: it stays, without its machine."""
        instance = self.instance(zone, name)
        assert instance is not None
        instance.told["status"] = "TERMINATED"

    def run_out(self, zone: str, name: str) -> None:
        """Let a VM come to its hard stop."""
        instance = self.instance(zone, name)
        assert instance is not None
        kind = "compute.instances.terminateOnDeadline"
        self.begin(kind, zone, "instances", name, lambda: self.end(instance), by="system")
        self.finish_all()

    def finish_all(self) -> None:
        """Let all operations be done."""
        for pending in list(self.operations.values()):
            self.finish(pending)

    def users_own_network(self, region: str) -> None:
        """Make a network and a subnet that the user has: ``theirs``."""
        self.networks["theirs"] = {"name": "theirs"}
        self.subnets[f"{region}/theirs"] = {"name": "theirs", "network": "theirs"}

    # --- what there is ----------------------------------------------------------------

    def bill(self) -> list[Json]:
        """Return every instance that ever was, with its start and end."""
        return [
            {
                "name": each.told["name"],
                "zone": each.told["zone"].rpartition("/")[2],
                "kind": each.kind,
                "labels": each.told["labels"],
                "launched_at": each.made_s,
                "ended_at": each.ended_s,
            }
            for each in self.instances
        ]

    def left(self) -> list[str]:
        """Name everything that costs money or was made for a job."""
        names = [each.told["name"] for each in self.instances if each.ended_s is None]
        made = (*self.networks.values(), *self.subnets.values())
        names += [each["name"] for each in made if each["name"] != "theirs"]
        return sorted([*names, *self.firewalls])

    def boot(self, name: str, metadata: Json) -> str | None:
        """Switch a new VM on, return its address; None where VMs are nothing real."""
        if self.machines is None:
            return None
        items = {each["key"]: each["value"] for each in metadata["items"]}
        return self.machines.boot(name, items["ssh-keys"].partition(":")[2])

    def host_key(self, name: str) -> str | None:
        """Return the host key that a VM's guest agent has told, if it has."""
        told = self.host_keys.get(name)
        if told is None and self.machines is not None:
            return self.machines.host_key(name)
        return told

    def instance(self, zone: str, name: str) -> Instance | None:
        """Return an instance that is."""
        for each in self.instances:
            there = each.ended_s is None and each.told["zone"].endswith(f"/{zone}")
            if there and each.told["name"] == name:
                return each
        return None

    def live(self, zone: str, kind: str) -> int:
        """Count the machines of a kind that are taken in a zone."""
        return sum(
            each.kind == kind
            and each.told["zone"].endswith(f"/{zone}")
            and each.ended_s is None
            and each.told["status"] in LIVE
            for each in self.instances
        )

    def used(self, metric: str, region: str) -> int:
        """Count the GPUs, gigabytes or addresses that a quota bounds."""
        if metric in ("SSD_TOTAL_GB", "IN_USE_ADDRESSES"):
            return sum(
                disk_and_address(each.told).get(metric, 0)
                for each in self.instances
                if each.ended_s is None and f"/{region}-" in each.told["zone"]
            )
        bare = metric.removeprefix("PREEMPTIBLE_")
        return sum(
            GPUS[each.kind][1]
            for each in self.instances
            if each.ended_s is None
            and each.told["status"] in LIVE
            and GPUS[each.kind][0] == bare
            and f"/{region}-" in each.told["zone"]
            and _is_spot(each) == metric.startswith("PREEMPTIBLE_")
        )

    # --- operations -------------------------------------------------------------------

    def end(self, instance: Instance) -> None:
        """An instance is gone, its disk with it."""
        if instance.ended_s is None:
            instance.ended_s = self.moment_s
            if self.machines is not None:
                self.machines.kill(instance.told["name"])

    def begin(
        self,
        kind: str,
        scope: str,
        collection: str,
        name: str,
        then: Callable[[], None],
        *,
        by: str = "us@fake-project",
        **more: Any,
    ) -> Json:
        """Return a new operation.

        Args:
            kind: Such as ``delete``.
            scope: Zone, region or ``global``.
            collection: Of what it is about.
            name: What it is about.
            then: Carries it out.
            by: Who asked.
            more: Fields.
        """
        folder = scope_folder(scope)
        self.number += 1
        operation = f"operation-{self.number}"
        where = f"{BASE}/projects/{PROJECT}/{folder}"
        told: Json = {
            "id": str(self.number),
            "name": operation,
            "operationType": kind,
            "targetLink": f"{where}/{collection}/{name}",
            "status": "RUNNING",
            "user": by,
            "insertTime": stamp(self.now()),
            "selfLink": f"{where}/operations/{operation}",
            **more,
        }
        if folder != "global":
            told[folder.partition("/")[0].removesuffix("s")] = where
        self.operations[operation] = Pending(told, self.now() + OPERATION_S, then)
        return told

    def finish(self, pending: Pending) -> None:
        """Carry an operation out, unless it is done."""
        told = pending.told
        if told["status"] == "DONE":
            return
        self.moment_s = self.moment()
        if "error" not in told:
            pending.then()
        told |= {"status": "DONE", "endTime": stamp(self.moment_s)}

    def moment(self) -> float:
        """Return the time to the millisecond, never ahead of the clock: a VM whose end were
        ahead of it would be listed as running."""
        return math.floor(self.now() * 1000) / 1000

    def settle(self) -> None:
        """Carry out what is due."""
        for pending in list(self.operations.values()):
            if self.now() >= pending.due_s:
                self.finish(pending)


def _is_spot(instance: Instance) -> bool:
    return bool(instance.told["scheduling"]["provisioningModel"] == "SPOT")


def scope_folder(scope: str) -> str:
    """Return where things of a scope lie."""
    if scope == "global":
        return scope
    return f"zones/{scope}" if scope.count("-") > 1 else f"regions/{scope}"


def stamp(at_s: float) -> str:
    """Return a moment as Google writes it: to the millisecond, with an offset."""
    return datetime.fromtimestamp(round(at_s, 3), UTC).isoformat(timespec="milliseconds")


def disk_and_address(wanted: Json) -> dict[str, int]:
    """Return what a machine counts against the quotas of a region's disks and addresses."""
    disk, interface = wanted["disks"][0], wanted["networkInterfaces"][0]
    size_gib = disk.get("diskSizeGb") or disk["initializeParams"]["diskSizeGb"]
    addresses = int(bool(interface.get("accessConfigs")))
    return {"SSD_TOTAL_GB": int(size_gib), "IN_USE_ADDRESSES": addresses}
