"""The role by which VMs delete themselves: it allows that, and nothing else."""

from __future__ import annotations

import pytest
from tests.fakes.azure import FakeAzure
from tests.unit.cloud.renting import rent

from spottrain.cloud.azure import requests
from spottrain.cloud.port.errors import AuthError, CloudError

MAKES, GRANTS = "PUT roleDefinitions", "PUT roleAssignments"


def asked(azure: FakeAzure, operation: str) -> int:
    return sum(r["operation"] == operation for r in azure.ask("requests"))


def test_the_role_names_two_actions_and_one_subscription() -> None:
    _, body = requests.role("s")
    (permission,) = body["properties"]["permissions"]
    assert [action.rpartition("/")[2] for action in permission["actions"]] == [
        "read",
        "delete",
    ]
    assert body["properties"]["assignableScopes"] == ["/subscriptions/s"]


def test_all_jobs_of_a_subscription_share_a_role_that_is_made_once(
    azure: FakeAzure,
) -> None:
    for job in ("one", "two"):
        rent(azure.provider(), job=job)
    assert (asked(azure, MAKES), asked(azure, GRANTS)) == (1, 2)
    assert azure.ask("drifts") == []


def test_who_may_make_no_roles_uses_the_one_that_is_there(azure: FakeAzure) -> None:
    azure.ask("moods", denied_roles=True)
    provider = azure.provider()
    (permissions,) = (f for f in provider.check() if f.what == "permissions")
    assert not permissions.ok
    assert "roleDefinitions/write" in permissions.message
    with pytest.raises(AuthError, match="self_delete: false"):
        rent(provider)
    azure.ask("moods", denied_roles=False)
    rent(azure.provider(), job="owners")
    azure.ask("moods", denied_roles=True)
    assert all(finding.ok for finding in provider.check())
    assert len(rent(provider)) == 1


def test_a_role_that_is_not_everywhere_yet_is_granted_later(azure: FakeAzure) -> None:
    azure.ask(
        "fail",
        operation=GRANTS,
        kind="error",
        code="RoleDefinitionDoesNotExist",
        status=400,
    )
    provider = azure.provider()
    with pytest.raises(CloudError) as refusal:
        rent(provider)
    assert type(refusal.value) is CloudError, "nobody has to do anything"
    assert len(rent(provider)) == 1
