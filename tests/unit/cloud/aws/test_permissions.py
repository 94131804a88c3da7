"""The lists of docs/permissions.md are what the adapter needs: no less, and no more."""

from __future__ import annotations

import re

import pytest
from tests.fakes.aws import FakeAws
from tests.permissions import PAGE, aws_lists, documented, written


@pytest.mark.rotated
def test_the_page_lists_what_jobs_ask_for(aws: FakeAws) -> None:
    lists, page = aws_lists(aws), PAGE.read_text()
    assert {name: documented(page, name) for name in lists} == lists
    assert written(page, lists) == page, "run python -m tests.permissions"


def test_only_tagged_resources_may_be_changed() -> None:
    policy = documented(PAGE.read_text(), "aws: every job")
    conditions = [
        str(statement.get("Condition", ""))
        for statement in policy["Statement"]
        if any(re.search("Terminate|Delete|Authorize|Modify", a) for a in statement["Action"])
    ]
    assert conditions
    assert all("aws:ResourceTag/spottrain-job" in each for each in conditions)
