"""``python -m tests.permissions``: writes the lists of docs/permissions.md.

Jobs are lived through on the fakes; what the SDKs then called, as the fakes saw it, is
what an account must allow, and the few things that are checked without being called.
Each list of the page follows a marker with its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.builders import a_launch
from tests.fakes import aws, azure, gcp

from spottrain.cloud.azure import checks, requests
from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import CloudProvider, LaunchRequest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "permissions.md"
_BLOCK = r"<!-- {name} -->\n\n```json\n(.*?)```"
Lists = dict[str, Any]

# --- lives --------------------------------------------------------------------------


def live(provider: Any, fake: Any, intent: str = "intent-3", *, evicts: bool = False) -> None:
    """Do once all that a job, ``gc`` and ``doctor`` may do.

    Args:
        provider: Of a cloud.
        fake: The cloud.
        intent: Of the launch.
        evicts: The cloud takes the VM back.
    """
    list(provider.check())
    request = _request(provider, intent)
    (vm,) = provider.launch(request).vms
    for job in ("other", "job") if provider.can(CloudProvider.move) else ():
        order = tags.ordered(f"to-{job}")
        vm = provider.move(vm.vm_id, "", job, order, vm.launched_at_s + 60.0)
    started = [each.vm_id for each in provider.list_vms("job")]
    provider.list_all()
    provider.ssh_target(vm.vm_id)
    provider.quotas()
    provider.spot_pools(1)
    provider.admit("job", ("203.0.113.9/32",))
    if evicts:
        fake.ask("evict", name=vm.vm_id.split(".")[1])
    provider.terminate(started)
    fake.ask("pass_time", seconds=600)
    provider.list_vms("job")
    provider.release("job")


def _request(provider: Any, intent: str) -> LaunchRequest:
    return a_launch(
        next(offer for offer in provider.offers() if offer.spot),
        token=f"uid-{intent}",
        intent=intent,
    )


# --- AWS ----------------------------------------------------------------------------

_SERVICES = {"GetServiceQuota": "servicequotas", "GetProducts": "pricing"}
_MADE = ("RunInstances", "ImportKeyPair", "CreateSecurityGroup")
_MADE_NETWORK = ("CreateVpc", "CreateSubnet", "CreateInternetGateway")
_OWN = re.compile("ec2:(Terminate|Delete|Authorize|Revoke|Modify|CreateTags)")
"""What a job does to its own things alone."""
PRICES = "pricing:GetProducts"
"""Called by ``spottrain prices``: tests/unit/pricing/test_price_apis.py."""


def aws_calls(fake: aws.FakeAws, **settings: Any) -> set[str]:
    """Return the actions of one life; ``sts:GetCallerIdentity`` needs no permission."""
    fake.reset()
    if settings.pop("no_subnets", False):
        fake.ask("remove_default_subnets", region=aws.REGION)
    fake.ask("score", zone_id="use1-az6", score=9)
    kinds = ("g5.xlarge", "g5.2xlarge", "g5.4xlarge")  # with fewer nothing is scored
    live(fake.provider(instance_types=kinds, **settings), fake)
    rows = fake.ask("requests")
    operations = {row["operation"] for row in rows} | set(fake.ask("json_calls"))
    return {f"{_SERVICES.get(name, 'ec2')}:{name}" for name in operations if name}


def aws_lists(fake: aws.FakeAws) -> Lists:
    """Return the lists of AWS."""
    usual = aws_calls(fake) | {PRICES}
    own = {action for action in usual if _OWN.match(action)}
    network = aws_calls(fake, no_subnets=True) - usual
    created = {"ec2:CreateAction": [*_MADE, *_MADE_NETWORK]}
    tagged = {"aws:ResourceTag/spottrain-job": "*"}
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            _statement(usual - own),
            _statement({"ec2:CreateTags"}, StringEquals=created),
            _statement(own, StringLike=tagged),
        ],
    }
    return {
        "aws: every job": policy,
        "aws: own network": sorted(network),
    }


def _statement(actions: set[str], **condition: Any) -> dict[str, Any]:
    told = {"Effect": "Allow", "Action": sorted(actions), "Resource": "*"}
    return told | ({"Condition": condition} if condition else {})


# --- Azure --------------------------------------------------------------------------

_VERBS = {"GET": "read", "PUT": "write", "DELETE": "delete", "POST": "action"}
_SCOPE = re.compile(r"/subscriptions/[^/]+(/resourceGroups/[^/]+)?", re.IGNORECASE)
IMPLIED = {
    "Microsoft.Compute/disks/write",
    "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
    "Microsoft.ManagedIdentity/userAssignedIdentities/delete",
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/networkSecurityGroups/join/action",
    "Microsoft.Network/publicIPAddresses/join/action",
    "Microsoft.Network/publicIPAddresses/read",
    "Microsoft.Network/publicIPAddresses/write",
    "Microsoft.Network/virtualNetworks/read",
    "Microsoft.Network/virtualNetworks/subnets/join/action",
    "Microsoft.ManagedIdentity/userAssignedIdentities/read",
}
"""Not called: Resource Manager checks them where a VM names a disk, card, address, subnet
or identity, where a long operation is waited for, and in a group that is deleted."""


def azure_calls(fake: azure.FakeAzure) -> set[str]:
    """Return the actions of lives in a group of one's own and in the user's."""
    fake.reset()
    subnet = fake.ask("users_own", group="theirs", region=azure.REGION)
    shared: dict[str, Any] = {"resource_group": "theirs", "self_delete": False}
    in_subnet = shared | {"subnets": {azure.REGION: subnet}}
    for number, settings in enumerate(({}, shared, in_subnet)):
        leaves_behind = number == 1  # so that ``release`` has something to delete
        fake.ask("moods", strays=leaves_behind)
        live(fake.provider(**settings), fake, f"intent-{number}", evicts=leaves_behind)
    return {a for request in fake.ask("requests") for a in _actions(request)}


def _actions(request: dict[str, Any]) -> Iterator[str]:
    """Yield what Azure asks permission for."""
    if request["operation"] == "GET operations":  # whoever starts it may ask about it
        return
    if request["operation"] == "POST resources":
        yield "Microsoft.ResourceGraph/resources/read"  # a query reads, though it is a POST
        return
    verb = _VERBS[request["method"]]
    rest = _SCOPE.sub("", request["path"])
    if not rest.startswith("/providers/"):
        inside = "/resources" if rest == "/resources" else ""
        yield f"Microsoft.Resources/subscriptions/resourceGroups{inside}/{verb}"
        return
    _, _, namespace, *words = rest.split("/")
    yield "/".join((namespace, *words[::2], verb))  # types and names take turns


def azure_lists() -> Lists:
    """Return the lists of Azure: those that ``doctor`` compares with the account's."""
    return {
        "azure: every job": list(checks.ACTIONS),
        "azure: own group": list(checks.OWN_GROUP_ACTIONS),
        "azure: named group": list(checks.NAMED_GROUP_ACTIONS),
        "azure: own network": list(checks.OWN_NETWORK_ACTIONS),
        "azure: self-deletion": list(checks.IDENTITY_ACTIONS),
        "azure: own identity": list(checks.OWN_IDENTITY_ACTIONS),
        "azure: role": list(checks.ROLE_ACTIONS),
        "azure: end times": list(checks.LOG_ACTIONS),
        "azure: market": list(checks.MARKET_ACTIONS),
        "azure: doctor": list(checks.OTHER_ACTIONS),
        "azure: role of VMs": list(requests.VM_ACTIONS),
    }


# --- GCP ----------------------------------------------------------------------------

_METHODS = {
    "aggregated_list": ("list",),
    "get_from_family": ("getFromFamily",),
    "insert": ("create",),
    "patch": ("update",),
    "wait": ("get",),
}
_WITH = {
    "firewalls.insert": ("networks.updatePolicy",),
    "firewalls.delete": ("networks.updatePolicy",),
    "firewalls.patch": ("networks.updatePolicy",),
    "instances.bulk_insert": (
        "disks.create",
        "instances.create",
        "instances.setLabels",
        "instances.setMetadata",
        "instances.setTags",
        "subnetworks.use",
        "subnetworks.useExternalIp",
    ),
}
"""What a call needs beside the permission of its own name (Compute Engine, "IAM
permissions" of each method)."""


def gcp_calls(fake: gcp.FakeGcp, **settings: Any) -> set[str]:
    """Return the permissions of one life."""
    fake.reset()
    fake.ask("users_own_network", region=gcp.REGION)
    for address in ("203.0.113.1/32", "203.0.113.2/32"):  # a laptop that moves
        provider = fake.provider(ssh_from=(address,), **settings)
        provider.launch(_request(provider, f"intent-{address[-4]}"))
    live(fake.provider(**settings), fake)
    found = set()
    for request in fake.ask("requests"):
        resource, _, method = request["operation"].partition(".")
        names = [] if method == "bulk_insert" else [f"{resource}.{method}"]
        for name in (*names, *_WITH.get(request["operation"], ())):
            found.add(_permission(name))
    return found


def _permission(name: str) -> str:
    resource, _, method = name.partition(".")
    (method,) = _METHODS.get(method, (method,))
    return f"compute.{_camel(resource)}.{_camel(method)}"


def _camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda found: found[1].upper(), name)


def gcp_lists(fake: gcp.FakeGcp) -> Lists:
    """Return the lists of GCP."""
    theirs = {"subnetworks": {gcp.REGION: "theirs"}, "network_tags": ("let-in",)}
    optional = {
        "compute.advice.capacity",
        "compute.advice.capacityHistory",
    }
    whole = gcp_calls(fake)
    job = gcp_calls(fake, network="theirs", **theirs)
    return {
        "gcp: every job": sorted(job - optional),
        "gcp: own network": sorted(whole - job),
        "gcp: optional": sorted(optional & whole),
    }


# --- the page -----------------------------------------------------------------------


def documented(page: str, name: str) -> Any:
    """Return a list of the page."""
    found = re.search(_BLOCK.format(name=re.escape(name)), page, re.DOTALL)
    assert found is not None, f"docs/permissions.md has no list {name!r}"
    return json.loads(found[1])


def written(page: str, lists: Lists) -> str:
    """Return the page with these lists in the places of theirs."""
    for name, told in lists.items():
        found = re.search(_BLOCK.format(name=re.escape(name)), page, re.DOTALL)
        assert found is not None, f"docs/permissions.md has no list {name!r}"
        block = f"<!-- {name} -->\n\n```json\n{json.dumps(told, indent=2)}\n```"
        page = page[: found.start()] + block + page[found.end() :]
    return page


def main() -> None:
    """Write the page."""
    lists = azure_lists()
    with aws.running() as on_aws:
        lists |= aws_lists(on_aws)
    with gcp.running() as on_gcp:
        lists |= gcp_lists(on_gcp)
    PAGE.write_text(written(PAGE.read_text(), lists))


if __name__ == "__main__":
    main()
