"""Varuna's rule, played in quanta (Varuna, section 3.2, constraints 1 to 3)."""

from __future__ import annotations

from dataclasses import dataclass, field

from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, RECOMPUTE
from spottrain.morphing.schedules.types import Runs


@dataclass(slots=True)
class _Stage:
    arrived: int = 0
    """Micro-batches whose activation has arrived."""
    turns: int = 0
    """Micro-batches whose turn to recompute, or to go backward, has come."""
    forwards: int = 0
    """Begun; so are backwards."""
    backwards: int = 0
    quanta: int = 0
    """Left of the running recompute and backward."""
    works: bytearray = field(default_factory=bytearray)
    """Its list so far."""

    @property
    def state(self) -> tuple[int, ...]:
        """Everything, of the list its length."""
        counts = (self.arrived, self.turns, self.forwards, self.backwards)
        return (*counts, self.quanta, len(self.works))


def _repeats(stages: list[_Stage], then: list[tuple[int, ...]], num_microbatches: int) -> int:
    """Return how often the tasks since ``then`` repeat, leaving one more to be played.

    They do if the state is the same except for the micro-batches that went through.
    Only the first stage meets the end of the mini-batch, as the others wait for it.
    """
    for p, (stage, before) in enumerate(zip(stages, then, strict=True)):
        arrived, turns, forwards, backwards, quanta, _ = before
        through = stage.forwards - forwards
        if stage.quanta != quanta or stage.turns - turns != through:
            return 0
        if not stage.backwards - backwards == through > 0:
            return 0
        if p > 0 and stage.arrived - arrived != through:
            return 0
    through = stages[0].forwards - then[0][2]
    return max(0, (num_microbatches - stages[0].forwards) // through - 1)


def play_quanta(depth: int, num_microbatches: int, recompute: bool) -> list[Runs]:
    """Return the list of every stage; the steady state is fast-forwarded once.

    Forward and recompute take one quantum, a backward two: first the gradient of the
    stage's input, then that of its weights. A stage prefers going backward, and goes
    from a recompute straight to its backward. When a stage has its input gradient, the
    stage before begins to recompute, so that it is done when the backward is and the
    gradient arrives. Without recompute that stage begins its backward a quantum later,
    for the gradient is sent when the backward is done.

    Args:
        depth: Stages.
        num_microbatches: Micro-batches of the replica.
        recompute: Whether all stages but the last compute their forward again.
    """
    stages = [_Stage() for _ in range(depth)]
    first, last = stages[0], depth - 1
    first.arrived = num_microbatches
    turn_at = 1 if recompute else 0
    then = [stage.state for stage in stages]
    pattern_ends = then
    quanta, save_at, extra = 0, 1, 0
    while first.backwards < num_microbatches or first.quanta > 0:
        arrivals: list[int] = []
        turns: list[int] = []
        for p, stage in enumerate(stages):
            if stage.quanta == 0 and stage.backwards < stage.turns:
                stage.quanta = 2
                if recompute and p < last:
                    stage.quanta = 3
                    stage.works.append(RECOMPUTE)
                stage.works.append(BACKWARD)
                stage.backwards += 1
            if stage.quanta > 0:
                stage.quanta -= 1
                if stage.quanta == turn_at and p > 0:
                    turns.append(p - 1)
            elif stage.forwards < stage.arrived:
                stage.works.append(FORWARD)
                stage.forwards += 1
                if p < last:
                    arrivals.append(p + 1)
                else:
                    turns.append(p)
        # What a quantum brings can be used from the next one on.
        for p in arrivals:
            stages[p].arrived += 1
        for p in turns:
            stages[p].turns += 1
        quanta += 1
        if extra:
            continue
        if quanta == save_at:
            save_at *= 2
            then = [stage.state for stage in stages]
            continue
        extra = _repeats(stages, then, num_microbatches)
        if extra:
            pattern_ends = [stage.state for stage in stages]
            for p, (stage, before) in enumerate(zip(stages, then, strict=True)):
                arrived, turned, forwards, backwards, _, _ = before
                if p > 0:
                    stage.arrived += extra * (stage.arrived - arrived)
                stage.turns += extra * (stage.turns - turned)
                stage.forwards += extra * (stage.forwards - forwards)
                stage.backwards += extra * (stage.backwards - backwards)
    if not extra:
        return [[(bytes(stage.works), 1)] for stage in stages]
    lists: list[Runs] = []
    for stage, (*_, begin), (*_, end) in zip(stages, then, pattern_ends, strict=True):
        works = bytes(stage.works)
        runs = [(works[:begin], 1), (works[begin:end], 1 + extra), (works[end:], 1)]
        lists.append([run for run in runs if run[0]])
    return lists
