"""The fake's routes: what Azure Resource Manager answers to each request."""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from urllib.parse import urlencode

from tests.fakes import azure_activity, azure_market, azure_vms
from tests.fakes.azure_http import Call, Reply, error
from tests.fakes.azure_model import DriftError, check
from tests.fakes.azure_rules import check_body, check_query
from tests.fakes.azure_vms import RefusedError
from tests.fakes.azure_world import (
    CARDS,
    GRANTS,
    IDENTITIES,
    NETWORKS,
    ROLES,
    RULES,
    SUBSCRIPTION,
    VMS,
    Item,
    World,
)

_SUB = f"/subscriptions/{SUBSCRIPTION}"
_GROUP = rf"{_SUB}/resource[gG]roups/(?P<group>[\w.()-]+)"
_COMPUTE = rf"{_SUB}/providers/Microsoft\.Compute"
_ANY = r"providers/(?P<kind>Microsoft\.\w+/\w+)"
_VERSION = re.compile(r"\d{4}-\d\d-\d\d(-preview)?")
_CLOCKS_APART_S = 300
"""With more between the clocks, tokens are refused."""
_MODELS = {
    VMS: "compute.VirtualMachine",
    NETWORKS: "network.VirtualNetwork",
    RULES: "network.NetworkSecurityGroup",
    CARDS: "network.NetworkInterface",
}
_VERSIONS = {
    IDENTITIES: "2023-01-31",
    GRANTS: "2022-04-01",
    ROLES: "2022-04-01",
}


_ROLE = rf"{_SUB}/providers/(?P<kind>{re.escape(ROLES)})/[0-9a-f-]{{36}}"
_INNER = r"/subnets/\w+$"
_NAME = r"(?P<name>[\w-]+)"
_ROUTES = (
    ("GET", rf"{_SUB}/operations/(?P<id>[\w-]+)", "GET operations", "poll"),
    ("GET", rf"{_COMPUTE}/virtualMachines", "LIST virtualMachines", "list_all"),
    ("GET", rf"{_SUB}/resourcegroups", "LIST resourceGroups", "groups"),
    ("GET", rf"{_ROLE}", "GET roleDefinitions", "get_role"),
    ("PUT", rf"{_ROLE}", "PUT roleDefinitions", "put_role"),
    ("GET", rf"{_GROUP}/resources", "LIST resources", "resources"),
    (
        "POST",
        r"/providers/Microsoft\.ResourceGraph/resources",
        "POST resources",
        "query",
    ),
    ("GET", _GROUP, "GET resourceGroups", "get_group"),
    ("PUT", _GROUP, "PUT resourceGroups", "put_group"),
    ("DELETE", _GROUP, "DELETE resourceGroups", "delete_group"),
    ("GET", rf"{_GROUP}/{_ANY}", "LIST {}", "list"),
    ("GET", rf"{_GROUP}/{_ANY}/{_NAME}(?P<inner>/subnets/\w+)?", "GET {}", "get"),
    ("PUT", rf"{_GROUP}/{_ANY}/{_NAME}", "PUT {}", "put"),
    ("DELETE", rf"{_GROUP}/{_ANY}/{_NAME}", "DELETE {}", "delete"),
)
"""Method, path, operation, and the method of ``Arm`` that answers."""
_OFFER = r"vmimage/offers/(?P<offer>[\w-]+)/skus/(?P<sku>[\w-]+)"
_IMAGE = rf"publishers/(?P<publisher>[\w-]+)/artifacttypes/{_OFFER}/versions"
_MARKET = (
    (rf"{_COMPUTE}/skus", "skus", azure_market.skus),
    (
        rf"{_COMPUTE}/locations/(?P<region>\w+)/usages",
        "usages",
        azure_market.usages,
    ),
    (
        rf"{_SUB}/providers/Microsoft\.Network/locations/(?P<region>\w+)/usages",
        "address usages",
        azure_market.address_usages,
    ),
    (
        rf"{_COMPUTE}/locations/\w+/{_IMAGE}",
        "versions",
        azure_market.images,
    ),
    (
        rf"({_GROUP}|{_SUB})/providers/Microsoft\.Authorization/permissions",
        "permissions",
        azure_market.permissions,
    ),
    (
        rf"{_SUB}/providers/Microsoft\.Insights/eventtypes/management/values",
        "events",
        azure_activity.values,
    ),
)
"""Path, what is listed, and what answers."""


class Arm:
    """Azure Resource Manager.

    Args:
        world: What there is.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def answer(self, call: Call) -> Reply | None:
        """Return the answer, None where the line breaks."""
        world = self._world
        route = self._route(call)
        asks = call.method == "GET" or call.operation == "POST resources"
        outcome = world.meet(call.operation, changing=not asks)
        if (fault := outcome.error) is not None:
            return error(fault.status, fault.code, "scripted", fault)
        if not outcome.is_carried_out:
            return None
        with world.lock:
            reply = self._checked(call, route)
        outcome.finish()
        return reply if outcome.is_answered else None

    def _route(self, call: Call) -> Callable[[], Reply] | None:
        for path, listed, answer in _MARKET:
            found = re.fullmatch(path, call.path)
            if found is not None and call.method == "GET":
                call.found = {k: v or "" for k, v in found.groupdict().items()}
                call.operation = f"LIST {listed}"
                return functools.partial(answer, self._world, call)
        for method, path, operation, name in _ROUTES:
            found = re.fullmatch(path, call.path)
            if found is not None and method == call.method:
                call.found = {k: v or "" for k, v in found.groupdict().items()}
                kind = call.found.get("kind", "").rpartition("/")[2]
                call.operation = operation.format(kind)
                return functools.partial(getattr(self, f"_{name}"), call)
        return None

    def _checked(self, call: Call, route: Callable[[], Reply] | None) -> Reply:
        world = self._world
        world.log.append(
            {
                "operation": call.operation,
                "method": call.method,
                "path": call.path,
                "query": call.query,
                "if_none_match": call.headers.get("if-none-match"),
                "body": call.body,
            }
        )
        if not world.credentials_good:
            return error(401, "ExpiredAuthenticationToken", "The token has expired.")
        if abs(world.skew_s) > _CLOCKS_APART_S:
            return error(401, "InvalidAuthenticationToken", "nbf: not valid yet.")
        if not call.headers.get("authorization", "").startswith("Bearer "):
            return error(401, "AuthenticationFailed", "The header is missing.")
        kinds = {"GET": "read", "DELETE": "delete"}
        kind = kinds.get(call.method, "write")
        if not world.throttle.passes(kind, kind, world.now()):
            late = error(429, "SubscriptionRequestsThrottled", "Number of requests.")
            late.headers["Retry-After"] = "1"
            return late
        try:
            if route is None:
                raise DriftError(f"no route {call.method} {call.path}")
            self._check_request(call)
            world.settle()
            return route()
        except DriftError as drift:
            world.drift.append(str(drift))
            return error(400, "FakeDrift", str(drift))
        except RefusedError as refusal:
            return error(refusal.status, refusal.code, refusal.message)

    def _check_request(self, call: Call) -> None:
        version = call.query.get("api-version", "")
        kind = call.found.get("kind", "")
        if not _VERSION.fullmatch(version):
            raise DriftError(f"{call.operation}: api-version={version!r}")
        due = _VERSIONS.get(kind)
        if due is not None and version != due:
            raise DriftError(f"{call.operation}: api-version={version}, not {due}")
        check_query(call.operation, call.query)
        if call.operation == "POST resources":
            check_body(call.operation, call.body)
            return
        if call.method != "PUT":
            if call.body is not None:
                raise DriftError(f"{call.operation}: a body")
            return
        name = _MODELS.get(kind, "resources.GenericResource")
        if call.operation == "PUT resourceGroups":
            name = "resources.ResourceGroup"
        check(name, call.body, request=True)
        check_body(call.operation, call.body)
        if kind == VMS:
            told = call.body
            vm_size = told["properties"]["hardwareProfile"]["vmSize"]
            size = self._world.sizes.get((told["location"], vm_size))
            if size is not None and size.zones and "zones" not in told:
                raise DriftError(f"{call.operation}: its zone is left to chance")
        condition = call.headers.get("if-none-match")
        if condition != ("*" if kind == VMS else None):
            raise DriftError(f"{call.operation}: If-None-Match: {condition}")

    # --- long operations --------------------------------------------------------------

    def _poll(self, call: Call) -> Reply:
        operation = self._world.operations.get(call.found["id"])
        if operation is None:
            raise RefusedError(404, "NotFound", "no such operation")
        told: dict[str, Any] = {"name": call.found["id"], "status": "InProgress"}
        if operation.done:
            told["status"] = "Failed" if operation.error else "Succeeded"
            if operation.error:
                code, message = operation.error
                told["error"] = {"code": code, "message": message}
        return Reply(200, told)

    def _takes_long(self, call: Call, status: int, operation: str, told: Any) -> Reply:
        url = f"{call.base}{_SUB}/operations/{operation}?api-version=2024-07-01"
        headers = {"Azure-AsyncOperation": url}
        if status == 202:
            headers["Location"] = url
        return Reply(status, told, headers)

    # --- groups -----------------------------------------------------------------------

    def _group(self, call: Call) -> dict[str, Any]:
        name = call.found["group"]
        found = self._world.groups.get(name.lower())
        if found is None:
            code = "ResourceGroupNotFound"
            raise RefusedError(404, code, f"Resource group '{name}' could not be found")
        return found

    def _get_group(self, call: Call) -> Reply:
        found, name = self._group(call), call.found["group"]
        told = {"id": f"{_SUB}/resourceGroups/{name}", "name": name, **found}
        told.setdefault("properties", {"provisioningState": "Succeeded"})
        check("resources.ResourceGroup", told, request=False)
        return Reply(200, told)

    def _groups(self, call: Call) -> Reply:
        told = [{"name": name, **told} for name, told in self._world.groups.items()]
        return self._page(call, told)

    def _put_group(self, call: Call) -> Reply:
        name = call.found["group"].lower()
        found = self._world.groups.get(name)
        if found is not None and found["location"] != call.body["location"]:
            raise RefusedError(409, "InvalidResourceGroupLocation", "it is elsewhere")
        self._world.groups[name] = dict(call.body)
        told = self._get_group(call)
        return Reply(201 if found is None else 200, told.told)

    def _delete_group(self, call: Call) -> Reply:
        self._group(call)
        operation = self._world.remove_group(call.found["group"])
        return self._takes_long(call, 202, operation, None)

    def _resources(self, call: Call) -> Reply:
        self._group(call)
        group = call.found["group"].lower()
        found = [i for i in self._world.items.values() if i.group.lower() == group]
        told = [
            {"id": i.resource_id, "name": i.name, "type": i.kind, "location": "eastus"}
            for i in found
            if i.kind != GRANTS
        ]
        for each in told:
            check("resources.GenericResourceExpanded", each, request=False)
        return Reply(200, {"value": told})

    # --- resources of any type --------------------------------------------------------

    def _item(self, call: Call) -> Item:
        found = self._world.get(re.sub(_INNER, "", call.path))
        if found is None:
            self._group(call)
            name = call.found["name"]
            raise RefusedError(404, "ResourceNotFound", f"{name} was not found.")
        return found

    def _told(self, item: Item) -> dict[str, Any]:
        name = _MODELS.get(item.kind, "resources.GenericResource")
        check(name, item.told, request=False)
        return item.told

    def _get(self, call: Call) -> Reply:
        item = self._item(call)
        if inner := call.found["inner"]:
            named = {each["name"] for each in item.told["properties"]["subnets"]}
            if inner.rpartition("/")[2] not in named:
                raise RefusedError(404, "NotFound", "no such subnet")
            return Reply(200, {"id": f"{item.resource_id}{inner}", "properties": {}})
        told = self._told(item)
        if "$expand" in call.query:
            told = deepcopy(told)
            for each in told["properties"]["ipConfigurations"]:
                public = each["properties"].get("publicIPAddress")
                kept = self._world.get(public["id"]) if public else None
                if public and kept is not None:
                    public["properties"] = kept.told["properties"]
            check(_MODELS[item.kind], told, request=False)
        return Reply(200, told)

    def _list(self, call: Call) -> Reply:
        self._group(call)
        kind, group = call.found["kind"], call.found["group"]
        items = self._world.listed(group) if kind == VMS else list(self._world.of_kind(kind, group))
        return self._page(call, [self._told(item) for item in items])

    def _list_all(self, call: Call) -> Reply:
        told = [deepcopy(self._told(item)) for item in self._world.listed()]
        for each in told:  # ARM does so here
            each["id"] = re.sub(r"(?<=/resourceGroups/)[^/]+", lambda m: m[0].upper(), each["id"])
        return self._page(call, told)

    def _page(self, call: Call, told: list[Any]) -> Reply:
        start, size = int(call.query.get("$skiptoken", 0)), self._world.page
        page: dict[str, Any] = {"value": told[start : start + size]}
        if start + size < len(told):
            query = {**call.query, "$skiptoken": str(start + size)}
            page["nextLink"] = f"{call.base}{call.path}?{urlencode(query)}"
        return Reply(200, page)

    def _put(self, call: Call) -> Reply:
        group = self._group(call)
        if group.get("properties", {}).get("provisioningState") == "Deleting":
            code = "ResourceGroupBeingDeleted"
            raise RefusedError(409, code, "The group is in deprovisioning state")
        kind, name = call.found["kind"], call.found["name"]
        if kind == VMS:
            return self._put_vm(call)
        if kind == GRANTS:
            self._refuse_grant(call.body["properties"])
        before = self._world.get(call.path)
        told = deepcopy(call.body)
        if kind == NETWORKS:
            for each in told["properties"]["subnets"]:
                each["id"] = f"{call.path}/subnets/{each['name']}"
        if kind == IDENTITIES:
            kept = before.told["properties"] if before else {}
            told["properties"] = kept or {"principalId": str(uuid.uuid4())}
        if kind != GRANTS:
            told["properties"]["provisioningState"] = "Succeeded"
        item = self._world.put(kind, call.found["group"], name, told)
        return Reply(200 if before else 201, self._told(item))

    def _refuse_grant(self, told: dict[str, Any]) -> None:
        """Who may not grant, and what there is no role for, is refused (Azure RBAC,
        "Troubleshoot Azure RBAC").
        """
        if self._world.denied_grants:
            code = "AuthorizationFailed"
            raise RefusedError(403, code, "may not write roleAssignments")
        if told["roleDefinitionId"] not in self._world.roles:
            code = "RoleDefinitionDoesNotExist"
            raise RefusedError(400, code, "The specified role definition does not exist")

    def _get_role(self, call: Call) -> Reply:
        if call.path not in self._world.roles:
            code = "RoleDefinitionDoesNotExist"
            raise RefusedError(404, code, "The specified role definition does not exist")
        return Reply(200, self._world.roles[call.path])

    def _put_role(self, call: Call) -> Reply:
        """Names of roles are unique in a tenant ("Azure custom roles")."""
        world, told = self._world, call.body["properties"]
        if world.denied_grants or world.denied_roles:
            code = "AuthorizationFailed"
            raise RefusedError(403, code, "may not write roleDefinitions")
        for path, role in world.roles.items():
            if path != call.path and role["properties"]["roleName"] == told["roleName"]:
                code = "RoleDefinitionWithSameNameExists"
                raise RefusedError(409, code, f"{told['roleName']} exists")
        world.roles[call.path] = {
            "id": call.path,
            "name": call.path.rpartition("/")[2],
            "type": ROLES,
            "properties": dict(told),
        }
        return Reply(201, world.roles[call.path])

    def _query(self, call: Call) -> Reply:
        return azure_market.eviction_rates(self._world, call)

    def _put_vm(self, call: Call) -> Reply:
        if self._world.get(call.path) is not None:
            raise RefusedError(412, "PreconditionFailed", "it exists")
        group, name = call.found["group"], call.found["name"]
        operation = azure_vms.create(self._world, group, name, call.body)
        told = self._told(self._item(call))
        return self._takes_long(call, 201, operation, told)

    def _delete(self, call: Call) -> Reply:
        item = self._world.get(call.path)
        if item is None:
            self._group(call)
            return Reply(204)
        if item.kind == VMS:
            return self._takes_long(call, 202, self._world.end(item), None)
        self._refuse_in_use(item)
        operation = self._world.begin(0.01, lambda: self._world.remove(item))
        return self._takes_long(call, 202, operation, None)

    def _refuse_in_use(self, item: Item) -> None:
        """What something else still refers to cannot be deleted."""
        for other in self._world.items.values():
            inside = str(other.told.get("properties", "")).lower()
            if other is not item and item.resource_id.lower() in inside:
                code = f"In{item.kind.rpartition('/')[2]}UseCannotBeDeleted"
                raise RefusedError(400, code, f"{other.name} uses it")
