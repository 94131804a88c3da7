"""Checkpoints as often as their cost and the losses ask for, on a simulated spot market."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.test_simulation import FACTS, SPEC, check_end, world

FORMER = 100
"""Mini-batches between checkpoints, before the interval was chosen."""
LARGE = replace(
    FACTS,
    sections=tuple(replace(section, optimizer_bytes=3 << 28) for section in FACTS.sections),
)
"""Of which a slot holds one section."""


def lost_s(seed: int, every_steps: int, save_s: float, mean_s: float) -> float:
    """Train through losses; return the time that checkpoints and repetitions took.

    Four VMs hold a section each, so the loss of one goes back to the newest checkpoint.

    Args:
        seed: Of the market.
        every_steps: 0: as it is chosen.
        save_s: What a checkpoint slows training by.
        mean_s: Between losses.
    """
    spec = replace(SPEC, steps=300, checkpoint_every_steps=every_steps)
    market = world(seed, spec=spec, facts=LARGE, max_vms=4)
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
    step_s = max(g.measured_step_s or 0.0 for g in market.generations)
    again = market.minibatches_recomputed
    return again * step_s + save_s * len(market.workers.checkpoints)


def test_less_is_lost_than_with_a_fixed_number() -> None:
    chosen, former = (lost_s(0, every, 5.0, mean_s=1500.0) for every in (0, FORMER))
    assert chosen < former / 2
