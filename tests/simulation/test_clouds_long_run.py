"""A long run on each fake cloud: in the end it is empty, and the bill is our ledger's.

``python -m tests.bench.bench_clouds`` is the same, ten times as long and more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.simulation.fake_clouds import CLOUDS
from tests.simulation.rented_world import CLOSE_S, RentedWorld

SEED = 1
VMS = {"aws": 15, "azure": 30, "gcp": 30}
"""moto takes its time."""


@pytest.mark.rotated
@pytest.mark.parametrize("name", CLOUDS)
def test_after_many_faults_the_cloud_is_empty_and_its_bill_is_our_ledger(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path))
    with CLOUDS[name]() as cloud:
        world = RentedWorld(SEED, cloud)
        world.live(VMS[name])
        assert cloud.ask("left") == []
        assert cloud.ask("drifts") == []
        assert all(row.until_s for row in cloud.bill())
        verdict = world.verdict()
        assert verdict.vms >= VMS[name] / 2
        assert verdict.apart_s < CLOSE_S, verdict
        assert abs(verdict.ledger_s - verdict.billed_s) < 1.0, verdict
        for what in ("preemptions", "managers", "terminations asked for"):
            assert world.counts[what] > 0
