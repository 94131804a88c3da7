"""SSH targets of VMs that EC2 lists late, or that run on Xen."""

from __future__ import annotations

import pytest
from tests.builders import a_launch
from tests.fakes.aws import FakeAws

from spottrain.cloud.aws.provider import AwsProvider
from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.port.provider import Vm


def rent(provider: AwsProvider) -> list[Vm]:
    offer = next(offer for offer in provider.offers() if offer.spot)
    asked = a_launch(offer, token="uid")
    return list(provider.launch(asked).vms)


def test_a_vm_that_the_cloud_does_not_know_yet_has_not_ended(
    aws: FakeAws,
) -> None:
    aws.ask("lag", hide_s=600, linger_s=0)
    provider = aws.provider()
    (vm,) = rent(provider)
    with pytest.raises(CloudError, match=r"does not know .* yet; will be") as raised:
        provider.ssh_target(vm.vm_id)
    assert not isinstance(raised.value, VmNotFoundError)
    aws.ask("pass_time", seconds=601)
    assert provider.ssh_target(vm.vm_id) is None
    aws.ask(
        "fail",
        operation="GetConsoleOutput",
        kind="error",
        code="InvalidInstanceID.NotFound",
        status=400,
    )
    with pytest.raises(CloudError, match=vm.vm_id.split(".")[1]):
        provider.ssh_target(vm.vm_id)


def test_a_xen_vm_has_the_console_output_of_its_boot(aws: FakeAws) -> None:
    provider = aws.provider()
    (vm,) = rent(provider)
    instance_id = vm.vm_id.split(".")[1]
    aws.ask("console", instance_id=instance_id, keys="ssh-ed25519 AAAA root@host")
    aws.ask(
        "fail",
        operation="GetConsoleOutput",
        kind="error",
        code="UnsupportedOperation",
        status=400,
    )
    assert provider.ssh_target(vm.vm_id) is not None
    asked = [
        "Latest=true" in each["body"]
        for each in aws.ask("requests")
        if each["operation"] == "GetConsoleOutput"
    ]
    assert asked == [True, False]
