"""The fake refuses whatever Google, or this project's own rules, would not take."""

from __future__ import annotations

import base64
import copy
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
from tests.fakes.gcp import ATTACHED, KIND, ZONE, FakeGcp
from tests.fakes.gcp_schema import DriftError, check
from tests.unit.cloud.renting import rent


def recorded(fake_gcp: FakeGcp) -> list[dict[str, Any]]:
    """Return one request of each kind that the adapter makes."""
    fake_gcp.reset()
    kind = "n1-standard-8+nvidia-tesla-t4"
    fake_gcp.ask("stock", zone=ZONE, kind=kind, count=1)
    account = "vms@fake-project.iam.gserviceaccount.com"
    provider = fake_gcp.provider(instance_types=(ATTACHED,), zones=(ZONE,), service_account=account)
    (vm,) = rent(provider)
    provider.list_vms("job")
    provider.spot_pools(1)
    provider.quotas()
    provider.ssh_target(vm.vm_id)
    fake_gcp.provider(instance_types=(KIND,), zones=(ZONE,)).spot_pools(1)
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert fake_gcp.ask("drifts") == []
    kinds = {}
    for request in fake_gcp.ask("requests"):
        kinds[f"{request['operation']} {_paths(request['body'])}"] = request
    return list(kinds.values())


def _paths(body: Any) -> str:
    return json.dumps(body, sort_keys=True)[:400] if body else ""


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field in a body."""
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)  # type: ignore[assignment]
    for key, item in items:
        if isinstance(value, dict):
            yield (*path, key)
        yield from _places(item, (*path, key))


def _changed(body: Any, path: tuple[Any, ...], how: str) -> Any:
    made = copy.deepcopy(body)
    node = made
    for key in path[:-1]:
        node = node[key]
    value = node.pop(path[-1])
    if how == "misspelt":
        node[f"{path[-1]}x"] = value
    elif how == "mistyped":
        node[path[-1]] = "perhaps" if isinstance(value, (dict, list)) else {"in": value}
    return made


def spoilt(request: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (what was done, target, body), one field dropped, misspelt or mistyped."""
    target, body = request["target"], request["body"]
    for path in _places(body) if body else ():
        for how in ("dropped", "misspelt", "mistyped"):
            yield f"{path} {how}", target, _changed(body, path, how)
    split = urlsplit(target)
    query = dict(parse_qsl(split.query))
    for key, value in query.items():
        rest = {k: v for k, v in query.items() if k != key}
        for how, made in (
            ("dropped", rest),
            ("misspelt", {**rest, f"{key}x": value}),
            ("mistyped", {**rest, key: "perhaps"}),
        ):
            yield f"{key} {how}", f"{split.path}?{urlencode(made)}", body


def token() -> str:
    """Return what passes for a signed token."""
    now_s = time.time()
    claims = json.dumps({"iat": now_s, "exp": now_s + 600}).encode()
    return f"x.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.x"


@pytest.mark.nightly
def test_a_request_with_any_field_dropped_or_mistyped_is_refused(
    fake_gcp: FakeGcp,
) -> None:
    requests, signed = recorded(fake_gcp), token()
    assert len({request["operation"] for request in requests}) >= 24
    checked, wrong = 0, []
    for request in requests:
        method, name = request["method"], request["operation"]
        for done, target, body in spoilt(request):
            answer = fake_gcp.send(method, target, body, signed)
            told = answer.text if answer.status_code == 400 else "taken"
            if '"FakeDrift"' not in told and "filter" not in told:
                wrong.append(f"{name}: {done}: {told}")
            checked += 1
    assert wrong == []
    assert checked > 250
    fake_gcp.reset()


def test_an_unknown_value_of_an_enum_is_refused() -> None:
    from google.cloud import compute_v1  # takes seconds

    good = {"scheduling": {"provisioningModel": "SPOT"}}
    check(compute_v1.InstanceProperties, good, "x")
    for bad in (
        {"scheduling": {"provisioningModel": "BAZAAR"}},
        {"scheduling": {"provisioning_model": "SPOT"}},
        {"scheduling": None},
        {"labels": {"a": 1}},
    ):
        with pytest.raises(DriftError):
            check(compute_v1.InstanceProperties, bad, "x")


def test_a_reply_with_a_field_that_the_sdk_would_drop_is_caught() -> None:
    from google.cloud import compute_v1  # takes seconds

    good = {"items": {"zones/a": {"instances": [{"name": "x", "status": "RUNNING"}]}}}
    check(compute_v1.InstanceAggregatedList, good, "x")
    for planted in ({"colour": "red"}, {"status": "ASLEEP"}, {"id": "much"}):
        instances = [{"name": "x", **planted}]
        bad = {"items": {"zones/a": {"instances": instances}}}
        with pytest.raises(DriftError):
            check(compute_v1.InstanceAggregatedList, bad, "x")


def test_the_fake_rejects_unknown_credentials(fake_gcp: FakeGcp) -> None:
    target = "/compute/v1/projects/fake-project"
    assert fake_gcp.send("GET", target, None, "x").status_code == 401
    assert fake_gcp.send("GET", target, None, token()).status_code == 200
