"""What ``gc`` returns, and what it says of what it could not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.builders import a_launch
from tests.fakes.aws import KIND as AWS_KIND
from tests.fakes.aws import FakeAws
from tests.fakes.aws import running as aws_running
from tests.fakes.gcp import KIND, PROJECT, ZONE, FakeGcp
from tests.fakes.gcp import running as gcp_running
from tests.unit.varuna_manager.stored_jobs import submit

from spottrain.cloud.aws.provider import AwsProvider
from spottrain.cloud.gcp.provider import GcpProvider
from spottrain.cloud.port.provider import VmState
from spottrain.varuna_manager.cli.gc import Scope, _chosen_clouds, sweep
from spottrain.varuna_manager.config.clouds import AwsConfig, GcpConfig
from spottrain.varuna_manager.jobs.follow import uid_of

LOST = Scope(jobs=("lost",))


@pytest.fixture
def gcp() -> Iterator[FakeGcp]:
    with gcp_running() as fake:
        fake.reset()
        yield fake


@pytest.fixture
def aws() -> Iterator[FakeAws]:
    with aws_running() as fake:
        fake.reset()
        yield fake


def rent(provider: AwsProvider | GcpProvider, token: str = "t", job: str = "lost") -> str:
    offer = next(offer for offer in provider.offers() if offer.spot)
    request = a_launch(offer, token=token, job=job, intent="intent-0", lease_s=60)
    (vm,) = provider.launch(request).vms
    return vm.vm_id


@pytest.mark.rotated
def test_a_vm_that_switched_itself_off_is_returned_with_its_disk(gcp: FakeGcp) -> None:
    vm_id = rent(gcp.provider())
    gcp.ask("switch_off", zone=ZONE, name=vm_id.split(".")[1])
    config = GcpConfig(instance_types=(KIND,), project=PROJECT, endpoint=gcp.url)
    (vm,), left = sweep(config, LOST, yes=True)
    assert (vm.vm_id, vm.state, left) == (vm_id, VmState.STOPPING, [])
    assert gcp.ask("left") == []


def test_what_vms_shared_is_removed_though_lists_still_have_them(aws: FakeAws) -> None:
    vm_id = rent(aws.provider())
    aws.ask("lag", hide_s=0, linger_s=15)
    config = AwsConfig(instance_types=(AWS_KIND,), endpoint_url=aws.url)
    (vm,), failed = sweep(config, LOST, yes=True)
    assert (vm.vm_id, failed) == (vm_id, [])
    assert aws.ask("left") == []


@pytest.mark.rotated
def test_vms_that_were_returned_are_shown_though_something_else_is_left(
    aws: FakeAws,
) -> None:
    vm_id = rent(aws.provider())
    aws.ask("deny", operation="DeleteSecurityGroup")
    config = AwsConfig(instance_types=(AWS_KIND,), endpoint_url=aws.url)
    (vm,), (told,) = sweep(config, LOST, yes=True)
    assert vm.vm_id == vm_id
    assert "lost" in told
    assert all(each.vm_id != vm_id for each in sweep(config, LOST, yes=False)[0])


@pytest.mark.rotated
def test_a_colleagues_vms_are_neither_shown_nor_returned_unless_asked_for(
    gcp: FakeGcp,
) -> None:
    ann = rent(gcp.provider(owner="ann", uid="a" * 32), "ann")
    ben = rent(gcp.provider(owner="ben", uid="b" * 32), "ben")
    config = GcpConfig(instance_types=(KIND,), project=PROJECT, endpoint=gcp.url, owner="ben")
    everybodys = Scope(jobs=("lost",), all_owners=True)
    assert {vm.vm_id for vm in sweep(config, everybodys, yes=False)[0]} == {ann, ben}
    for scope, whose in ((LOST, ben), (everybodys, ann)):
        (vm,), failed = sweep(config, scope, yes=True)
        assert (vm.vm_id, failed) == (whose, [])
    assert gcp.ask("left") == []


@pytest.mark.rotated
def test_a_job_that_may_be_managed_elsewhere_is_left_alone_where_nobody_is_asked(
    gcp: FakeGcp, tmp_path: Path
) -> None:
    job = submit(tmp_path, f"file://{tmp_path}/store")
    config = GcpConfig(instance_types=(KIND,), project=PROJECT, endpoint=gcp.url)
    here = rent(gcp.provider(uid=uid_of(job)), "here", job.path.name)
    rent(gcp.provider(uid="c" * 32), "there", job.path.name)
    rent(gcp.provider(uid="d" * 32), "unknown")
    assert len(sweep(config, Scope(), yes=False)[0]) == 3
    assert [vm.vm_id for vm in sweep(config, Scope(), yes=True)[0]] == [here]


def test_without_a_job_file_all_three_clouds_are_asked() -> None:
    assert _chosen_clouds(None, None).keys() == {"aws", "azure", "gcp"}


def test_further_commands_name_the_same_account() -> None:
    assert Scope(file=Path("job.yaml")).command("--yes") == "'spottrain gc job.yaml --yes'"
    assert Scope().command("--yes") == "'spottrain gc --yes'"
