"""Several clouds as one: what is asked of which, and what one that is down costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_launch
from tests.unit.cloud.toy_cloud import CountedCloud, ToyCloud

from spottrain.cloud import multi
from spottrain.cloud.multi import MultiCloudProvider, NamespacedProvider, split_vm_id
from spottrain.cloud.port.errors import CloudError, MisconfiguredError, VmNotFoundError
from spottrain.cloud.port.provider import (
    CloudProvider,
    FindsOrphans,
    ForwardsCalls,
    HasParts,
    LaunchRequest,
    Offer,
    ReachedBySsh,
    ReleasesJob,
    ReportsQuota,
    ReportsSpotPools,
    Vm,
)
from spottrain.errors import ConfigError, SpottrainError


def both(*clouds: ToyCloud) -> MultiCloudProvider:
    def opener(cloud: ToyCloud) -> Callable[[], CloudProvider]:
        return lambda: NamespacedProvider(cloud)

    return MultiCloudProvider({cloud.name: opener(cloud) for cloud in clouds})


def launch_request(offer: Offer, token: str = "token", count: int = 1) -> LaunchRequest:
    return a_launch(offer, count, token=token, intent=token, lease_s=60.0)


def offer_of(cloud: ToyCloud) -> Offer:
    return ToyCloud(cloud.name).offers()[0]


def abilities(one: object, known: set[Any]) -> set[Any]:
    return {ability for ability in known if isinstance(one, ability)}


@pytest.fixture
def aws() -> ToyCloud:
    return ToyCloud("aws")


@pytest.fixture
def gcp() -> CountedCloud:
    return CountedCloud("gcp")


def test_offers_are_combined_and_launches_go_to_the_offers_cloud(
    aws: ToyCloud, gcp: CountedCloud
) -> None:
    one = both(aws, gcp)
    assert {offer.cloud for offer in one.offers()} == {"aws", "gcp"}
    (vm,) = one.launch(launch_request(offer_of(gcp))).vms
    assert (vm.vm_id, vm.offer.cloud) == ("gcp.v.0", "gcp")
    assert aws.vms == {}
    assert one.list_vms("job") == (vm,)
    with pytest.raises(MisconfiguredError, match="azure: not a cloud of this job"):
        one.launch(launch_request(replace(offer_of(gcp), cloud="azure")))


def test_vm_ids_identify_their_cloud_also_after_a_restart(aws: ToyCloud, gcp: CountedCloud) -> None:
    first = both(aws, gcp)
    ours, theirs = (
        first.launch(launch_request(offer_of(cloud))).vms[0].vm_id for cloud in (aws, gcp)
    )
    assert (ours, theirs) == ("aws.v.0", "gcp.v.0")
    again: Any = both(aws, gcp)
    assert again.ssh_target(theirs).host == "v.0@gcp"
    again.terminate([ours, "vm-of-nobody", "azure.v.0"])
    assert [vm.vm_id for vm in again.list_vms("job") if vm.ended_at_s is None] == [theirs]
    for unknown in ("vm-of-nobody", "azure.v.0", "gcp.v.9"):
        with pytest.raises(VmNotFoundError):
            again.ssh_target(unknown)
    with pytest.raises(VmNotFoundError):
        again.parts()["aws"].opened().ssh_target("gcp.v.0")


def test_it_has_the_abilities_of_its_clouds_and_no_others(aws: ToyCloud, gcp: CountedCloud) -> None:
    one: Any = both(aws, gcp)
    shared: set[Any] = {
        ForwardsCalls,
        FindsOrphans,
        HasParts,
        ReachedBySsh,
        ReleasesJob,
    }
    every = {*shared, CloudProvider, ReportsSpotPools, ReportsQuota}
    assert abilities(one, every) == {*shared, CloudProvider, ReportsQuota}
    assert abilities(both(aws), every) == {*shared, CloudProvider}
    assert [quota.family for quota in one.quotas()] == ["f"]
    one.launch(launch_request(offer_of(aws)))
    assert [vm.vm_id for vm in one.list_all()] == ["aws.v.0"]
    one.release("job")
    assert (aws.released, gcp.released) == (["job"], ["job"])
    one.close()
    assert aws.closed
    assert gcp.closed
    with pytest.raises(CloudError, match="closed"):
        one.offers()


def test_a_missing_ability_of_one_cloud_is_reported(aws: ToyCloud) -> None:
    class Reached(ToyCloud):
        def start_agent(self, vm_id: str, bootstrap: object) -> tuple[()]:
            """Do nothing."""
            return ()

    one: Any = both(aws, Reached("gcp"))
    one.launch(launch_request(offer_of(aws)))
    with pytest.raises(CloudError, match="aws: cannot start agent"):
        one.start_agent("aws.v.0", None)


def test_a_cloud_that_is_down_does_not_stop_the_others(aws: ToyCloud, gcp: CountedCloud) -> None:
    one: Any = both(aws, gcp)
    for cloud in (aws, gcp):
        one.launch(launch_request(offer_of(cloud), cloud.name))
    aws.down = True
    assert {offer.cloud for offer in one.offers()} == {"gcp"}
    assert len(one.launch(launch_request(offer_of(gcp), "more")).vms) == 1
    assert len(one.list_all()) == 2
    with pytest.raises(CloudError, match=r"^aws: "):
        one.terminate(["aws.v.0", "gcp.v.0"])
    assert gcp.vms["v.0"].ended_at_s is not None
    with pytest.raises(CloudError, match=r"^aws: "):
        one.release("job")
    assert gcp.released == ["job"]
    gcp.down = True
    with pytest.raises(CloudError):
        one.offers()


def test_vms_of_a_cloud_that_does_not_answer_are_not_taken_for_ended(
    aws: ToyCloud, gcp: CountedCloud
) -> None:
    one = both(aws, gcp)
    one.launch(launch_request(offer_of(aws)))
    aws.down = True
    with pytest.raises(CloudError, match=r"^aws: "):
        one.list_vms("job")
    parts = one.parts()
    assert parts["gcp"].list_vms("job") == ()
    with pytest.raises(CloudError, match=r"^aws: "):
        parts["aws"].list_vms("job")


def test_opening_a_cloud_is_retried(aws: ToyCloud, gcp: CountedCloud) -> None:
    trouble: list[SpottrainError] = [ConfigError("gcp.project: no such project")]

    def opener() -> CloudProvider:
        if trouble:
            raise trouble[0]
        return gcp

    one = MultiCloudProvider({"aws": lambda: NamespacedProvider(aws), "gcp": opener})
    assert {offer.cloud for offer in one.offers()} == {"aws"}
    with pytest.raises(CloudError, match=r"gcp: gcp\.project: no such project"):
        one.list_vms("job")
    one.serve("https://manager")
    trouble.clear()
    with pytest.raises(CloudError):
        one.launch(launch_request(offer_of(gcp)))  # not every time: opening takes seconds
    one._parts["gcp"]._again_at_s = 0.0
    assert one.unreachable_vms() == ()
    one.launch(launch_request(offer_of(gcp)))
    assert gcp.serving == "https://manager"
    assert one.unreachable_vms() == ("gcp.v.1",)
    one.close()


def test_a_cloud_that_was_never_used_need_not_be_opened_to_be_empty(
    aws: ToyCloud,
) -> None:
    def opener() -> CloudProvider:
        raise CloudError("no credentials")

    openers: dict[str, multi.Opener] = {
        "aws": lambda: NamespacedProvider(aws),
        "gcp": opener,
    }
    one: Any = MultiCloudProvider(openers, unused={"gcp"})
    assert one.list_vms("job") == ()
    assert one.parts()["gcp"].list_vms("job") == ()
    one.release("job")
    assert aws.released == ["job"]
    with pytest.raises(CloudError, match=r"^gcp: "):
        one.parts()["gcp"].offers()
    used: Any = MultiCloudProvider(openers)
    for call in (used.list_vms, used.release):
        with pytest.raises(CloudError, match="no credentials"):
            call("job")


def test_if_no_cloud_can_be_opened_the_first_error_is_raised() -> None:
    def opener() -> CloudProvider:
        raise ConfigError("no project")

    with pytest.raises(ConfigError, match="no project"):
        MultiCloudProvider({"aws": opener, "gcp": opener})


ACTIONS = st.one_of(
    st.tuples(
        st.just("launch"),
        st.sampled_from(["aws", "gcp"]),
        st.integers(0, 3),
        st.integers(1, 4),
    ),
    st.tuples(
        st.just("terminate"),
        st.lists(st.sampled_from(["aws.v.0", "aws.v.1", "gcp.v.0", "gcp.v.2", "v.0"])),
    ),
    st.tuples(st.just("list")),
    st.tuples(st.just("down"), st.sampled_from(["aws", "gcp"]), st.booleans()),
)


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except CloudError as error:
        return str(error)


def named(cloud: str, vm: Vm) -> Vm:
    return replace(vm, vm_id=f"{cloud}.{vm.vm_id}")


@given(st.lists(ACTIONS, max_size=12))
def test_calls_to_the_whole_do_what_calls_to_the_parts_do(
    actions: list[tuple[Any, ...]],
) -> None:
    inside = {name: ToyCloud(name) for name in ("aws", "gcp")}
    alone = {name: ToyCloud(name) for name in ("aws", "gcp")}
    one = both(*inside.values())
    for action in actions:
        match action:
            case ("launch", name, token, count):
                request = launch_request(offer_of(alone[name]), f"{name}-{token}", count)
                got = outcome(one.launch, request)
                expected = outcome(alone[name].launch, request)
                if not isinstance(expected, str):
                    vms = tuple(named(name, vm) for vm in expected.vms)
                    expected = replace(expected, vms=vms)
                assert got == expected
            case ("terminate", ids):
                got = outcome(one.terminate, ids)
                answers = []
                for name, cloud in alone.items():
                    own = [split_vm_id(i)[1] for i in ids if split_vm_id(i)[0] == name]
                    if own:
                        answers.append(outcome(cloud.terminate, own))
                assert got == next(filter(None, answers), None)
            case ("list",):
                got = outcome(one.list_vms, "job")
                if any(cloud.down for cloud in alone.values()):
                    assert isinstance(got, str)
                else:
                    assert got == tuple(
                        named(name, vm)
                        for name, cloud in alone.items()
                        for vm in cloud.list_vms("job")
                    )
            case ("down", name, down):
                inside[name].down = alone[name].down = down
    assert {n: c.vms for n, c in inside.items()} == {n: c.vms for n, c in alone.items()}


@given(st.sampled_from(["aws", "azure", "gcp"]), st.text(min_size=1))
def test_an_id_splits_into_its_cloud_and_the_id_there(cloud: str, own: str) -> None:
    assert split_vm_id(f"{cloud}.{own}") == (cloud, own)
    assert split_vm_id("v0") == ("", "v0")
