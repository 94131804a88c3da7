"""About a thousand launches, preemptions and terminations under faults, on each cloud.

The manager's core and errands over the real adapters and SDKs against the fakes
(tests/simulation/rented_world.py), in virtual time. Reported are what happened to it, how many
VMs there were, and how the ledger of VM-seconds compares with the fake's own bill.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence

from tests.simulation.fake_clouds import CLOUDS
from tests.simulation.rented_world import CLOSE_S, RentedWorld


def measure(name: str, seed: int, vms: int) -> bool:
    """Live through one run and print it; return whether all of it held."""
    began_s = time.perf_counter()
    with CLOUDS[name]() as cloud:
        world = RentedWorld(seed, cloud)
        world.live(vms)
        left, drifts = cloud.ask("left"), cloud.ask("drifts")
        verdict = world.verdict()
    print(f"{name}: seed {seed}, {time.perf_counter() - began_s:.0f} s")
    for what, count in sorted(world.counts.items()):
        print(f"  {what:26} {count:9}")
    print(f"  {'VMs billed':26} {verdict.vms:9}")
    print(f"  {'left in the cloud':26} {len(left):9}")
    print(f"  {'VM-seconds billed':26} {verdict.billed_s:13.3f}")
    print(f"  {'VM-seconds in the ledger':26} {verdict.ledger_s:13.3f}")
    print(f"  {'most apart for one VM, s':26} {verdict.apart_s:13.3f}")
    print(f"  {'of VMs never made, s':26} {verdict.unmade_s:13.3f}")
    return not left and not drifts and verdict.apart_s < CLOSE_S


def main(names: Sequence[str], seed: int, vms: int) -> int:
    """Return 0 if all of it held on all clouds."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["SPOTTRAIN_HOME"] = home
        held = [measure(name, seed, vms) for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clouds", nargs="+", choices=list(CLOUDS), default=CLOUDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vms", type=int, default=300)
    given = parser.parse_args()
    raise SystemExit(main(given.clouds, given.seed, given.vms))
