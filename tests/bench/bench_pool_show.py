"""The show of examples/pool.yaml beside its jobs alone: the table of docs/pool.md.

``python -m tests.bench.bench_pool_show``: the pool, and each job alone on all its VMs.

``python -m tests.bench.bench_pool_show BOOT_S VMS``: the same on so many VMs, which take BOOT_S
to boot when they are rented; and the pool when no VM goes from one job to another.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.jobs import weights
from tests.view import View

from spottrain.varuna_manager.config.files import read_job_file
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import read_state

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("thesis", "paper", "urgent")
SOONER = 0.4
MAIN = "from spottrain.varuna_manager.cli.main import main; main()"
WITHOUT = (
    "from spottrain.varuna_manager.cli.pool import submit; submit.machine_of = lambda config: ''; "
)
"""Has no VM go from one job to another."""


class Run(NamedTuple):
    """What became of a job."""

    began_s: float
    ended_s: float
    microusd: int
    moved: int
    """VMs that it took from others."""
    weights: Any

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


def run(home: Path, *arguments: str, first: str = "") -> str:
    environment = {**os.environ, "SPOTTRAIN_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", first + MAIN, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return done.stdout


def outcome(home: Path, name: str) -> Run:
    job = JobDir(home / "jobs" / name)
    while (state := read_state(job)).phase is not JobPhase.ENDED:
        time.sleep(0.2)
    assert state.outcome is not None
    assert state.outcome.kind == "succeeded", state.outcome
    return Run(
        state.submitted_at_s,
        _end_s(state),
        View(state).ledger.spent(state.now_s).microusd,
        sum("." in vm_id for vm_id in View(state).ledger.closed),
        weights(Path(state.job.spec.checkpoint_path)),
    )


def _end_s(state: State) -> float:
    return View(state).progress.last_commit_at_s or state.now_s


def pool(folder: Path, file: Mapping[str, Any], first: str = "") -> dict[str, Run]:
    home = folder / "home"
    shutil.copytree(EXAMPLES / "pool", folder / "pool")
    (folder / "pool.yaml").write_text(json.dumps(dict(file)))
    create = "pool", "create", str(folder / "pool.yaml"), "--until-done"
    document = json.loads(run(home, *create, "-o", "json", first=first))
    found = {name: outcome(home, name) for name in NAMES}
    total = sum(one.microusd for one in found.values())
    assert round(document["usd_spent"] * 1e6) == total, (document["usd_spent"], total)
    assert total <= file["budget"]["max_usd"] * 1e6
    return found


def alone(folder: Path, file: Mapping[str, Any]) -> dict[str, Run]:
    home, found = folder / "home", {}
    shutil.copytree(EXAMPLES / "pool", folder / "pool")
    for name in NAMES:
        path = folder / "pool" / f"{name}.yaml"
        job = read_job_file(path)[0]
        job["resources"] = {
            **job["resources"],
            "provider": "local",
            "max_vms": file["max_vms"],
        }
        job["budget"] = {"max_usd": file["budget"]["max_usd"]}
        job["local"] = {**job.get("local", {}), "zones": file["local"]["zones"]}
        path.write_text(json.dumps(job))
        run(home, "launch", str(path))
        found[name] = outcome(home, name)
    return found


def told(what: str, found: Mapping[str, Run]) -> None:
    began_s = min(one.began_s for one in found.values())
    moved = sum(one.moved for one in found.values())
    times = "  ".join(f"{name} {found[name].took_s:6.1f}" for name in NAMES)
    print(
        f"{what:<24} {times}  all {max(r.ended_s for r in found.values()) - began_s:6.1f} s"
        f"  {sum(r.microusd for r in found.values()) / 1e6:.6f} USD"
        f"{f'  {moved} VMs moved' if moved else ''}",
        flush=True,
    )


def main(arguments: Sequence[str]) -> None:
    file = read_job_file(EXAMPLES / "pool.yaml")[0]
    if arguments:
        boot_s, file["max_vms"] = float(arguments[0]), int(arguments[1])
        for zone in file["local"]["zones"]:
            zone |= {"boot_s": boot_s, "capacity": file["max_vms"]}
    with tempfile.TemporaryDirectory(prefix="pool-show-") as parent:
        folders = [Path(parent) / name for name in ("pool", "without", "alone")]
        for folder in folders:
            folder.mkdir()
        together = pool(folders[0], file)
        told("pool", together)
        if arguments:
            told("pool, all VMs rented", pool(folders[1], file, WITHOUT))
        apart = alone(folders[2], file)
    each = [apart[name].took_s for name in NAMES]
    after_s = together["urgent"].began_s - together["thesis"].began_s
    one_by_one_s, urgent_s = sum(each), sum(each) - after_s
    print("alone, seconds          ", "  ".join(f"{s:6.1f}" for s in each))
    sooner = 1 - together["urgent"].took_s / urgent_s
    print(f"urgent: {sooner:.0%} sooner than one after the other ({urgent_s:.1f} s)")
    all_s = max(one.ended_s for one in together.values()) - together["thesis"].began_s
    print(f"all: {all_s:.1f} s, one after the other {one_by_one_s:.1f} s")
    same = all(together[name].weights == apart[name].weights for name in NAMES)
    print(f"weights: {'bit for bit those of running alone' if same else 'differ'}")
    assert same
    if arguments:
        return
    assert sooner >= SOONER
    assert all_s < one_by_one_s


if __name__ == "__main__":
    main(sys.argv[1:])
