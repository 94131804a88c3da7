"""Checkpoints as often as their cost and the losses ask for, on a simulated spot market."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulation.test_simulation import SPEC, check_end, world

FORMER = 100
"""Mini-batches between checkpoints, before the interval was chosen."""


def lost_s(seed: int, every_steps: int, save_s: float, mean_s: float) -> float:
    """Train through losses; return the time that checkpoints and repetitions took.

    Four VMs hold a section each, so the loss of one goes back to the newest checkpoint.

    Args:
        seed: Of the market.
        every_steps: 0: as it is chosen.
        save_s: What a checkpoint slows training by.
        mean_s: Between losses.
    """
    spec = replace(SPEC, steps=3000, checkpoint_every_steps=every_steps)
    market = world(seed, spec=spec, max_vms=4)
    market.workers.save_s = save_s
    draw = market.random

    def strike() -> None:
        alive = sorted(v.vm_id for v in market.cloud.vms.values() if v.alive)
        if alive:
            market.end_vm(draw.choice(alive))
        market.after(draw.expovariate(1 / mean_s), strike)

    market.after(draw.expovariate(1 / mean_s), strike)
    market.run(400_000.0)
    check_end(market)
    assert market.finished is not None
    assert market.finished.exit_code == 0
    step_s = max(g.measured_step_s or 0.0 for g in market.state.generations)
    again = market.state.progress.minibatches_recomputed
    return again * step_s + save_s * len(market.workers.checkpoints)


@pytest.mark.parametrize(
    ("save_s", "mean_s"), [(0.1, 600.0), (5.0, 600.0), (0.1, 6000.0), (5.0, 6000.0)]
)
def test_less_is_lost_than_with_a_fixed_number(save_s: float, mean_s: float) -> None:
    lost = {
        every: sum(lost_s(seed, every, save_s, mean_s) for seed in range(2))
        for every in (0, FORMER)
    }
    print(save_s, mean_s, lost)
    assert lost[0] < lost[FORMER]
