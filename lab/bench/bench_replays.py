"""Rules of when to morph, on spot groups drawn from seeds that no rule was tried on.

Each group changes between calm and rough hours at random: VMs live from half an hour to a
day, alone or in bursts, and come back after one minute to thirty. The 2.5 billion parameter
example runs on 24 to 65 VMs for 8 to 24 hours. Prints a row a group and how often ours was
the best rule.
"""

from __future__ import annotations

import random
from pathlib import Path

from spottrain.codec import decode
from spottrain.morphing.plan.workload import Workload
from spottrain_lab.traces.replay import CostModel
from spottrain_lab.traces.rules import RULES, compare
from spottrain_lab.traces.shapes import Shapes
from spottrain_lab.traces.traces import Trace, parse_trace

ROOT = Path(__file__).resolve().parents[2]
GROUPS = 24
HOUR_S = 3600.0


class Group:
    """One spot group, as it is drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(1000 + seed)
        self.target = draw.choice((24, 32, 48, 64))
        self.end_s = draw.choice((8, 12, 24)) * HOUR_S
        self.here = list(range(self.target))
        self.named = self.target
        self.rows = [f"0,add,vm{i}" for i in self.here]
        self.regimes = [
            (
                draw.choice((0.5, 2, 6, 24)) * HOUR_S,
                draw.choice((60, 300, 1800)),
                draw.choice((1, 1, 4)),
            )
            for _ in range(3)
        ]

    def trace(self) -> Trace:
        """Draw it to its end."""
        draw, now_s = self.draw, 0.0
        life_s, refill_s, burst = draw.choice(self.regimes)
        switch_s = draw.expovariate(1 / (3 * HOUR_S))
        while now_s < self.end_s:
            lost = len(self.here) / life_s / burst
            filled = (len(self.here) < self.target) / refill_s
            next_s = now_s + draw.expovariate(lost + filled)
            if next_s > switch_s:
                now_s = switch_s
                life_s, refill_s, burst = draw.choice(self.regimes)
                switch_s = now_s + draw.expovariate(1 / (3 * HOUR_S))
                continue
            now_s = next_s
            if now_s < self.end_s:
                self._change(now_s, lost / (lost + filled), burst)
        last = f"{self.end_s * 1000:.0f},add,last"
        return parse_trace("\n".join([*self.rows, last]))

    def _change(self, now_s: float, chance_of_loss: float, burst: int) -> None:
        at = f"{now_s * 1000:.0f}"
        if self.draw.random() >= chance_of_loss:
            self.here.append(self.named)
            self.rows.append(f"{at},add,vm{self.named}")
            self.named += 1
            return
        for _ in range(min(len(self.here), self.draw.randint(1, burst))):
            gone = self.here.pop(self.draw.randrange(len(self.here)))
            self.rows.append(f"{at},remove,vm{gone}")


def main() -> None:
    """Play all groups and print what came of each."""
    example = ROOT / "examples" / "profiles" / "gpt2-2.5b-v100.json"
    shapes = Shapes(decode(Workload, example.read_text()))
    names = " | ".join(rule.name for rule in RULES)
    print(f"| group | VMs | {names} | ours against the best other |")
    print("|---" * (len(RULES) + 3) + "|")
    best, margins, shares = 0, [], []
    for seed in range(GROUPS):
        trace = Group(seed).trace()
        comparison = compare(trace, shapes, CostModel())
        most = comparison.max_examples
        ours, *others = (outcome.examples for outcome in comparison.outcomes)
        best += ours >= max(others)
        margins.append(ours / max(others) - 1)
        shares.append(ours / most)
        cells = " | ".join(f"{o.examples / most:.1%}" for o in comparison.outcomes)
        print(f"| {seed} | {trace.max_vms()} | {cells} | {margins[-1]:+.2%} |")
    print(
        f"ours is the best or as good in {best} of {GROUPS}, at worst {min(margins):+.2%}; "
        f"{sum(shares) / GROUPS:.1%} of the bound on the mean, {min(shares):.1%} at least"
    )


if __name__ == "__main__":
    main()
