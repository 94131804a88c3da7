"""First launches on each cloud: they train, within budget, and leave nothing behind."""

from __future__ import annotations

import sys
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import aws, azure, buckets, gcp
from tests.integration.aws_vms import free_port
from tests.simulation.fake_clouds import CLOUDS, FakeCloud
from tests.simulation.stories import Clock, EnteredStory, Story
from tests.simulation.test_simulation import SPEC
from tests.tiers import first_always

from spottrain.cloud.ssh.rented import provider as rented
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.storage.open import open_store
from spottrain.storage.store import DeniedError, check_writable

QUOTA_VMS = 4
STEPS = 40
DAY_S = 86400.0
_STOCK = {
    "aws": [
        {"zone": zone, "instance_type": aws.KIND}
        for zone in ("us-east-1a", "us-east-1b", "us-east-1c")
    ],
    "azure": [{"zone": zone, "instance_type": azure.KIND} for zone in ("eastus-1", "eastus-2")],
    "gcp": [{"zone": zone, "kind": gcp.KIND} for zone in (gcp.ZONE, "us-west1-a")],
}
_PER_VM = {
    name: catalogue().types[name, kind].vcpus
    for name, kind in (("aws", aws.KIND), ("azure", azure.KIND))
}
_QUOTA: dict[str, dict[str, Any]] = {
    "aws": {"code": "L-3819A6DF", "vcpus": QUOTA_VMS * _PER_VM["aws"]},
    "azure": {
        "region": azure.REGION,
        "family": "lowPriorityCores",
        "vcpus": QUOTA_VMS * _PER_VM["azure"],
    },
    "gcp": {"metric": "PREEMPTIBLE_NVIDIA_A100_GPUS", "limit": QUOTA_VMS},
}


def limited(fake: FakeCloud) -> None:
    """Give the account the quotas of a new one, enough for a few VMs."""
    fake.ask("quota", **_QUOTA[fake.name])
    if fake.name == "gcp":
        fake.ask("quota", metric="GPUS_ALL_REGIONS", limit=QUOTA_VMS)


@pytest.fixture(scope="module", params=first_always(CLOUDS))
def account(request: pytest.FixtureRequest) -> Iterator[FakeCloud]:
    with CLOUDS[request.param]() as fake:
        yield fake


@pytest.fixture
def fake(account: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path))
    account.reset()
    for zone in _STOCK[account.name]:
        account.ask("stock", **zone, count=20)
    return account


def short(**changes: Any) -> dict[str, Any]:
    """Return the settings of a job of a few minutes."""
    return {"max_vms": 16, "spec": replace(SPEC, steps=STEPS)} | changes


@pytest.mark.rotated
def test_a_new_account_with_a_quota_of_4_trains_on_4_though_16_are_wanted(
    fake: FakeCloud,
) -> None:
    limited(fake)
    story = Story(fake, **short())
    story.run()
    story.check_end()
    assert story.most_at_once() == QUOTA_VMS
    assert "quota" not in story.refusals(), "nothing was asked for in vain"


def test_a_job_that_only_measures_rents_one_vm_and_leaves_a_profile(
    fake: FakeCloud,
) -> None:
    story = Story(fake, **short(max_vms=1, measures_only=True))
    story.run()
    assert story.finished is not None
    assert story.finished.kind == "succeeded", story.finished
    assert story.profile is not None
    assert story.step == 0
    assert story.checkpoints == ()
    assert story.most_at_once() == len(story.rows()) == 1
    assert fake.ask("left") == []


@pytest.mark.rotated
def test_where_port_22_is_blocked_three_vms_are_paid_until_a_person_acts(
    fake: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = EnteredStory(tmp_path, fake, **short(max_vms=3))
    with monkeypatch.context() as patch:
        patch.setattr(rented, "ANSWER_S", 0.0)
        story.dialled = free_port()  # nobody answers
        story.run()
    assert story.finished is not None
    assert story.finished.exit_code == 6
    assert "SSH" in story.finished.reason
    assert len(story.rows()) == 3
    story.dialled = story.port
    story.resume()
    story.check_end()
    story.provider.close()


@pytest.mark.rotated
def test_an_image_without_torch_costs_the_first_vms_until_it_is_named(
    fake: FakeCloud, tmp_path: Path
) -> None:
    story = EnteredStory(tmp_path, fake, **short(max_vms=2))
    venv.create(tmp_path / "bare", with_pip=False)
    story.python = str(tmp_path / "bare/bin/python")
    story.run()
    assert story.finished is not None
    assert story.finished.exit_code == 6
    assert "torch" in story.finished.reason
    assert len(story.rows()) <= 2, "no other zone, type or region is tried"
    story.python = sys.executable
    story.resume()
    story.check_end()
    story.provider.close()


def test_a_bucket_in_another_region_is_named_before_anything_is_rented(
    fake: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fake.name == "aws":
        with buckets.serve("s3") as endpoint:
            for name, value in buckets.s3_environment(endpoint, "us-east-1").items():
                monkeypatch.setenv(name, value)
            place = f"s3://{buckets.BUCKET}/job"
            with pytest.raises(DeniedError, match=r"add \?region=eu-west-1"):
                check_writable(open_store(place, patience_s=1.0))
            assert fake.bill() == []
            check_writable(open_store(f"{place}?region=eu-west-1", patience_s=1.0))
    story = Story(fake, **short(max_vms=2))
    story.run()
    story.check_end()


def test_two_people_with_one_account_and_one_name_train_side_by_side(
    fake: FakeCloud,
) -> None:
    clock = Clock(fake)
    ann = Story(fake, clock, **short(max_vms=2, uid="a" * 32), owner="ann@example.org")
    ben = Story(fake, clock, **short(max_vms=2, uid="b" * 32), owner="ben@example.org")
    ben.now_s += 60.0
    for story in (ann, ben):
        story.run(until_s=0.0)
    ann.after(120.0, lambda: ann.kill_manager(down_s=600.0))
    while playing := [story for story in (ann, ben) if story.finished is None]:
        min(playing, key=lambda story: story.agenda[0]).play_one()
    for story in (ann, ben):
        story.check_end()
    assert not ann.cloud.vms.keys() & ben.cloud.vms.keys()
    assert {row.vm_id for row in fake.bill()} == {*ann.cloud.vms, *ben.cloud.vms}
    assert fake.ask("left") == []


class Week(Story):
    """A job that takes a week, looked at every six hours."""

    busy_s = 21600.0


@pytest.mark.rotated
def test_a_week_with_a_restart_and_an_eviction_every_day(fake: FakeCloud) -> None:
    story = Week(
        fake,
        max_vms=2,
        max_usd=500.0,
        spec=replace(SPEC, steps=100, minibatch_size=1536, checkpoint_every_steps=2),
    )

    def strike() -> None:
        if story.finished is not None:
            return
        alive = [vm for vm in story.cloud.vms.values() if vm.alive]
        if alive:
            story.sync()
            fake.evict(alive[0].vm_id)
            story.end_vm(alive[0].vm_id)
        story.kill_manager(down_s=600.0)
        story.after(DAY_S, strike)

    story.after(DAY_S / 2, strike)
    story.run(until_s=14 * DAY_S)
    story.check_end()
