"""A job's VMs of one cloud have one image, however many newer ones are published."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.builders import a_launch
from tests.fakes.gcp_world import IMAGE_FAMILY
from tests.unit.cloud.renting import offer_in

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import Vm

AMI = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.10 (Ubuntu 24.04) {}"
URN = "microsoft-dsvm:ubuntu-hpc:2404"
FAMILY = f"projects/deeplearning-platform-release/global/images/{IMAGE_FAMILY}-v{{}}"


@dataclass(frozen=True)
class Images:
    """An account whose default image has a newer version each time."""

    fake: Any
    cloud: str

    def name(self, day: str) -> str:
        """Return the image of a day as VMs tell it."""
        named = {"aws": AMI.format(int(day[-4:])), "gcp": FAMILY.format(day)}
        return named.get(self.cloud, f"{URN}:24.04.{day}")

    def publish(self, **days: str) -> None:
        """Set the state of images: there, deprecated, gone."""
        if self.cloud == "azure":  # lists no others
            listed = [f"24.04.{day[1:]}" for day, s in days.items() if s == "there"]
            self.fake.ask("publish", urn=URN, versions=listed)
        for day, state in days.items():
            if self.cloud == "aws":
                there = {"there": "available", "gone": "deregistered"}
                image_id = f"ami-{int(day[-4:]):08d}"
                new = there.get(state, state)
                self.fake.ask("publish", image_id=image_id, state=new)
            if self.cloud == "gcp":
                states = {"there": "ACTIVE", "gone": "OBSOLETE"}
                name = f"{IMAGE_FAMILY}-v{day[1:]}"
                new = states.get(state, "DEPRECATED")
                self.fake.ask("publish", name=name, state=new)


@pytest.fixture
def images(fake: Any) -> Images:
    found = Images(fake, type(fake).__name__.removeprefix("Fake").lower())
    found.publish(d20260901="there", d20261101="gone")
    return found


def rent(provider: Any, intent: str, image: str) -> Vm:
    token = f"{provider._settings.uid}-{intent}"
    request = a_launch(offer_in(provider), token=token, intent=intent)
    vm: Vm = provider.launch(replace(request, image=image)).vms[0]
    return vm


@pytest.mark.rotated
def test_later_vms_have_the_image_of_the_first_and_another_job_the_newest(
    images: Images,
) -> None:
    old, new = images.name("20260901"), images.name("20261101")
    assert rent(images.fake.provider(uid="a"), "intent-0", "").image == old
    images.publish(d20260901="there", d20261101="there")
    later = images.fake.provider(uid="a")  # of a manager that was restarted
    assert rent(later, "intent-1", old).image == old
    assert rent(images.fake.provider(uid="b"), "intent-0", "").image == new


def test_a_deprecated_image_is_kept_as_long_as_it_can_be_used(images: Images) -> None:
    old, new = images.name("20260901"), images.name("20261101")
    images.publish(d20260901="deprecated", d20261101="there")
    # Whether Azure launches deprecated versions, which it does not list, is not known.
    expected = new if images.cloud == "azure" else old
    assert rent(images.fake.provider(), "intent-0", old).image == expected


def test_an_image_that_was_withdrawn_is_replaced_by_the_newest(images: Images) -> None:
    old, new = images.name("20260901"), images.name("20261101")
    images.publish(d20260901="gone", d20261101="there")
    assert rent(images.fake.provider(), "intent-0", old).image == new


def test_an_image_may_go_while_the_manager_knows_it(images: Images) -> None:
    old, new = images.name("20260901"), images.name("20261101")
    provider = images.fake.provider()
    assert rent(provider, "intent-0", "").image == old
    assert rent(provider, "intent-1", old).image == old
    images.publish(d20260901="gone", d20261101="there")
    if images.cloud != "azure":  # which is asked each time
        with pytest.raises(CloudError):
            rent(provider, "intent-2", old)
    assert rent(provider, "intent-2", old).image == new
