"""The fake refuses whatever AWS, or this project's own rules, would not take."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qsl, urlencode

import pytest
from tests.fakes.aws import FakeAws
from tests.fakes.aws_model import (
    DriftError,
    check_json,
    check_reply,
    is_checked,
    read_form,
)
from tests.unit.cloud.renting import rent


def recorded(fake_aws: FakeAws) -> dict[str, str]:
    """Return one request of each kind that the adapter makes."""
    fake_aws.reset()
    fake_aws.ask("remove_default_subnets", region="us-east-1")
    provider = fake_aws.provider()
    (vm,) = rent(provider)
    provider.list_vms("job")
    fake_aws.provider(instance_types=("g5.xlarge", "g5.2xlarge", "g5.4xlarge")).spot_pools(1)
    provider.ssh_target(vm.vm_id)
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert fake_aws.ask("drifts") == []
    return {
        f"{r['operation']} {sorted(k for k, _ in parse_qsl(r['body']))}": r["body"]
        for r in fake_aws.ask("requests")
    }


def spoilt(body: str) -> Iterator[tuple[str, str]]:
    """Yield (what was done, body) with one field dropped, misspelt or mistyped."""
    form = dict(parse_qsl(body, keep_blank_values=True))
    for key, value in form.items():
        rest = {k: v for k, v in form.items() if k != key}
        yield f"without {key}", urlencode(rest)
        yield f"{key} misspelt", urlencode({**rest, f"{key}x": value})
        yield f"{key} as a structure", urlencode({**rest, f"{key}.Inner": value})
        if key in ("Action", "Version") or is_checked(form["Action"], key):
            yield f"{key} mistyped", urlencode({**rest, key: "perhaps"})


@pytest.mark.nightly
def test_a_request_with_any_field_dropped_or_mistyped_is_refused(
    fake_aws: FakeAws,
) -> None:
    requests = recorded(fake_aws)
    operations = {name.partition(" ")[0] for name in requests}
    assert len(operations) >= 20
    checked = 0
    for name, body in requests.items():
        for done, sent in spoilt(body):
            answer = fake_aws.send(sent)
            assert answer.status_code == 400, f"{name}: taken {done}"
            assert "FakeDrift" in answer.text, f"{name}: {done}: {answer.text}"
            checked += 1
    assert checked > 500
    fake_aws.reset()


def test_a_field_that_came_twice_or_an_unknown_enum_is_refused() -> None:
    version = "Action=TerminateInstances&Version=2016-11-15"
    with pytest.raises(DriftError, match="twice"):
        read_form(f"{version}&InstanceId.1=i-1&InstanceId.1=i-2")
    with pytest.raises(DriftError, match="numbered"):
        read_form(f"{version}&InstanceId.2=i-1")
    with pytest.raises(DriftError, match="MarketType"):
        read_form(
            "Action=RunInstances&Version=2016-11-15&MinCount=1&MaxCount=1"
            "&InstanceMarketOptions.MarketType=bazaar"
        )


def test_a_reply_with_a_field_that_botocore_would_drop_is_caught() -> None:
    good = b"<R><requestId>x</requestId><return>true</return></R>"
    check_reply("DeleteVpc", good)
    instances = b"<R><instancesSet><item><instanceId>i-1</instanceId>%b</item></instancesSet></R>"
    check_reply("TerminateInstances", instances % b"")
    for planted in (
        b"<colour>red</colour>",
        b"<currentState><code>much</code></currentState>",
        b"<currentState><name>asleep</name></currentState>",
    ):
        with pytest.raises(DriftError):
            check_reply("TerminateInstances", instances % planted)


def test_the_json_services_are_checked_as_well() -> None:
    good = {"ServiceCode": "ec2", "QuotaCode": "L-3819A6DF"}
    check_json("service-quotas", "GetServiceQuota", good)
    for bad in ({**good, "Colour": "red"}, {"ServiceCode": 1, "QuotaCode": "L-1"}):
        with pytest.raises(DriftError):
            check_json("service-quotas", "GetServiceQuota", bad)
