"""One fake Azure subscription: its resources, its market, and what time does to them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tests.fakes.prices import FakePrices, azure_item
from tests.fakes.script import CloudScript
from tests.fakes.throttling import AZURE, Throttle, token_bucket

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
VMS = "Microsoft.Compute/virtualMachines"
DISKS = "Microsoft.Compute/disks"
CARDS = "Microsoft.Network/networkInterfaces"
ADDRESSES = "Microsoft.Network/publicIPAddresses"
NETWORKS = "Microsoft.Network/virtualNetworks"
RULES = "Microsoft.Network/networkSecurityGroups"
IDENTITIES = "Microsoft.ManagedIdentity/userAssignedIdentities"
GRANTS = "Microsoft.Authorization/roleAssignments"
ROLES = "Microsoft.Authorization/roleDefinitions"
_LIVE = ("Creating", "Succeeded")


@dataclass
class Item:
    """A resource."""

    kind: str
    group: str
    name: str
    told: dict[str, Any]

    @property
    def resource_id(self) -> str:
        """As ARM writes it."""
        return resource_id(self.group, self.kind, self.name)


@dataclass
class Operation:
    """Something that takes long."""

    due_s: float
    finish: Callable[[], None]
    error: tuple[str, str] | None = None
    done: bool = False


@dataclass(frozen=True)
class Size:
    """A type of machine."""

    vcpus: int
    family: str
    zones: tuple[str, ...] = ("1", "2")
    closed: tuple[str, ...] = ()
    spot: bool = True


def resource_id(group: str, kind: str, name: str) -> str:
    """Return an id as ARM writes it."""
    home = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{group}"
    return f"{home}/providers/{kind}/{name}"


class World(CloudScript):
    """One account; every public method may be called from the test's process."""

    def __init__(self) -> None:
        super().__init__(lambda: Throttle(token_bucket(AZURE)))
        self.retail = FakePrices()
        self.reset()

    def reset(self) -> None:
        """Back to an empty subscription with no machine to rent."""
        self.forget_script()
        self.groups: dict[str, dict[str, Any]] = {}
        self.items: dict[str, Item] = {}
        self.operations: dict[str, Operation] = {}
        self.sizes: dict[tuple[str, str], Size] = {}
        self.capacity: dict[str, int] = {}
        self.quotas: dict[tuple[str, str], int] = {}
        self.addresses: dict[tuple[str, str], int] = {}
        self.eviction_rates: dict[tuple[str, str], str] = {}
        self.retail.azure = []
        self.images = {"microsoft-dsvm:ubuntu-hpc:2404": ["24.04.20260901"]}
        self.ledger: dict[str, dict[str, Any]] = {}
        self.past: list[dict[str, Any]] = []
        self.ghosts: list[tuple[float, Item]] = []
        self.create_s, self.delete_s = 0.02, 0.3
        self.late = self.strays = self.denied_grants = self.denied_log = False
        self.denied_roles = False
        self.roles: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.log_lag_s = 0.0
        self.page = 50
        self.numbers = itertools.count(4)

    # --- knobs ------------------------------------------------------------------------

    def offer(self, region: str, name: str, usd: list[float], **size: Any) -> None:
        """Let a region have a type at (spot, on-demand) prices."""
        size = {k: tuple(v) if isinstance(v, list) else v for k, v in size.items()}
        self.sizes[region, name] = Size(**size)
        spot, on_demand = usd
        self.retail.azure += [
            azure_item(name, spot, spot=True, region=region),
            azure_item(name, on_demand, region=region),
        ]

    def stock(self, zone: str, instance_type: str, count: int) -> None:
        """Set how many machines of one type a zone has for us, spot or not."""
        self.capacity[f"{zone}/{instance_type}"] = count

    def quota(self, region: str, family: str, vcpus: int) -> None:
        """Bound the virtual CPUs of one quota."""
        self.quotas[region, family] = vcpus

    def publish(self, urn: str, versions: list[str]) -> None:
        """Set the versions of an image, the newest last."""
        self.images[urn] = versions

    def address_quota(self, region: str, name: str, limit: int) -> None:
        """Bound the public addresses of a region, by one of Azure's quotas."""
        self.addresses[region, name] = limit

    def eviction_rate(self, region: str, name: str, rate: str) -> None:
        """Publish the eviction rate of a size, such as ``5-10`` (percent an hour)."""
        self.eviction_rates[region, name] = rate

    def delays(self, **seconds: float) -> None:
        """Set how long things take: create_s, delete_s."""
        vars(self).update(seconds)

    def moods(self, **moods: Any) -> None:
        """Set ``late`` (no capacity is told only after the VM was accepted), ``strays``
        (an eviction leaves card, address and disk), ``denied_grants``, ``denied_log``,
        ``denied_roles`` (roles cannot be made, but granted),
        ``log_lag_s`` (how late events stand in the Activity Log) or ``page``.
        """
        vars(self).update(moods)

    def prices_url(self) -> str:
        """Return where Retail Prices answer."""
        return self.retail.url

    def evict(self, name: str) -> None:
        """Take a spot VM back, as a real eviction does in the end."""
        for item in list(self.of_kind(VMS)):
            if item.name == name:
                self.remove(item, "evictSpotVM/action", attached=not self.strays)

    def users_own(self, group: str, region: str) -> str:
        """Make a group and a network that are the user's; return the subnet's id."""
        self.groups[group.lower()] = {"location": region, "tags": {"owner": "them"}}
        told = {"location": region, "properties": {"subnets": [{"name": "theirs"}]}}
        network = self.put(NETWORKS, group, "theirs", told)
        return f"{network.resource_id}/subnets/theirs"

    # --- what there is ----------------------------------------------------------------

    def bill(self) -> list[dict[str, Any]]:
        """Return every VM that ever ran, with its start and end."""
        self.settle()
        return [*self.past, *self.ledger.values()]

    def left(self) -> list[str]:
        """Name everything that costs money or was made for a job."""
        self.settle()
        ours = {
            name for name, told in self.groups.items() if "spottrain-job" in told.get("tags", {})
        }
        made = [
            item
            for item in self.items.values()
            if item.group.lower() in ours or item.name != "theirs"
        ]
        names = [f"{item.kind.rpartition('/')[2]}/{item.name}" for item in made]
        return sorted([*names, *(f"group/{name}" for name in ours)])

    def of_kind(self, kind: str, group: str = "") -> Iterator[Item]:
        """Yield resources of one type, of all groups if none is given."""
        for item in self.items.values():
            if item.kind == kind and group.lower() in ("", item.group.lower()):
                yield item

    def get(self, resource_id: str) -> Item | None:
        """Return a resource by its id."""
        return self.items.get(resource_id.lower())

    def listed(self, group: str = "") -> list[Item]:
        """Return VMs as a list that lags behind does."""
        seen = [
            item
            for item in self.of_kind(VMS, group)
            if self.ledger[item.name]["made_s"] + self.hide_s <= self.now()
        ]
        names = {item.name for item in seen}
        for ended_s, ghost in self.ghosts:
            inside = group.lower() in ("", ghost.group.lower())
            if inside and ended_s + self.linger_s > self.now():
                seen = [item for item in seen if item.name != ghost.name]
                seen += [ghost]
                names.add(ghost.name)
        return seen

    def public_addresses(self, region: str) -> int:
        """Public addresses in use of a region."""
        return sum(a.told["location"] == region for a in self.of_kind(ADDRESSES))

    def used(self, region: str, family: str) -> int:
        """Virtual CPUs in use of one quota."""
        total = 0
        for item in self.of_kind(VMS):
            told = item.told["properties"]
            if told["provisioningState"] not in _LIVE:
                continue
            if item.told["location"] != region:
                continue
            size = self.sizes[region, told["hardwareProfile"]["vmSize"]]
            spot = told["priority"] == "Spot"
            mine = "lowPriorityCores" if spot else size.family
            total += size.vcpus * (family == mine)
        return total

    def free(self, region: str, zone: str, kind: str) -> int:
        """Machines that are left in a zone."""
        place = f"{region}-{zone}" if zone else region
        live = sum(
            item.told["location"] == region
            and item.told.get("zones", [""])[0] == zone
            and item.told["properties"]["hardwareProfile"]["vmSize"] == kind
            and item.told["properties"]["provisioningState"] in _LIVE
            for item in self.of_kind(VMS)
        )
        return int(self.capacity.get(f"{place}/{kind}", 0) - live)

    # --- changes ----------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything happen that is due."""
        while True:
            due = [
                each
                for each in self.operations.values()
                if not each.done and each.due_s <= self.now()
            ]
            if not due:
                return
            first = min(due, key=lambda each: each.due_s)
            first.done = True
            first.finish()

    def begin(
        self,
        seconds: float,
        finish: Callable[[], None],
        error: tuple[str, str] | None = None,
    ) -> str:
        """Return the id of an operation that ends after a while."""
        name = str(uuid.uuid4())
        self.operations[name] = Operation(self.now() + seconds, finish, error)
        return name

    def put(self, kind: str, group: str, name: str, told: dict[str, Any]) -> Item:
        """Keep a resource."""
        item = Item(kind, group, name, deepcopy(told))
        item.told |= {"id": item.resource_id, "name": name, "type": kind}
        self.items[item.resource_id.lower()] = item
        return item

    def remove(self, item: Item, change: str = "delete", *, attached: bool = True) -> None:
        """Remove a resource; a VM with all that ends with it, and its bill."""
        if self.get(item.resource_id) is not item:
            return  # gone already; of its name there may be another
        del self.items[item.resource_id.lower()]
        if item.kind != VMS:
            return
        row, moment = self.ledger[item.name], self.happened(item, change, "Succeeded")
        if row["ended_at"] is None:
            row["ended_at"] = datetime.fromisoformat(moment).timestamp()
        if self.machines is not None:
            self.machines.kill(item.name)
        if not attached:
            return
        for kind in (CARDS, ADDRESSES, DISKS):
            for each in list(self.of_kind(kind, item.group)):
                if each.name.startswith(f"{item.name}-"):
                    self.remove(each)

    def end(self, item: Item) -> str:
        """Delete a VM; return the operation."""
        told = item.told["properties"]
        if told["provisioningState"] != "Deleting":
            self.happened(item, "delete", "Accepted")
            if told["provisioningState"] == "Succeeded":
                self.ghosts.append((self.now(), deepcopy(item)))
            told["provisioningState"] = "Deleting"
        return self.begin(self.delete_s, lambda: self.remove(item))

    def happened(self, item: Item, change: str, step: str, change_id: str = "") -> str:
        """Note a step of a change of a VM in the Activity Log; return its time there.

        Args:
            item: The VM.
            change: Such as ``write``.
            step: Such as ``Accepted``.
            change_id: The same for all steps of one change; else a new one.
        """
        moment = self.moment()
        self.events.append(
            {
                "at_s": self.now(),
                "group": item.group,
                "eventTimestamp": moment,
                "operationName": {"value": f"{VMS}/{change}"},
                "status": {"value": step},
                "resourceId": item.resource_id.upper(),  # as Azure likes to
                "correlationId": change_id or str(uuid.uuid4()),
                "eventDataId": str(uuid.uuid4()),
            }
        )
        return moment

    def remove_group(self, name: str) -> str:
        """Delete a group with all that is in it; return the operation."""
        self.groups[name.lower()]["properties"] = {"provisioningState": "Deleting"}
        for item in list(self.of_kind(VMS, name)):
            self.end(item)

        def finish() -> None:
            self.groups.pop(name.lower(), None)
            for item in list(self.items.values()):
                if item.group.lower() == name.lower():
                    self.remove(item)

        return self.begin(self.delete_s, finish)

    def moment(self) -> str:
        """Return the cloud's time as ARM writes it."""
        now = datetime.fromtimestamp(self.now() + self.skew_s, UTC)
        return now.isoformat(timespec="microseconds")
