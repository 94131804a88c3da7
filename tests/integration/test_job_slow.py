"""A job one of whose machines becomes slow, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.jobs import Job, trained_on
from tests.view import View

from spottrain.cloud.port.provider import VmState
from spottrain.varuna_manager.core.model.state import State

pytestmark = pytest.mark.nightly

STEPS = 10_000
"""Never trained: with few left, a replacement does not pay on a machine with much else to do."""


def goes_on(state: State, *, without: str) -> bool:
    return bool(trained_on(state)) and without not in trained_on(state)


def test_a_vm_that_becomes_slow_is_replaced(tmp_path: Path) -> None:
    zone = {"name": "a", "capacity": 3}
    resources, local = {"max_vms": 2}, {"zones": [zone]}
    settings = {"resources": resources, "local": local, "profile": None}
    with Job(tmp_path, "slow", steps=STEPS, **settings) as job:
        # Short enough for the slowed processor to be most of the time.
        job.pace(0.02)
        assert job.launch("--detach").code == 0
        job.until_trains(5)
        (slow,) = job.market("slow", machine=1, factor=20.0)
        found = job.until("a replacement", lambda state: View(state).slow_vms)
        job.until("a generation without it", lambda state: goes_on(state, without=slow))
        stopped = job.run("stop", job.name)
        report = job.run("report", job.name, "-o", "json").report
        vms = {vm.vm_id: vm.state for vm in job.vms()}

    assert stopped.code == 0, stopped.err
    assert [one.vm_id for one in found] == [slow]
    assert f"{slow} is " in found[0].evidence
    assert report["state"] == "stopped"
    assert report["slow_vms"][0]["vm_id"] == slow
    assert report["minibatches_lost"] == report["minibatches_recomputed"] == 0
    assert report["preemptions_unnoticed"] == report["silent_losses"] == 0
    assert len(vms) >= 3
    assert set(vms.values()) == {VmState.TERMINATED}
