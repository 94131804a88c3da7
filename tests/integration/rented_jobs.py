"""What befalls a job on rented VMs, whichever cloud they are from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.fakes import gcp
from tests.fakes.metadata import FakeMetadata
from tests.integration.jobs import Job, trains
from tests.view import View

from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.price import Price
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import State


def full_and_training(state: State) -> State | None:
    """Return the state if both VMs of a fleet of two are ready and it trains."""
    ready = [vm for vm in View(state).vms.values() if vm.phase is VmPhase.READY]
    return state if len(ready) == 2 and trains(state) else None


def take_with_notice(job: Job, metadata: FakeMetadata, **notice: Any) -> State:
    """Let a VM hear that it is taken; return the state once another trains for it.

    What it held is handed over, so that nothing is computed twice for it.
    """
    before = View(job.state())
    noticed, hits = min(before.vms), before.tally.preemptions_noticed
    metadata.ask("preempt", vm=noticed.split(".")[1], **notice)
    state = job.until(
        f"another VM in place of {noticed}, which is noticed",
        lambda s: (
            full_and_training(s)
            if View(s).tally.preemptions_noticed > hits and noticed not in View(s).vms
            else None
        ),
    )
    after = View(state)
    assert len(before.vms.keys() & after.vms.keys()) == 1
    assert after.minibatches_recomputed == before.minibatches_recomputed
    return state


def know_gcp_prices(home: Path, kind: str = gcp.CPU_KIND) -> None:
    """Let the prices have been asked for, as ``spottrain prices`` does.

    Args:
        home: SPOTTRAIN_HOME of the job.
        kind: The instance type.
    """
    now_s = time.time()
    home.mkdir(exist_ok=True)
    with History(home / "market.sqlite") as history:
        history.record_prices(
            Price(
                cloud="gcp",
                region=gcp.REGION,
                zone=gcp.REGION,
                instance_type=kind,
                spot=spot,
                usd_per_hour=usd,
                since_s=now_s,
                seen_s=now_s,
                source="gcp billing catalog",
            )
            for spot, usd in ((True, gcp.SPOT_USD), (False, gcp.ON_DEMAND_USD))
        )
        asked = f"gcp billing catalog|{kind}|{gcp.REGION}"
        history.mark_asked([asked], now_s)
