"""The policy of docs/permissions.md is what the adapter needs: no less, and no more."""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any

from tests.fakes.aws import KIND, REGION, FakeAws
from tests.unit.cloud.aws.test_provider import launch_request, spot

from spottrain.cloud.aws.provider import AwsProvider
from spottrain.cloud.port.errors import CloudError

ROOT = Path(__file__).resolve().parents[4]
_ACTION = re.compile(r"^(ec2|servicequotas|pricing|fis):[A-Za-z]+$")
_SERVICES = {"GetServiceQuota": "servicequotas", "GetProducts": "pricing"}
NOT_CALLS = {"ec2:CreateTags", "fis:TagResource"}
"""Checked by AWS where something is made with tags; nobody calls them."""
OF_PRICES = {"pricing:GetProducts"}
"""Called by ``spottrain prices``: tests/unit/pricing/test_price_apis.py."""


def lists() -> list[set[str]]:
    """Return the actions of each block of the page's AWS part."""
    page = (ROOT / "docs" / "permissions.md").read_text()
    part = page[page.index("## AWS") : page.index("## Azure")]
    blocks = re.findall(r"```json\n(.*?)```", part, re.DOTALL)
    return [set(_actions(json.loads(block))) for block in blocks]


def _actions(data: Any) -> list[str]:
    if isinstance(data, str):
        return [data] if _ACTION.match(data) else []
    items = data.values() if isinstance(data, dict) else data
    return [action for item in items for action in _actions(item)]


def lived_through(aws: FakeAws, provider: AwsProvider) -> None:
    """Do once all that a job, gc and doctor may do."""
    list(provider.check())
    (vm,) = provider.launch(launch_request(spot(provider))).vms
    provider.list_vms("job")
    provider.list_all()
    provider.ssh_target(vm.vm_id)
    provider.quotas()
    provider.placement_scores(KIND, 1)
    provider.price_history(time.time() - 60)
    with contextlib.suppress(CloudError):  # without a role none can be simulated
        provider.interrupt(vm.vm_id)
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert aws.ask("left") == []


def called(aws: FakeAws) -> set[str]:
    rows = aws.ask("requests")
    # The fake names no call of STS: GetCallerIdentity needs no permission.
    operations = {row["operation"] for row in rows} | set(aws.ask("json_calls"))
    operations.discard("")
    return {f"{_service(one)}:{one}" for one in operations}


def _service(operation: str) -> str:
    experiment = "Experiment" in operation
    return "fis" if experiment else _SERVICES.get(operation, "ec2")


def test_a_job_in_a_usual_account_needs_the_first_list_whole(aws: FakeAws) -> None:
    first, *_ = lists()
    lived_through(aws, aws.provider())
    assert called(aws) == first - NOT_CALLS - OF_PRICES


def test_an_account_without_subnets_needs_the_second_list_too(aws: FakeAws) -> None:
    first, second, _ = lists()
    aws.ask("remove_default_subnets", region=REGION)
    lived_through(aws, aws.provider())
    assert called(aws) == (first | second) - NOT_CALLS - OF_PRICES


def test_simulated_interruptions_need_the_third_list_too(aws: FakeAws) -> None:
    first, _, third = lists()
    lived_through(aws, aws.provider(interruption_role="arn:aws:iam::1:role/fis"))
    assert called(aws) == (first | third) - NOT_CALLS - OF_PRICES


def test_only_tagged_resources_may_be_changed() -> None:
    page = (ROOT / "docs" / "permissions.md").read_text()
    policy = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    for statement in policy["Statement"]:
        destroys = {a for a in _actions(statement) if re.search("Terminate|Delete", a)}
        if destroys:
            assert "aws:ResourceTag/spottrain-job" in str(statement["Condition"])
