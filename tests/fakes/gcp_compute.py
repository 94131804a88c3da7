"""What Compute Engine does when it is asked, as far as it is known here.

Every method of ``Compute`` is one call of the SDK, named ``service__method``.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.fakes.gcp_answers import RefusedError, absent, page, passes, passing, scopes
from tests.fakes.gcp_shared import IMAGE, Shared
from tests.fakes.gcp_world import (
    BASE,
    GPUS,
    PROJECT,
    ZONES,
    Instance,
    Json,
    disk_and_address,
    scope_folder,
    stamp,
)

from spottrain.units import DAY_S

_STOCK_OUT = "ZONE_RESOURCE_POOL_EXHAUSTED"


class Compute(Shared):
    """The calls.

    Args:
        world: The project.
    """

    # --- machines ---------------------------------------------------------------------

    def instances__bulk_insert(self, asked: Json) -> Json:
        world, zone = self._world, self._zone(asked)
        for pending in world.operations.values():
            if pending.told.get("clientOperationId") == asked["requestId"]:
                return pending.told
        resource = asked["bulkInsertInstanceResourceResource"]
        wanted = resource["instanceProperties"]
        self._check_parts(zone, wanted)
        kind, count = _kind(wanted), int(resource["count"])
        error = self._forbids(list(resource["perInstanceProperties"]), wanted) or self._lacks(
            zone, kind, wanted, count
        )
        free = world.capacity.get(f"{zone}/{kind}", 0) - world.live(zone, kind)
        if error is None and free < int(resource["minCount"]):
            told = f"The zone '{zone}' does not have enough resources available."
            error = (_STOCK_OUT, told, 503)
        made = 0 if error else min(free, count)
        names = list(resource["perInstanceProperties"])[:made]
        taken = [name for name in names if world.instance(zone, name)]
        if taken:
            raise RefusedError(409, "alreadyExists", f"{taken[0]} already exists")
        born = [self._make(zone, name, kind, wanted) for name in names]
        status = {"targetVmCount": count, "createdVmCount": made, "status": "DONE"}
        where = {"perLocationStatus": {f"zones/{zone}": status}}
        more: Json = {"instancesBulkInsertOperationMetadata": where}
        more["clientOperationId"] = asked["requestId"]
        if error is None and made < count and world.tells_missing:
            error = (_STOCK_OUT, f"{count - made} machines are lacking.", 503)
        if error:
            more |= _failed(*error)
        return world.begin("bulkInsert", zone, "instances", "", lambda: _run(born), **more)

    def _check_parts(self, zone: str, wanted: Json) -> None:
        """Check that what a machine is made of exists."""
        world = self._world
        interface, disk = wanted["networkInterfaces"][0], wanted["disks"][0]
        network = interface["network"].rpartition("/")[2]
        if network not in world.networks:
            raise absent(interface["network"])
        subnet = interface["subnetwork"].split("/")
        if f"{subnet[-3]}/{subnet[-1]}" not in world.subnets:
            raise absent(interface["subnetwork"])
        for pending in world.operations.values():
            told = pending.told
            new = told["operationType"] == "insert" and told["status"] != "DONE"
            if new and told["targetLink"].endswith(f"/{network}"):
                raise RefusedError(400, "resourceNotReady", f"{network} is not ready")
        image = disk["initializeParams"]["sourceImage"]
        name = image.rpartition("/")[2]
        if image != IMAGE and world.images.get(name) not in ("ACTIVE", "DEPRECATED"):
            raise absent(image)

    def _forbids(self, names: list[str], wanted: Json) -> tuple[str, str, int] | None:
        """Refuse what a policy of the organisation forbids, as an operation that fails.

        The first message is Google's (googlecodelabs/feedback 695); that of OS
        Login is not documented.
        """
        constraint = "constraints/compute.{}"
        violated = f"Constraint {constraint} violated for project {PROJECT}."
        policies, interface = self._world.policies, wanted["networkInterfaces"][0]
        told = {each["key"]: each["value"] for each in wanted["metadata"]["items"]}
        if "vmExternalIpAccess" in policies and interface.get("accessConfigs"):
            message = violated.format("vmExternalIpAccess")
            message += f" Add instance {names[0]} to the constraint to use external IP"
            return "CONDITION_NOT_MET", f"{message} with it.", 412
        if "requireOsLogin" in policies and told["enable-oslogin"] == "FALSE":
            return "CONDITION_NOT_MET", violated.format("requireOsLogin"), 412
        return None

    def _lacks(self, zone: str, kind: str, wanted: Json, count: int) -> tuple[str, str, int] | None:
        """A quota refuses the whole call ("Retry the request with a smaller number of
        VMs", "Troubleshoot bulk creation of VMs").
        """
        world, region = self._world, zone.rpartition("-")[0]
        if f"{zone}/{kind}" not in world.offered:
            return "RESOURCE_NOT_FOUND", f"no machine type {kind} in {zone}", 404
        metric, gpus = GPUS[kind]
        spot = wanted["scheduling"]["provisioningModel"] == "SPOT"
        # There is no quota of spot VMs for a series of CPUs (compute_v1.Quota.Metric).
        metric = f"PREEMPTIBLE_{metric}" if spot and "_GPUS" in metric else metric
        due = {metric: gpus, **disk_and_address(wanted)}
        for name, each in due.items():
            limit = world.limits.get(name, float("inf"))
            if world.used(name, region) + each * count > limit:
                told = f"Quota '{name}' exceeded.  Limit: {limit} in region {region}."
                return "QUOTA_EXCEEDED", told, 403
        return None

    def _make(self, zone: str, name: str, kind: str, wanted: Json) -> Instance:
        world = self._world
        world.number += 1
        made_s = world.moment()
        address = f"10.64.{world.number // 250}.{world.number % 250 + 2}"
        public = world.boot(name, wanted["metadata"]) or address.replace("10", "203", 1)
        interface = {
            **wanted["networkInterfaces"][0],
            "networkIP": address,
            "accessConfigs": [
                {**config, "natIP": public}
                for config in wanted["networkInterfaces"][0].get("accessConfigs", ())
            ],
        }
        where = f"{BASE}/projects/{PROJECT}/zones/{zone}"
        told = {
            "kind": "compute#instance",
            "id": str(world.number),
            "name": name,
            "zone": where,
            "selfLink": f"{where}/instances/{name}",
            "machineType": f"{where}/machineTypes/{wanted['machineType']}",
            "status": "PROVISIONING",
            "creationTimestamp": stamp(made_s),
            "scheduling": wanted["scheduling"],
            "labels": wanted["labels"],
            "metadata": wanted["metadata"],
            "tags": wanted["tags"],
            "disks": [{"diskSizeGb": wanted["disks"][0]["initializeParams"]["diskSizeGb"]}],
            "networkInterfaces": [interface],
        }
        world.instances.append(Instance(told, kind, made_s))
        return world.instances[-1]

    def instances__get(self, asked: Json) -> Json:
        return self._instance(asked).told

    def instances__list(self, asked: Json) -> Json:
        found = self._listed(self._zone(asked), asked["filter"])
        return page(found, asked)

    def instances__aggregated_list(self, asked: Json) -> Json:
        zones = {zone: self._listed(zone, asked["filter"]) for zone in ZONES}
        return scopes("zones", "instances", zones, self._world.silent_zones)

    def _listed(self, zone: str, wanted: str) -> list[Json]:
        """Return what a list says, which may lag behind."""
        world, now_s = self._world, self._world.now()
        found = []
        for each in world.instances:
            if not each.told["zone"].endswith(f"/{zone}"):
                continue
            lingers = each.ended_s is not None and now_s < each.ended_s + world.linger_s
            hidden = now_s < each.made_s + world.hide_s
            if lingers:
                found.append({**each.told, "status": "RUNNING"})
            elif each.ended_s is None and not hidden:
                found.append(each.told)
        return [told for told in found if passes(told, wanted)]

    def instances__delete(self, asked: Json) -> Json:
        instance = self._instance(asked)
        instance.told["status"] = "STOPPING"
        zone, name = asked["zone"], asked["instance"]
        return self._world.begin(
            "delete", zone, "instances", name, lambda: self._world.end(instance)
        )

    def instances__get_guest_attributes(self, asked: Json) -> Json:
        self._instance(asked)
        key = self._world.host_key(asked["instance"])
        if key is None:
            raise absent(f"{asked['instance']}/guest-attributes/hostkeys/")
        kind, value = key.split()[:2]
        item = {"namespace": "hostkeys", "key": kind, "value": value}
        return {"queryPath": asked["queryPath"], "queryValue": {"items": [item]}}

    def _zone(self, asked: Json) -> str:
        zone = str(asked["zone"])
        if zone not in ZONES:
            raise RefusedError(400, "invalid", f"Invalid value for field 'zone': {zone}")
        return zone

    def _instance(self, asked: Json) -> Instance:
        zone, name = self._zone(asked), asked["instance"]
        found = self._world.instance(zone, name)
        if found is None:
            raise absent(f"projects/{PROJECT}/zones/{zone}/instances/{name}")
        return found

    # --- the market -------------------------------------------------------------------

    def machine_types__aggregated_list(self, asked: Json) -> Json:
        return self._kinds("machineTypes", 0, asked["filter"])

    def accelerator_types__aggregated_list(self, asked: Json) -> Json:
        return self._kinds("acceleratorTypes", 1, asked["filter"])

    def _kinds(self, collection: str, part: int, wanted: str) -> Json:
        zones: dict[str, list[Json]] = {zone: [] for zone in ZONES}
        for place in sorted(self._world.offered):
            zone, _, kind = place.partition("/")
            parts = kind.split("+")
            told = {"name": parts[part]} if part < len(parts) else {}
            if told and passes(told, wanted):
                zones[zone].append(told)
        return scopes("zones", collection, zones, self._world.silent_zones)

    def advice__capacity(self, asked: Json) -> Json:
        policy = asked["capacityAdviceRequestResource"]["distributionPolicy"]
        zone = policy["zones"][0]["zone"].rpartition("/")[2]
        score = self._world.scores.get(zone)
        if score is None:
            return {"recommendations": []}
        return {"recommendations": [{"scores": {"obtainability": score}}]}

    def advice__capacity_history(self, asked: Json) -> Json:
        """Answer for one type in one zone, day by day, but not for attached GPUs.

        "You can't view the preemption rate and pricing trend for N1 machine types that
        have GPUs attached" ("View the preemption rate and pricing for Spot VMs"); how that
        is refused is not documented, so it is an error.
        """
        wanted = asked["capacityHistoryRequestResource"]
        scope, _, zone = wanted["locationPolicy"]["location"].partition("/")
        machine = wanted["instanceProperties"]
        if machine["machineType"].startswith("n1-") or "guestAccelerators" in machine:
            raise RefusedError(400, "invalid", "no history of attached GPUs")
        if scope != "zones" or wanted["types"] != ["PREEMPTION"]:
            raise RefusedError(400, "invalid", "preemption rates are those of a zone")
        days = [
            {
                "interval": {
                    "startTime": stamp(day * DAY_S),
                    "endTime": stamp((day + 1) * DAY_S),
                },
                "preemptionRate": share,
            }
            for day, share in enumerate(self._world.preemptions.get(zone, ()))
        ]
        return {"preemptionHistory": days}

    def regions__get(self, asked: Json) -> Json:
        region = asked["region"]
        if not any(zone.startswith(f"{region}-") for zone in ZONES):
            raise absent(f"projects/{PROJECT}/regions/{region}")
        metrics = [name for name, _ in GPUS.values()]
        return {
            "name": region,
            "quotas": [
                self._quota(metric, region)
                for name in metrics
                for metric in (name, f"PREEMPTIBLE_{name}")
                if metric != "PREEMPTIBLE_N2_CPUS"
            ]
            + [
                self._quota(metric, region)
                for metric in ("SSD_TOTAL_GB", "IN_USE_ADDRESSES")
                if metric in self._world.limits
            ],
        }

    def projects__get(self, asked: Json) -> Json:
        metric = "GPUS_ALL_REGIONS"
        limit = self._world.limits.get(metric, 0.0)
        quota = {"metric": metric, "limit": limit, "usage": 0.0}
        return {"name": asked["project"], "quotas": [quota]}

    def _quota(self, metric: str, region: str) -> Json:
        limit = self._world.limits.get(metric, 0.0)
        used = float(self._world.used(metric, region))
        return {"metric": metric, "limit": limit, "usage": used}

    # --- operations -------------------------------------------------------------------

    def zone_operations__list(self, asked: Json) -> Json:
        return self._operations(asked["zone"], asked)

    def region_operations__list(self, asked: Json) -> Json:
        return self._operations(asked["region"], asked)

    def global_operations__list(self, asked: Json) -> Json:
        return self._operations("global", asked)

    def global_operations__aggregated_list(self, asked: Json) -> Json:
        found: dict[str, list[Json]] = {zone: [] for zone in ZONES}
        for pending in self._world.operations.values():
            zone = pending.told.get("zone", "").rpartition("/")[2]
            if zone in found and passes(pending.told, asked["filter"]):
                found[zone].append(pending.told)
        return scopes("zones", "operations", found, self._world.silent_zones)

    def zone_operations__wait(self, asked: Json) -> Json:
        return self._wait(asked)

    def region_operations__wait(self, asked: Json) -> Json:
        return self._wait(asked)

    def global_operations__wait(self, asked: Json) -> Json:
        return self._wait(asked)

    def _operations(self, scope: str, asked: Json) -> Json:
        folder = f"/{scope_folder(scope)}/operations/"
        mine = [
            pending.told
            for pending in self._world.operations.values()
            if folder in pending.told["selfLink"]
        ]
        return page(passing(mine, asked), asked)

    def _wait(self, asked: Json) -> Json:
        pending = self._world.operations.get(asked["operation"])
        if pending is None:
            raise absent(f"operations/{asked['operation']}")
        self._world.finish(pending)
        return pending.told


def _kind(wanted: Json) -> str:
    attached = wanted.get("guestAccelerators", ())
    return "+".join([wanted["machineType"], *(each["acceleratorType"] for each in attached)])


def _run(born: Iterable[Instance]) -> None:
    for instance in born:
        if instance.told["status"] == "PROVISIONING":
            instance.told["status"] = "RUNNING"


def _failed(code: str, message: str, status: int) -> Json:
    return {
        "error": {"errors": [{"code": code, "message": message}]},
        "httpErrorStatusCode": status,
        "httpErrorMessage": code.replace("_", " "),
    }
