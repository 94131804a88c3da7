"""The fake refuses whatever Azure, or this project's own rules, would not take."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.azure import KIND, REGION, FakeAzure
from tests.fakes.azure_arm import Arm
from tests.fakes.azure_http import Call
from tests.fakes.azure_model import DriftError, check
from tests.fakes.azure_world import World
from tests.unit.cloud.renting import rent

MISTYPED: tuple[Any, ...] = (7, "perhaps", ["perhaps"], {"perhaps": 1})


@pytest.fixture(scope="module")
def recorded(fake_azure: FakeAzure) -> list[dict[str, Any]]:
    """One request of each kind that the adapter makes."""
    fake = fake_azure
    fake.reset()
    fake.ask("moods", strays=True)
    fake.ask("users_own", group="theirs", region=REGION)
    provider = fake.provider()
    shared = fake.provider(resource_group="theirs", self_delete=False)
    for each in (provider, shared):
        (vm,) = rent(each, intent=f"in-{each is shared}")
        each.list_vms("job")
        each.quotas()
        each.check()
        each.ssh_target(vm.vm_id)
        each.terminate([vm.vm_id])
        each.release("job")
    assert fake.ask("drifts") == []
    seen: dict[str, dict[str, Any]] = {}
    for request in fake.ask("requests"):
        seen.setdefault(f"{request['operation']} {sorted(request['query'])}", request)
    return list(seen.values())


def spoilt(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (what was done, copy) with one field dropped, misspelt or mistyped."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            for done, inner in spoilt(item):
                yield (
                    f"[{number}]{done}",
                    [*value[:number], inner, *value[number + 1 :]],
                )
        return
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        rest = {k: v for k, v in value.items() if k != key}
        yield f" without {key}", rest
        if not key.startswith("/"):  # else it is no field but names something
            yield f" {key} misspelt", {**rest, f"{key}x": item}
        for wrong in MISTYPED:
            if not isinstance(wrong, type(item)):
                yield f" {key}={wrong}", {**rest, key: wrong}
        for done, inner in spoilt(item):
            yield f" {key}{done}", {**rest, key: inner}


def attempts(request: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], Any, str]]:
    """Yield (what was done, query, body, If-None-Match) that must be refused."""
    query, body, condition = request["query"], request["body"], request["if_none_match"]
    for key in query:
        rest = {k: v for k, v in query.items() if k != key}
        yield f"without {key}", rest, body, condition
        yield f"{key} misspelt", {**rest, f"{key}x": query[key]}, body, condition
        yield f"{key} mistyped", {**rest, key: "perhaps"}, body, condition
    yield "one parameter more", {**query, "x": "1"}, body, condition
    if body is not None:
        for done, wrong in spoilt(body):
            yield f"body{done}", query, wrong, condition
        for wrong in MISTYPED[:3]:
            yield f"body={wrong}", query, wrong, condition
        yield "no body", query, None, condition
        yield "another condition", query, body, "" if condition else "*"
    else:
        yield "a body", query, {"x": 1}, condition


@pytest.mark.nightly
def test_a_request_with_any_field_dropped_or_mistyped_is_refused(
    recorded: list[dict[str, Any]],
) -> None:
    world = World()
    assert len(recorded) >= 20
    world.offer(REGION, KIND, [0.1, 0.2], vcpus=4, family="x")
    arm, checked = Arm(world), 0  # the same code, without the network between
    for request in recorded:
        for done, query, body, condition in attempts(request):
            headers = {"authorization": "Bearer fake"}
            if condition:
                headers["if-none-match"] = condition
            call = Call(request["method"], request["path"], query, headers, body, "")
            reply = arm.answer(call)
            what = f"{request['operation']}: {done}"
            assert reply is not None
            assert reply.status == 400, f"taken: {what}: {reply}"
            assert reply.told["error"]["code"] == "FakeDrift", f"{what}: {reply}"
            checked += 1
    assert checked > 700


def test_an_unknown_path_or_method_is_refused(
    fake_azure: FakeAzure,
) -> None:
    fake_azure.reset()
    query = {"api-version": "2026-04-01"}
    for method, path in (("GET", "/subscriptions/1/x"), ("DELETE", "/subscriptions")):
        answer = fake_azure.send(method, path, query, None)
        assert "FakeDrift" in answer.text
    assert fake_azure.send("GET", "/", query, None, Authorization="").status_code == 401
    fake_azure.reset()


GOOD: dict[str, Any] = {
    "location": "eastus",
    "zones": ["1"],
    "tags": {"a": "b"},
    "properties": {
        "priority": "Spot",
        "hardwareProfile": {"vmSize": "Standard_of_next_year"},
        "billingProfile": {"maxPrice": -1},
        "timeCreated": "2026-11-20T07:00:00Z",
    },
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zones", "1"),
        ("colour", "red"),
        ("tags.a", 1),
        ("properties.priority", "Spott"),
        ("properties.evictPolicy", "Delete"),
        ("properties.billingProfile.maxPrice", "1"),
        ("properties.timeCreated", "yesterday"),
        ("properties.timeCreated", "2026-11-20T07:00:00"),
        ("properties.instanceView", {"statuses": [{"kode": 1}]}),
    ],
)
def test_a_reply_that_the_sdk_would_swallow_is_caught(path: str, value: Any) -> None:
    check("compute.VirtualMachine", GOOD, request=False)
    planted = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    inner = planted
    for name in way:
        inner = inner[name]
    inner[last] = value
    with pytest.raises(DriftError, match=last):
        check("compute.VirtualMachine", planted, request=False)


def test_what_only_azure_may_set_is_refused_in_a_request() -> None:
    with pytest.raises(DriftError, match="cannot be set"):
        check("compute.VirtualMachine", GOOD, request=True)
    with pytest.raises(DriftError, match=r"currentValue: missing"):
        check("compute.Usage", {"limit": 1}, request=False)


def test_custom_data_that_cloud_init_would_not_read_is_refused(
    fake_azure: FakeAzure, recorded: list[dict[str, Any]]
) -> None:
    made = [r for r in recorded if r["operation"] == "PUT virtualMachines"]
    for text in ("#!/bin/sh\n{}", "#cloud-config\n[", "#cloud-config\n{}"):
        body = copy.deepcopy(made[0]["body"])
        data = base64.b64encode(text.encode()).decode()
        body["properties"]["osProfile"]["customData"] = data
        answer = fake_azure.send(
            "PUT", made[0]["path"], made[0]["query"], body, **{"If-None-Match": "*"}
        )
        assert "customData" in json.loads(answer.text)["error"]["message"]
    fake_azure.reset()
