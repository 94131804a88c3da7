"""What the fake's machines share: images, networks, subnets, firewall rules."""

from __future__ import annotations

from tests.fakes.gcp_answers import RefusedError, absent, page, passes, passing, scopes
from tests.fakes.gcp_world import (
    IMAGE_FAMILY,
    IMAGE_PROJECT,
    PROJECT,
    ZONES,
    Json,
    World,
)

IMAGE = f"projects/{IMAGE_PROJECT}/global/images/family/{IMAGE_FAMILY}"


class Shared:
    """Calls of Compute Engine, named ``service__method``.

    Args:
        world: The project.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def images__get(self, asked: Json) -> Json:
        state = self._world.images.get(asked["image"])
        if asked["project"] != IMAGE_PROJECT or state is None:
            raise absent(f"projects/{asked['project']}/global/images/{asked['image']}")
        told = {"name": asked["image"], "diskSizeGb": "50"}
        return told if state == "ACTIVE" else {**told, "deprecated": {"state": state}}

    def images__get_from_family(self, asked: Json) -> Json:
        if (asked["project"], asked["family"]) != (IMAGE_PROJECT, IMAGE_FAMILY):
            raise absent(f"projects/{asked['project']}/global/images/family")
        # "Image families": the newest image that is not deprecated.
        named = [name for name, state in self._world.images.items() if state == "ACTIVE"]
        return {"name": max(named), "diskSizeGb": "50"}

    def networks__get(self, asked: Json) -> Json:
        return self._shared(self._world.networks, asked["network"], "networks")

    def networks__list(self, asked: Json) -> Json:
        return page(passing(self._world.networks.values(), asked), asked)

    def networks__insert(self, asked: Json) -> Json:
        made = dict(asked["networkResource"])
        return self._add(self._world.networks, made["name"], made, "networks", "global")

    def networks__delete(self, asked: Json) -> Json:
        world, name = self._world, asked["network"]
        inside = [*world.subnets.values(), *world.firewalls.values()]
        if any(each["network"].endswith(f"/{name}") for each in inside):
            self._in_use(name)
        return self._drop(world.networks, name, name, "networks", "global")

    def subnetworks__get(self, asked: Json) -> Json:
        key = f"{asked['region']}/{asked['subnetwork']}"
        return self._shared(self._world.subnets, key, "subnetworks")

    def subnetworks__insert(self, asked: Json) -> Json:
        made, region = dict(asked["subnetworkResource"]), asked["region"]
        key = f"{region}/{made['name']}"
        return self._add(self._world.subnets, key, made, "subnetworks", region)

    def subnetworks__delete(self, asked: Json) -> Json:
        world, region, name = self._world, asked["region"], asked["subnetwork"]
        for each in world.instances:
            subnet = each.told["networkInterfaces"][0]["subnetwork"]
            if each.ended_s is None and subnet.endswith(f"{region}/subnetworks/{name}"):
                self._in_use(name)
        key = f"{region}/{name}"
        return self._drop(world.subnets, key, name, "subnetworks", region)

    def subnetworks__aggregated_list(self, asked: Json) -> Json:
        regions: dict[str, list[Json]] = {z.rpartition("-")[0]: [] for z in ZONES}
        for key, told in self._world.subnets.items():
            if passes(told, asked["filter"]):
                regions[key.partition("/")[0]].append(told)
        return scopes("regions", "subnetworks", regions, self._world.silent_zones)

    def firewalls__get(self, asked: Json) -> Json:
        return self._shared(self._world.firewalls, asked["firewall"], "firewalls")

    def firewalls__list(self, asked: Json) -> Json:
        return page(passing(self._world.firewalls.values(), asked), asked)

    def firewalls__insert(self, asked: Json) -> Json:
        made = dict(asked["firewallResource"])
        name = made["name"]
        if made["network"].rpartition("/")[2] not in self._world.networks:
            raise absent(made["network"])
        return self._add(self._world.firewalls, name, made, "firewalls", "global")

    def firewalls__patch(self, asked: Json) -> Json:
        name = asked["firewall"]
        rule = self._shared(self._world.firewalls, name, "firewalls")
        rule.update(asked["firewallResource"])
        return self._world.begin("patch", "global", "firewalls", name, lambda: None)

    def firewalls__delete(self, asked: Json) -> Json:
        name = asked["firewall"]
        return self._drop(self._world.firewalls, name, name, "firewalls", "global")

    def _shared(self, where: dict[str, Json], key: str, collection: str) -> Json:
        if key not in where:
            raise absent(f"projects/{PROJECT}/{collection}/{key}")
        return where[key]

    def _add(
        self, where: dict[str, Json], key: str, made: Json, collection: str, scope: str
    ) -> Json:
        if key in where:
            raise RefusedError(409, "alreadyExists", f"{key} already exists")
        where[key] = made
        name = made["name"]
        return self._world.begin("insert", scope, collection, name, lambda: None)

    def _drop(
        self, where: dict[str, Json], key: str, name: str, collection: str, scope: str
    ) -> Json:
        self._shared(where, key, collection)

        def remove() -> None:
            where.pop(key, None)

        return self._world.begin("delete", scope, collection, name, remove)

    def _in_use(self, name: str) -> None:
        reason = "resourceInUseByAnotherResource"
        raise RefusedError(400, reason, f"{name} is already being used")
