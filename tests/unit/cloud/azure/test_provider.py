"""The adapter against the fake: faults, and lists that lag behind."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice

import pytest
from tests.fakes.azure import (
    CREDENTIALS,
    KIND,
    ZONE,
    FakeAzure,
)
from tests.unit.cloud.renting import alive, launch_request, offer_in, rent, sent

from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    MisconfiguredError,
    NoCapacityError,
    PriceTooHighError,
    ThrottledError,
)
from spottrain.cloud.port.provider import (
    VmState,
)
from spottrain.errors import causes


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"instance_types": ("Standard_X9",)}, "Standard_X9"),
        ({"image": "ubuntu"}, "publisher:offer:sku:version"),
        ({"public_addresses": False}, "azure.subnets"),
    ],
)
def test_invalid_settings_are_refused_without_a_request(
    azure: FakeAzure, settings: dict[str, object], told: str
) -> None:
    with pytest.raises(MisconfiguredError, match=told):
        azure.provider(**settings)
    assert sent(azure) == []


def test_no_vm_is_made_without_a_key(azure: FakeAzure) -> None:
    provider = azure.provider(public_key="")
    with pytest.raises(MisconfiguredError, match="public key"):
        rent(provider)


# --- when things go wrong -------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a while"])
def test_a_stock_out_is_no_capacity_and_leaves_no_vm(azure: FakeAzure, late: bool) -> None:
    azure.ask("moods", late=late)
    provider = azure.provider()
    asked = launch_request(offer_in(provider), 2)
    azure.ask("stock", zone=ZONE, instance_type=KIND, count=0)
    with pytest.raises(NoCapacityError):
        provider.launch(asked)
    assert provider.list_vms("job") == ()
    azure.ask("stock", zone=ZONE, instance_type=KIND, count=2)
    assert len(provider.launch(replace(asked, token="another")).vms) == 2


def test_undecided_vms_count_until_they_fail(azure: FakeAzure) -> None:
    azure.ask("moods", late=True)
    azure.ask("delays", create_s=30)
    provider = azure.provider(allocation_s=0.05)
    vms = rent(provider, 4)
    assert {vm.state for vm in vms} == {VmState.STARTING}
    azure.ask("pass_time", seconds=31)
    states = [vm.state for vm in provider.list_vms("job")]
    assert sorted(states) == [*[VmState.RUNNING] * 3, VmState.STOPPING]
    azure.ask("pass_time", seconds=1)
    assert len(provider.list_vms("job")) == 3  # what failed was cleared away


def test_a_spot_price_above_what_is_paid_is_refused(azure: FakeAzure) -> None:
    provider = azure.provider(max_usd_per_hour=0.1)
    with pytest.raises(PriceTooHighError):
        rent(provider)
    assert alive(azure) == 0


def test_without_credentials_it_says_what_to_do(
    azure: FakeAzure, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    provider = azure.provider(poll_s=0.03)  # clients of its own
    with pytest.raises(AuthError, match="az login"):
        provider.list_vms("job")


def test_a_missing_subscription_is_told(azure: FakeAzure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_SUBSCRIPTION_ID", raising=False)
    with pytest.raises(MisconfiguredError, match="AZURE_SUBSCRIPTION_ID"):
        azure.provider(subscription="").list_vms("job")


def test_an_answer_that_is_lost_while_waiting_keeps_the_vm(azure: FakeAzure) -> None:
    provider = azure.provider()
    asked = launch_request(offer_in(provider))
    rent(provider, intent="intent-0")
    azure.ask("fail", operation="GET operations", kind="drop")
    with pytest.raises(CloudError):
        provider.launch(asked)
    assert alive(azure) == 2
    provider.launch(asked)
    assert alive(azure) == len(azure.ask("bill")) == 2


def test_an_error_that_leaves_it_open_whether_a_vm_exists_is_not_its_own_cause(
    azure: FakeAzure,
) -> None:
    provider = azure.provider()
    asked = launch_request(offer_in(provider))
    throttled = {"kind": "error", "code": "TooManyRequests", "status": 429}
    azure.ask("fail", operation="GET virtualMachines", **throttled)
    with pytest.raises(ThrottledError) as told:
        provider.launch(asked)
    assert len(list(islice(causes(told.value), 99))) < 99, "whoever asks for all would hang"
    assert len(provider.launch(asked).vms) == alive(azure) == 1


# --- lists that lag behind ------------------------------------------------------------


def test_a_new_vm_is_listed_although_the_cloud_list_lags(azure: FakeAzure) -> None:
    azure.ask("lag", hide_s=600, linger_s=1200)
    provider = azure.provider()
    (vm,) = rent(provider)
    (listed,) = provider.list_vms("job")
    assert listed.vm_id == vm.vm_id
    assert azure.provider().list_vms("job") == ()
    azure.ask("pass_time", seconds=601)
    (listed,) = azure.provider().list_vms("job")
    assert listed.state is VmState.RUNNING
    assert listed.private_address.startswith("10.79.")
    provider.terminate([vm.vm_id])
    azure.ask("pass_time", seconds=600)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.STOPPING
    (misled,) = azure.provider().list_vms("job")
    assert misled.state is VmState.RUNNING
    azure.provider().terminate([misled.vm_id])  # gone long ago: no error
    azure.ask("pass_time", seconds=601)
    assert [vm.state for vm in provider.list_vms("job")] == [VmState.TERMINATED]


def test_an_eviction_before_the_first_list_is_seen(azure: FakeAzure) -> None:
    azure.ask("lag", hide_s=600, linger_s=0)
    provider = azure.provider()
    (vm,) = rent(provider)
    azure.ask("evict", name=vm.vm_id.split(".")[1])
    assert [vm.state for vm in provider.list_vms("job")] == [VmState.TERMINATED]


def test_long_lists_are_read_page_by_page(azure: FakeAzure) -> None:
    azure.ask("moods", page=2)
    provider = azure.provider()
    ids = {vm.vm_id for vm in rent(provider, 3)}
    assert {vm.vm_id for vm in provider.list_vms("job")} == ids


def test_orphans_of_any_job_are_found_by_the_names_that_end_them(
    azure: FakeAzure,
) -> None:
    one, two = azure.provider(), azure.provider()
    ids = {vm.vm_id for vm in (*rent(one), *rent(two, intent="i-2", job="other"))}
    forgetful = azure.provider()
    assert {vm.vm_id for vm in forgetful.list_all()} == ids
    assert {vm.job for vm in forgetful.list_all()} == {"job", "other"}
    forgetful.terminate([*ids, "vm-of-nobody", "x.y", ""])
    assert alive(azure) == 0


def test_times_are_the_clouds_own(azure: FakeAzure) -> None:
    azure.ask("skew", seconds=200)
    (vm,) = rent(azure.provider())
    (row,) = azure.ask("bill")
    assert vm.launched_at_s == pytest.approx(row["launched_at"], abs=0.1)
    assert vm.launched_at_s == pytest.approx(time.time() + 200, abs=20)
