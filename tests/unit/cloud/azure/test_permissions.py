"""The actions of docs/permissions.md are those that the adapter checks, and enough."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fakes.azure import REGION, FakeAzure
from tests.unit.cloud.azure.renting import rent

from spottrain.cloud.azure import checks
from spottrain.cloud.azure.settings import AzureSettings

ROOT = Path(__file__).resolve().parents[4]
LISTS = (
    checks.ACTIONS,
    checks.OWN_GROUP_ACTIONS,
    checks.NAMED_GROUP_ACTIONS,
    checks.OWN_NETWORK_ACTIONS,
    checks.IDENTITY_ACTIONS,
    checks.OWN_IDENTITY_ACTIONS,
    checks.LOG_ACTIONS,
    checks.OTHER_ACTIONS,
)
VERBS = {"GET": "read", "PUT": "write", "DELETE": "delete", "POST": "action"}
_GROUP = re.compile(r"/subscriptions/[^/]+(/resourceGroups/[^/]+)?", re.IGNORECASE)


def documented() -> list[list[str]]:
    page = (ROOT / "docs" / "permissions.md").read_text()
    section = page.partition("\n## Azure\n")[2].partition("\n## ")[0]
    return [
        json.loads(text)
        for text in re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    ]


def actions_of(request: dict[str, Any]) -> Iterator[str]:
    """Yield what Azure asks permission for."""
    operation, path = request["operation"], request["path"]
    if operation == "GET operations":  # whoever may start it may ask about it
        return
    verb = VERBS[request["method"]]
    rest = _GROUP.sub("", path)
    if not rest.startswith("/providers/"):
        inside = "/resources" if rest == "/resources" else ""
        yield f"Microsoft.Resources/subscriptions/resourceGroups{inside}/{verb}"
        return
    _, _, namespace, *words = rest.split("/")
    # Types and names take turns.
    yield "/".join((namespace, *words[::2], verb))


def test_the_page_lists_what_the_code_checks() -> None:
    assert documented() == [list(actions) for actions in LISTS]


def test_all_that_is_asked_of_azure_is_on_the_lists(azure: FakeAzure) -> None:
    subnet = azure.ask("users_own", group="theirs", region=REGION)
    shared: dict[str, Any] = {"resource_group": "theirs", "self_delete": False}
    providers = (
        azure.provider(),
        azure.provider(**shared),
        azure.provider(**shared, subnets={REGION: subnet}),
    )
    for number, provider in enumerate(providers):
        (vm,) = rent(provider, intent=f"intent-{number}")
        provider.list_vms("job")
        provider.list_all()
        provider.check()
        provider.ssh_target(vm.vm_id)
        azure.ask("delays", evict_s=600)
        provider.interrupt(vm.vm_id)
        provider.terminate([vm.vm_id])
        provider.release("job")
    asked = {a for request in azure.ask("requests") for a in actions_of(request)}
    listed = {action for actions in LISTS for action in actions}
    assert {a.lower() for a in asked} <= {a.lower() for a in listed}
    assert len(asked) >= 20


def test_given_resources_need_fewer_permissions() -> None:
    whole = AzureSettings(instance_types=())
    named = AzureSettings(
        instance_types=(),
        resource_group="theirs",
        subnets={REGION: "/subnet"},
        identity="/identity",
    )
    assert "Microsoft.Authorization/roleAssignments/write" in checks.needed_actions(
        whole
    )
    due = checks.needed_actions(named)
    assert not any("roleAssignments" in action for action in due)
    assert not any(action.endswith("virtualNetworks/write") for action in due)
    assert checks.IDENTITY_ACTIONS[0] in due
