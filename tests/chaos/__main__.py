"""Faults of every kind strike a job of real processes, and nothing may come of it.

    scripts/chaos                         every kind once
    scripts/chaos --faults 200 --seed 7   random kinds, also before the job has got over
                                          the one before
    scripts/chaos --kinds agent hang      these once
    scripts/chaos --short                 a tenth of the kinds once, as the gate does: which
                                          one changes with the commit (tests/tiers.py)

The job trains on four VMs of the local cloud. It must end as one that nothing happened
to, bit for bit: weights, optimizer state and losses. The ledger must agree with the
cloud's bill, and nothing may be left over. Mounts a small file system for checkpoints.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.faults import KINDS, VMS, ZONE, Struck, written
from tests.chaos.watch import Watch
from tests.integration.jobs import Job, until, weights
from tests.view import View

from tests import local_cloud, tiers

STEPS_A_FAULT = 20
"""Mini-batches that the job has for each fault; should it use more, it is slowed down."""
PACE_S, SLOW_S = 0.05, 0.5
"""What a micro-batch takes."""
STAGE_BYTES = 200_000
"""Too little for the whole model, enough for half of it."""
DISK_BYTES = 4_000_000
LONG_S = 60.0
"""A recovery that takes longer is a finding."""
AT_ONCE = 0.25
"""Share of random faults that do not wait until the job has got over the one before."""
NOTICED_S = 0.3
"""By then no mini-batch is committed any more that was computed before a fault."""
MANAGER = {"heartbeat_s": 0.3, "suspect_s": 2.0, "hang_s": 3.0}


@dataclass
class Findings:
    """What was seen to be wrong."""

    lines: list[str] = field(default_factory=list)

    def expect(self, what: str, holds: bool) -> None:
        """Say so if something does not hold."""
        if not holds:
            self.lines.append(what)
            print(f"WRONG: {what}", flush=True)


@contextmanager
def _small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small file system; give whether that is allowed here."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "spottrain", str(folder)]
    mounted = not subprocess.run(["mount", *options], check=False).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _undisturbed(folder: Path, steps: int) -> tuple[dict[str, str], dict[int, float]]:
    """Return weights and losses of the job that nothing happens to."""
    with Job(folder, "undisturbed", steps=steps, resources={"max_vms": 1}) as job:
        answer = job.launch("-o", "json")
        assert answer.code == 0, answer.err
        return weights(job.checkpoint_root), dict(job.losses())


class Chaos:
    """A job, the faults that strike it, and what was seen.

    Args:
        on: What is struck.
        findings: What was seen to be wrong.
    """

    def __init__(self, on: Struck, findings: Findings) -> None:
        self._on, self._findings = on, findings
        self.recoveries_s: list[float] = []
        self.was_unheard = False
        """Whether VMs may have ended before a manager heard what they had trained."""

    def until_whole(self) -> None:
        """Wait until it trains, and all VMs are there."""
        watch = self._on.watch
        watch.until("all VMs", lambda: watch.is_whole(VMS))

    def strike(self, name: str) -> bool:
        """Let a fault strike; return whether it could."""
        watch = self._on.watch
        watch.advance()
        self._number, self._struck_at_s = watch.number, time.time()
        print(f"{time.strftime('%H:%M:%S')} {name:<20}", end=" ", flush=True)
        try:
            KINDS[name].strike(self._on)
        except (LookupError, ValueError, OSError) as error:
            print(f"cannot strike now: {error!r}", flush=True)
            return False
        return True

    def get_over(self, name: str, *, breaks: bool) -> None:
        """Wait until the job trains on after a fault, and is not done before.

        Args:
            name: Of the fault.
            breaks: Whether only a new generation can.
        """
        watch, since_s = self._on.watch, self._struck_at_s + NOTICED_S

        def over() -> bool:
            self._keep_pace()
            goes_on = watch.number > self._number or not breaks
            return goes_on and watch.trains() and watch.committed_at_s > since_s

        watch.until(f"going on after {name}", over)
        took_s = watch.committed_at_s - self._struck_at_s
        self.recoveries_s.append(took_s)
        print(f"goes on after {took_s:6.2f} s", flush=True)
        self._findings.expect(f"{name}: {took_s:.0f} s until it went on", took_s < LONG_S)

    def pace(self, fault: int) -> None:
        """Slow the job down if it would be done before its faults, of which this is the next."""
        self._steps = STEPS_A_FAULT * (fault + 1)
        self._keep_pace()

    def _keep_pace(self) -> None:
        job = self._on.job
        pace_s = SLOW_S if View(self._on.watch.state).step > self._steps else PACE_S
        if pace_s != job.paced_s:
            job.pace(pace_s)


def _each_kind(chaos: Chaos, kinds: Sequence[str]) -> int:
    for index, name in enumerate(kinds):
        chaos.pace(index)
        if chaos.strike(name):
            chaos.get_over(name, breaks=KINDS[name].breaks)
            chaos.until_whole()
    return len(kinds)


def _random_kinds(chaos: Chaos, rng: random.Random, faults: int, kinds: Sequence[str]) -> int:
    struck = 0
    while struck < faults:
        chaos.pace(struck)
        name = rng.choice(kinds)
        if not chaos.strike(name):
            chaos.until_whole()
            continue
        struck += 1
        if rng.random() < AT_ONCE and struck < faults:
            print(flush=True)
            chaos.was_unheard |= name.startswith("manager")
            time.sleep(rng.uniform(0.0, 1.0))
            continue
        chaos.get_over(name, breaks=False)
        time.sleep(rng.uniform(0.0, 3.0))
    return struck


def _compare(
    rows: list[tuple[int, float]],
    losses: dict[int, float],
    findings: Findings,
    *,
    was_unheard: bool,
) -> None:
    """Compare (step, loss) of every mini-batch with what they must be."""
    counts = Counter(step for step, _ in rows)
    twice = [step for step, count in counts.items() if count > 1]
    findings.expect(f"mini-batches {twice} are measured twice", not twice)
    missing = sorted(losses.keys() - counts.keys())
    if missing and was_unheard:
        print(f"no manager was there to hear of mini-batches {missing}")
    else:
        findings.expect(f"mini-batches {missing} are not measured", not missing)
    wrong = [(step, loss, losses.get(step)) for step, loss in rows]
    wrong = [one for one in wrong if one[1] != one[2]]
    findings.expect(f"losses differ: {wrong}", not wrong)


def _check_end(
    job: Job,
    disk: Path,
    steps: int,
    reference: tuple[dict[str, str], dict[int, float]],
    findings: Findings,
    *,
    was_unheard: bool,
) -> None:
    report = job.run("report", job.name, "-o", "json").report
    findings.expect(f"it ended {report['state']}", report["state"] == "succeeded")
    expected, losses = reference
    findings.expect("weights differ", weights(disk) == expected)
    rows = job.losses()
    _compare(rows, losses, findings, was_unheard=was_unheard)
    state = job.state()
    bill, spent = (
        1e6 * local_cloud.bill(job.cloud, job.name),
        View(state).ledger.spent(state.now_s),
    )
    findings.expect(
        f"the bill says {bill:.0f} micro-dollars, the ledger {spent.microusd}",
        abs(spent.microusd - bill) <= 1.0 and not View(state).ledger.unconfirmed,
    )
    findings.expect("processes are left", not job.left_over())
    partial = [name for name, whole in written(disk).items() if not whole]
    findings.expect(f"partial checkpoints are left: {partial}", not partial)
    traced = "Traceback" in job.dir.log.read_text()
    findings.expect("a traceback is in the manager's log", not traced)
    print(
        f"{report['minibatches_recomputed']} mini-batches computed again, "
        f"{len(job.vms())} VMs rented, {spent.microusd / 1e6:.6f} USD"
    )


def _run(folder: Path, seed: int, faults: int | None, kinds: list[str]) -> Findings:
    disk = folder / "disk"
    with _small_disk(disk) as can_fill:
        if not can_fill and "disk full" in kinds:
            print("no right to mount a small disk: it is never full", flush=True)
            kinds = [kind for kind in kinds if kind != "disk full"]
        return _run_on(folder, disk, seed, faults, kinds)


def _run_on(
    folder: Path, disk: Path, seed: int, faults: int | None, kinds: Sequence[str]
) -> Findings:
    count = len(kinds) if faults is None else faults
    steps = STEPS_A_FAULT * (count + 2)
    reference = _undisturbed(folder, steps)
    findings = Findings()
    zone = {"name": ZONE, "capacity": VMS, "slot_memory_bytes": STAGE_BYTES}
    settings: dict[str, Any] = {
        "steps": steps,
        "checkpoint": {"path": str(disk), "every_steps": 10},
        "resources": {"max_vms": VMS},
        "budget": {"max_usd": 50.0},
        "local": {"zones": [zone]},
        "manager": MANAGER,
    }
    with Job(folder, "chaos", **settings) as job:
        job.pace(PACE_S)
        answer = job.launch("--detach")
        assert answer.code == 0, answer.err
        rng = random.Random(seed)
        with closing(Watch(job)) as watch:
            chaos = Chaos(Struck(job, watch, rng, disk), findings)
            chaos.until_whole()
            if faults is None:
                struck = _each_kind(chaos, kinds)
            else:
                struck = _random_kinds(chaos, rng, faults, kinds)
            job.pace(0.0)
            until("the end", lambda: not job.dir.is_managed())
        was_unheard = chaos.was_unheard
        _check_end(job, disk, steps, reference, findings, was_unheard=was_unheard)
    median_s, slowest_s = statistics.median(chaos.recoveries_s), max(chaos.recoveries_s)
    print(
        f"seed {seed}: {struck} faults; the job went on after {median_s:.2f} s "
        f"(median), {slowest_s:.2f} s (slowest); {len(findings.lines)} findings"
    )
    return findings


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, help="of random kinds")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    kinds.add_argument(
        "--short",
        dest="kinds",
        action="store_const",
        const=list(KINDS)[tiers.part() :: tiers.PARTS],
        help="a tenth of the kinds",
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"in {folder}, which stays if anything is wrong", flush=True)
    findings = _run(folder, arguments.seed, arguments.faults, arguments.kinds)
    if not findings.lines:
        shutil.rmtree(folder)
    return bool(findings.lines)


if __name__ == "__main__":
    sys.exit(main())
