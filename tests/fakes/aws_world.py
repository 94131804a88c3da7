"""What moto's EC2 lacks: a spot market, faults, and lists that lag behind."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.iam.models import iam_backends
from tests.fakes.script import CloudScript
from tests.fakes.throttling import AWS, Throttle, token_bucket

ACCOUNT = "123456789012"
_LIVE = ("pending", "running")
LISTED_S = 3600.0
"""How long an instance that ended is listed."""


class World(CloudScript):
    """One account; every public method may be called from the test's process."""

    def __init__(self) -> None:
        super().__init__(lambda: Throttle(token_bucket(AWS)))
        self.reset()

    def reset(self) -> None:
        """Back to an empty account with no machine to rent."""
        self.forget_script()
        self.capacity: dict[str, int] = {}
        self.prices: list[dict[str, Any]] = []
        self.quotas: dict[str, float] = {}
        self.scores: dict[str, int] = {}
        self.not_offered: set[str] = set()
        self.stopped_at_s: float | None = None
        self.tokens: dict[str, tuple[str, bytes, dict[str, str]]] = {}
        self.ends: dict[str, float] = {}
        self.past: list[dict[str, Any]] = []
        self.json_log: list[str] = []
        self.expired: set[str] = set()
        self.denied: set[str] = set()
        self.images: dict[str, str] = {}
        self.host_keys: dict[str, str] = {}

    # --- knobs ------------------------------------------------------------------------

    def stock(self, zone: str, instance_type: str, count: int) -> None:
        """Set how many machines of one type a zone has for us, spot or not."""
        self.capacity[f"{zone}/{instance_type}"] = count

    def price(self, zone: str, instance_type: str, usd: float, at_s: float) -> None:
        """Let a spot price begin."""
        self.prices.append({"zone": zone, "instance_type": instance_type, "usd": usd, "at_s": at_s})

    def quota(self, code: str, vcpus: float) -> None:
        """Bound the virtual CPUs of one quota."""
        self.quotas[code] = vcpus

    def score(self, zone_id: str, score: int) -> None:
        """Set a spot placement score of 1 to 10."""
        self.scores[zone_id] = score

    def publish(self, image_id: str, state: str) -> None:
        """Set the state of an image: available, deprecated or deregistered."""
        self.images[image_id] = state

    def withdraw(self, zone: str, instance_type: str) -> None:
        """No longer offer a type in a zone at all."""
        self.not_offered.add(f"{zone}/{instance_type}")

    def stop_time(self) -> None:
        """Let no time pass from now on but what ``pass_time`` lets pass."""
        self.stopped_at_s = time.time()

    def expire_key(self, key_id: str) -> None:
        """Expire the temporary credentials of one access key."""
        self.expired.add(key_id)

    def deny(self, operation: str) -> None:
        """Take the permission for one operation away."""
        self.denied.add(operation)

    def console(self, instance_id: str, keys: str) -> None:
        """Let a VM's console show host keys, one a line."""
        self.host_keys[instance_id] = keys

    def instance_profile(self, name: str) -> None:
        """Let there be a role that VMs can be given."""
        iam_backends[ACCOUNT]["aws"].create_instance_profile(name, "/", [])

    def boot(self, region: str, instance_id: str) -> tuple[str, str]:
        """Switch a new VM on; return its private address as moto chose it, and as it is.

        All machines are on one network, inside and outside of the cloud.
        """
        if self.machines is None:
            return "", ""
        backend = self.backend(region)
        instance = backend.get_instance(instance_id)
        key = backend.key_pairs[instance.key_name].public_key
        address = self.machines.boot(instance_id, key)
        card = instance.nics[0]
        chosen = card.private_ip_address
        card.public_ip = card.private_ip_address = address
        return chosen, address

    def switch_off(self, instance_id: str) -> None:
        """Switch a VM off that was given back or taken."""
        if self.machines is not None:
            self.machines.kill(instance_id)

    def shown_keys(self, instance_id: str) -> str | None:
        """Return the host keys on a VM's console, None before it has booted."""
        shown = self.host_keys.get(instance_id)
        if shown is None and self.machines is not None:
            return self.machines.host_key(instance_id)
        return shown

    def interrupt(self, region: str, instance_id: str) -> None:
        """Take a spot VM back, as a real interruption does in the end."""
        instance = self.backend(region).get_instance(instance_id)
        instance.terminate()
        at = self.moment().strftime("%Y-%m-%d %H:%M:%S GMT")
        instance._reason = f"Service initiated ({at})"
        instance.state_reason.code = "Server.SpotInstanceTermination"
        instance.state_reason.message = "Server.SpotInstanceTermination"
        self.ends[instance_id] = self.now()
        self.switch_off(instance_id)

    def remove_default_subnets(self, region: str) -> None:
        """Leave an account as some companies keep it: without a network to start in."""
        backend = self.backend(region)
        for group in list(backend.subnets.values()):
            for subnet_id in list(group):
                backend.delete_subnet(subnet_id)

    def let_in(self, region: str) -> list[str]:
        """Return the networks from which VMs of jobs accept SSH."""
        return [
            rule.ip_range["CidrIp"]
            for groups in self.backend(region).groups.values()
            for group in groups.values()
            if group.name.startswith("spottrain-")
            for rule in group.ingress_rules
            if rule.from_port == 22
        ]

    def users_own_network(self, region: str, zone: str) -> tuple[str, str]:
        """Return a subnet and a security group that the user has made."""
        backend = self.backend(region)
        vpc = backend.create_vpc("10.1.0.0/16")
        subnet = backend.create_subnet(
            vpc.id, "10.1.0.0/24", availability_zone=zone, availability_zone_id=None
        )
        group = backend.create_security_group("theirs", "theirs", vpc_id=vpc.id)
        return subnet.id, group.id

    # --- what there is ----------------------------------------------------------------

    def now(self) -> float:
        """The time as lists see it."""
        wall_s = time.time() if self.stopped_at_s is None else self.stopped_at_s
        return wall_s + self.offset_s

    def moment(self) -> datetime:
        """The same as moto writes it, without a zone; EC2 tells whole seconds."""
        return datetime.fromtimestamp(int(self.now()), UTC).replace(tzinfo=None)

    def backend(self, region: str) -> Any:
        """moto's EC2 of a region."""
        return ec2_backends[ACCOUNT][region]

    def live(self, region: str) -> list[Any]:
        """Instances that run or are about to."""
        all_of_them = self.backend(region).all_instances()
        return [each for each in all_of_them if each.state in _LIVE]

    def json_calls(self) -> list[str]:
        """Return the operations of the services beside EC2 that were called so far."""
        return self.json_log

    def bill(self) -> list[dict[str, Any]]:
        """Return every instance that ever was, with its start and end."""
        return self.past + [
            _billed(each)
            for region in ec2_backends[ACCOUNT]
            for each in self.backend(region).all_instances()
        ]

    def forget(self, region: str) -> None:
        """List no longer what ended an hour ago, as EC2 does; it stays on the bill."""
        reservations = self.backend(region).reservations
        for key, reservation in list(reservations.items()):
            old = [
                each
                for each in reservation.instances
                if self.ends.get(each.id, math.inf) + LISTED_S < self.now()
            ]
            self.past += map(_billed, old)
            for each in old:
                reservation.instances.remove(each)
            if not reservation.instances:
                del reservations[key]

    def left(self) -> list[str]:
        """Name everything that costs money or was made for a job."""
        names = []
        for region in ec2_backends[ACCOUNT]:
            backend = self.backend(region)
            names += [each.id for each in self.live(region)]
            names += [each.id for each in backend.volumes.values()]
            kept = [
                *(g for groups in backend.groups.values() for g in groups.values()),
                *backend.key_pairs.values(),
                *backend.vpcs.values(),
                *backend.internet_gateways.values(),
                *(s for group in backend.subnets.values() for s in group.values()),
            ]
            names += [
                str(getattr(each, "id", each))
                for each in kept
                if any(tag["key"] == "spottrain-job" for tag in _tags(each))
            ]
        return sorted(names)

    def vcpus(self, region: str, *, spot: bool) -> int:
        """Virtual CPUs in use."""
        return sum(
            vcpus_of(each.instance_type)
            for each in self.live(region)
            if (each.lifecycle == "spot") == spot
        )


def _billed(each: Any) -> dict[str, Any]:
    return {
        "instance_id": each.id,
        "instance_type": each.instance_type,
        "zone": each.placement.zone,
        "spot": each.lifecycle == "spot",
        "tags": {tag["key"]: tag["value"] for tag in each.get_tags()},
        "launched_at": each.launch_time.replace(tzinfo=UTC).timestamp(),
        "ended_at": _ended_at(each),
    }


def _ended_at(instance: Any) -> float | None:
    """When billing stopped: EC2 states it in words, to the second."""
    _, stated, text = str(instance._reason).partition("(")
    if not stated:
        return None
    moment = datetime.fromisoformat(text[:19]).replace(tzinfo=UTC)
    return moment.timestamp()


def _tags(each: Any) -> list[dict[str, str]]:
    tags: list[dict[str, str]] = each.get_tags()
    return tags


def vcpus_of(instance_type: str) -> int:
    """Virtual CPUs of one machine."""
    return int(INSTANCE_TYPES[instance_type]["VCpuInfo"]["DefaultVCpus"])
