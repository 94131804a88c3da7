"""The lists of docs/permissions.md are what Google's SDK was asked for on the fake."""

from __future__ import annotations

import pytest
from tests.fakes.gcp import FakeGcp
from tests.permissions import PAGE, documented, gcp_lists, written


@pytest.mark.rotated
def test_the_page_lists_what_jobs_ask_for(gcp: FakeGcp) -> None:
    lists, page = gcp_lists(gcp), PAGE.read_text()
    assert {name: documented(page, name) for name in lists} == lists
    assert written(page, lists) == page, "run python -m tests.permissions"


def test_jobs_in_the_users_own_network_change_no_network() -> None:
    job = documented(PAGE.read_text(), "gcp: every job")
    changes = ("create", "delete", "update", "updatePolicy")
    assert not [
        action
        for action in job
        if action.split(".")[1] in ("firewalls", "networks", "subnetworks")
        and action.endswith(changes)
    ]
