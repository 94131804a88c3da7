"""Several clouds as one: what is asked of which, and what one that is down costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_launch
from tests.unit.cloud.toy_cloud import CountedCloud, ToyCloud

from spottrain.cloud import multi
from spottrain.cloud.multi import MultiCloudProvider, open_clouds
from spottrain.cloud.port.errors import CloudError, MisconfiguredError, VmNotFoundError
from spottrain.cloud.port.provider import (
    AgentBootstrap,
    CloudProvider,
    LaunchRequest,
    Offer,
    cloud_of,
)
from spottrain.errors import ConfigError, SpottrainError

BOOTSTRAP = AgentBootstrap(manager_url="https://manager", ca_pem="", token="t")


def both(*clouds: ToyCloud) -> MultiCloudProvider:
    def opener(cloud: ToyCloud) -> Callable[[], CloudProvider]:
        return lambda: cloud

    return open_clouds({cloud.name: opener(cloud) for cloud in clouds})


def launch_request(offer: Offer, token: str = "token", count: int = 1) -> LaunchRequest:
    return a_launch(offer, count, token=token, intent=token, lease_s=60.0)


def offer_of(cloud: ToyCloud) -> Offer:
    return ToyCloud(cloud.name).offers()[0]


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
    again = both(aws, gcp)
    assert again.start_agent(theirs, BOOTSTRAP) == ()
    again.terminate([ours, "vm-of-nobody", "azure.v.0"])
    assert [vm.vm_id for vm in again.list_vms("job") if vm.ended_at_s is None] == [theirs]
    for unknown in ("vm-of-nobody", "azure.v.0", "gcp.v.9"):
        with pytest.raises(VmNotFoundError):
            again.start_agent(unknown, BOOTSTRAP)
    with pytest.raises(VmNotFoundError):
        again.parts()["aws"].start_agent("gcp.v.0", BOOTSTRAP)


def test_what_all_are_asked_is_what_each_says(aws: ToyCloud, gcp: CountedCloud) -> None:
    one = both(aws, gcp)
    assert [quota.family for quota in one.quotas()] == ["f"]
    assert [pool.cloud for pool in one.spot_pools(1)] == ["gcp"]
    assert one.time_s() == 7.0
    parts = one.parts()
    assert (parts["aws"].quotas(), parts["aws"].time_s()) == ((), None)
    assert parts["gcp"].quotas() == one.quotas()
    assert [offer.cloud for offer in parts["gcp"].offers()] == ["gcp"]
    one.release("job")
    assert (aws.released, gcp.released) == (["job"], ["job"])
    one.close()
    assert aws.closed
    assert gcp.closed
    with pytest.raises(CloudError, match="closed"):
        one.offers()


def test_vms_of_several_clouds_stay_with_their_job(aws: ToyCloud, gcp: CountedCloud) -> None:
    one = both(aws, gcp)
    assert not one.can(CloudProvider.clear)
    with pytest.raises(VmNotFoundError, match=r"aws\+gcp gives no VMs to other jobs"):
        one.take("aws.v.0", Path("giver"), "order", 1.0)


def test_a_missing_ability_of_one_cloud_is_reported(aws: ToyCloud) -> None:
    class Bare(ToyCloud):
        start_agent = CloudProvider.start_agent

    one = both(aws, Bare("gcp"))
    with pytest.raises(CloudError, match="gcp cannot start agents"):
        one.start_agent("gcp.v.0", BOOTSTRAP)


def test_a_cloud_that_is_down_does_not_stop_the_others(aws: ToyCloud, gcp: CountedCloud) -> None:
    one = both(aws, gcp)
    for cloud in (aws, gcp):
        one.launch(launch_request(offer_of(cloud), cloud.name))
    aws.down = True
    assert {offer.cloud for offer in one.offers()} == {"gcp"}
    assert len(one.launch(launch_request(offer_of(gcp), "more")).vms) == 1
    assert len(one.quotas()) == 1
    with pytest.raises(CloudError, match=r"^aws: "):
        one.terminate(["aws.v.0", "gcp.v.0"])
    assert gcp.vms["gcp.v.0"].ended_at_s is not None
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

    one = open_clouds({"aws": lambda: aws, "gcp": opener})
    assert {offer.cloud for offer in one.offers()} == {"aws"}
    with pytest.raises(CloudError, match=r"gcp: gcp\.project: no such project"):
        one.list_vms("job")
    one.serve("https://manager")
    trouble.clear()
    with pytest.raises(CloudError):
        one.launch(launch_request(offer_of(gcp)))  # not every time: opening takes seconds
    one._clouds["gcp"]._again_at_s = 0.0
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
        "aws": lambda: aws,
        "gcp": opener,
    }
    one: Any = open_clouds(openers, unused={"gcp"})
    assert one.list_vms("job") == ()
    assert one.parts()["gcp"].list_vms("job") == ()
    one.release("job")
    assert aws.released == ["job"]
    with pytest.raises(CloudError, match=r"^gcp: "):
        one.parts()["gcp"].offers()
    used: Any = open_clouds(openers)
    for call in (used.list_vms, used.release):
        with pytest.raises(CloudError, match="no credentials"):
            call("job")


def test_if_no_cloud_can_be_opened_the_first_error_is_raised() -> None:
    def opener() -> CloudProvider:
        raise ConfigError("no project")

    with pytest.raises(ConfigError, match="no project"):
        open_clouds({"aws": opener, "gcp": opener})


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
                assert got == outcome(alone[name].launch, request)
            case ("terminate", ids):
                got = outcome(one.terminate, ids)
                answers = []
                for name, cloud in alone.items():
                    own = [vm_id for vm_id in ids if cloud_of(vm_id) == name]
                    if own:
                        answers.append(outcome(cloud.terminate, own))
                assert got == next(filter(None, answers), None)
            case ("list",):
                got = outcome(one.list_vms, "job")
                if any(cloud.down for cloud in alone.values()):
                    assert isinstance(got, str)
                else:
                    assert got == tuple(
                        vm for cloud in alone.values() for vm in cloud.list_vms("job")
                    )
            case ("down", name, down):
                inside[name].down = alone[name].down = down
    assert {n: c.vms for n, c in inside.items()} == {n: c.vms for n, c in alone.items()}
