"""The actions of docs/permissions.md are those that the adapter checks, and enough."""

from __future__ import annotations

from tests.fakes.azure import REGION, FakeAzure
from tests.permissions import (
    IMPLIED,
    PAGE,
    azure_calls,
    azure_lists,
    documented,
    written,
)

from spottrain.cloud.azure import checks
from spottrain.cloud.azure.settings import AzureSettings


def test_the_page_lists_what_doctor_checks() -> None:
    lists, page = azure_lists(), PAGE.read_text()
    assert {name: documented(page, name) for name in lists} == lists
    assert written(page, lists) == page, "run python -m tests.permissions"


def test_what_is_listed_is_asked_for_or_implied(azure: FakeAzure) -> None:
    asked = {action.lower() for action in azure_calls(azure)}
    listed = {
        action.lower()
        for name, actions in azure_lists().items()
        if name != "azure: role of VMs"  # theirs, not the account's
        for action in actions
    }
    assert asked <= listed
    assert listed - asked == {action.lower() for action in IMPLIED}


def test_given_resources_need_fewer_permissions() -> None:
    whole = AzureSettings(instance_types=())
    named = AzureSettings(
        instance_types=(),
        resource_group="theirs",
        subnets={REGION: "/subnet"},
        identity="/identity",
    )
    assert "Microsoft.Authorization/roleAssignments/write" in checks.needed_actions(whole)
    due = checks.needed_actions(named)
    assert not any("roleAssignments" in action for action in due)
    assert not any(action.endswith("virtualNetworks/write") for action in due)
    assert checks.IDENTITY_ACTIONS[0] in due
