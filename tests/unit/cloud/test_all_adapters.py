"""What holds of the adapter of every cloud, against its fake."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.fakes import aws, azure, gcp
from tests.unit.cloud.renting import alive, launch_request, offer_in

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import CloudProvider

Fake = aws.FakeAws | azure.FakeAzure | gcp.FakeGcp
ABILITIES = {
    CloudProvider.admit,
    CloudProvider.check,
    CloudProvider.list_all,
    CloudProvider.principal,
    CloudProvider.quotas,
    CloudProvider.release,
    CloudProvider.spot_pools,
    CloudProvider.ssh_target,
    CloudProvider.time_s,
}


@dataclass(frozen=True)
class Words:
    """What an adapter's calls are called by its cloud."""

    launch: str
    settings: dict[str, Any] = field(default_factory=dict)
    more: frozenset[Any] = frozenset()
    """What it can do that others cannot."""


WORDS: dict[type[Fake], Words] = {
    aws.FakeAws: Words("RunInstances", {"tries": 4}, frozenset({CloudProvider.move})),
    azure.FakeAzure: Words("PUT virtualMachines"),
    gcp.FakeGcp: Words("instances.bulk_insert"),
}


def test_it_can_do_all_that_its_cloud_can(fake: Fake) -> None:
    provider = fake.provider()
    asked = ABILITIES | {CloudProvider.move, CloudProvider.start_agent}
    can = {ability for ability in asked if provider.can(ability)}
    assert can == ABILITIES | WORDS[type(fake)].more


@pytest.mark.parametrize("kind", ["drop", "lost", "hang"])
def test_a_launch_without_an_answer_is_neither_repeated_nor_forgotten(
    fake: Fake, kind: str
) -> None:
    # A busy machine may not answer the calls before it within half a second either, and
    # meets the fault long after nobody waits for an answer any more.
    limit, times = ({"answer_s": 0.5}, 99) if kind == "hang" else ({}, 1)
    words = WORDS[type(fake)]
    provider = fake.provider(**words.settings, **limit)
    asked = launch_request(offer_in(fake.provider()), 2)
    fake.ask("fail", operation=words.launch, kind=kind, seconds=1.5, times=times)
    with pytest.raises(CloudError) as told:
        provider.launch(asked)
    assert type(told.value) is CloudError
    fake.ask("recover")
    ids = {vm.vm_id for vm in fake.provider().launch(asked).vms}
    assert len(ids) == alive(fake) == len(fake.ask("bill")) == 2
