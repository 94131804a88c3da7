"""Memory: the manager's of a small job, and a worker's over what it was forked with.

A worker's growth is its resident anonymous and shared memory less that of its
supervisor, which is what a freshly forked idle child has. Its share is what its stage
must hold: parameters, gradients (the prepared ones), optimizer state, one section's undo
slot; the batch is tiny, so that the stash is nothing. About 1 GB of state at P=4, ``fast``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.linear_job import BLOCKS, LAYERS, WIDTH
from tests.bench.processes import ROOT, status_bytes
from tests.builders import a_spec
from tests.integration.fleet import Fleet, Heard, Zygote, make_plan

from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.wire import messages

DEPTH = 4
STEPS, CHECKPOINT_EVERY = 22, 12
FLOAT_BYTES = 4
COPIES = 4
"""Parameters, gradients and AdamW's two moments."""
INTERVAL_S = 0.005
MB = 1e6

JOB = """
name: memory
entrypoint: tiny_job:job
workdir: {workdir}
minibatch_size: 8
microbatch_size: 2
steps: 40
seed: 1
resources: {{max_vms: 2}}
budget: {{max_usd: 5}}
slo: {{max_hours: 1}}
local:
  seed: 1
  zones:
    - {{name: a, slots: 1, slot_memory_bytes: 100_000_000, capacity: 2,
       spot_usd_per_hour: 1.0, on_demand_usd_per_hour: 3.0}}
"""


def manager_peak_bytes(folder: Path) -> int:
    """Run a tiny job from beginning to end; return its manager's peak resident size."""
    job_file = folder / "job.yaml"
    job_file.write_text(JOB.format(workdir=ROOT / "tests" / "integration"))
    environment = {**os.environ, "SPOTTRAIN_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "spottrain.varuna_manager.cli.main"]
    log = open(folder / "launch.log", "w+")  # noqa: SIM115
    with log:
        launch = subprocess.Popen(
            [*command, "launch", str(job_file)],
            env=environment,
            stdout=log,
            stderr=log,
        )
        job = JobDir(folder / "home" / "jobs" / "memory")
        peak = 0
        while launch.poll() is None:
            address = job.manager() if job.path.exists() else None
            if address is not None:
                peak = max(peak, peak_of(address.pid))
            time.sleep(INTERVAL_S)
        if launch.returncode or not peak:
            log.seek(0)
            raise SystemExit(f"the tiny job failed: {log.read()}")
    return peak


def peak_of(pid: int) -> int:
    """Return a process's highest resident size; 0 if it is gone."""
    try:
        return status_bytes(pid, "VmHWM")
    except (FileNotFoundError, ProcessLookupError):
        return 0


@dataclass
class Watch:
    """Samples the growth of every worker until told to stop."""

    baselines: dict[str, int]
    """Machine to what its supervisor has."""
    pids: dict[str, int] = field(default_factory=dict)
    samples: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            growths = {
                name: status_bytes(pid, "RssAnon", "RssShmem") - self.baselines[name]
                for name, pid in tuple(self.pids.items())
            }
            self.samples.append((time.monotonic(), growths))

    def stop(self) -> None:
        self._over.set()

    def peak(self, name: str, begin: float, end: float) -> int:
        """Return a worker's highest growth between two times."""
        return max(g.get(name, 0) for at, g in self.samples if begin <= at <= end)


def grow(folder: Path) -> tuple[Watch, dict[int, float], float]:
    """Train; return samples, when each step was committed by all, when saved."""
    spec = a_spec(
        name="memory",
        entrypoint="linear_job:job",
        steps=STEPS,
        microbatch_size=1,
        checkpoint_path=str(folder / "checkpoints"),
        checkpoint_every_steps=CHECKPOINT_EVERY,
        checkpoint_keep=1,
    )
    names = [f"vm-{stage}" for stage in range(DEPTH)]
    zygote = Zygote()
    workdir = Path(__file__).parent
    with Fleet(spec, names, folder / "log", zygote, workdir=workdir) as fleet:
        fleet.ready()
        checkpoint = fleet.initialise()
        watch = Watch(
            {
                name: status_bytes(machine.pid, "RssAnon", "RssShmem")
                for name, machine in fleet.machines.items()
            }
        )
        plan = make_plan(spec, DEPTH, 1, names, BLOCKS, schedule="1f1b", recompute=False)
        fleet.run(plan, checkpoint)
        steps, saved = follow(fleet, watch)
    zygote.close()
    return watch, steps, saved


def follow(fleet: Fleet, watch: Watch) -> tuple[dict[int, float], float]:
    """Watch workers from their start to the last step."""
    sampling = threading.Thread(target=watch.run)
    sampling.start()
    committed: dict[int, float] = {}
    saved: list[float] = []

    def take(name: str, report: Heard) -> bool:
        now = time.monotonic()
        if isinstance(report, messages.GenerationStarted):
            watch.pids[name] = report.pid
        elif isinstance(report, messages.MinibatchCommitted):
            committed[report.step] = now
        elif isinstance(report, messages.CheckpointSaved):
            saved.append(now)
        return True  # a report at a time has its own deadline

    while len(saved) < 2:
        fleet.wait_for("a report", take)
    watch.stop()
    sampling.join()
    return committed, saved[0]


def report_workers(watch: Watch, steps: dict[int, float], saved: float) -> None:
    section = LAYERS * (WIDTH * WIDTH + WIDTH) * FLOAT_BYTES * COPIES
    print(
        f"state of the model: {BLOCKS * section / MB:.0f} MB; forked baseline: "
        f"{max(watch.baselines.values()) / MB:.0f} MB"
    )
    # Reports may be read late, so a step between spans belongs to neither.
    spans = {
        "training": (0.0, steps[CHECKPOINT_EVERY - 2]),
        "saving": (steps[CHECKPOINT_EVERY - 1], saved),
        "after": (max(saved, steps[CHECKPOINT_EVERY + 2]), steps[STEPS - 2]),
    }
    print(f"{'stage':>5}{'share, MB':>12}", end="")
    print("".join(f"{name:>12}{'ratio':>8}" for name in spans))
    for stage, name in enumerate(watch.baselines):
        share = section * (BLOCKS // DEPTH + 1)
        print(f"{stage:>5}{share / MB:>12.1f}", end="")
        for begin, end in spans.values():
            growth = watch.peak(name, begin, end)
            print(f"{growth / MB:>12.1f}{growth / share:>8.3f}", end="")
        print()
    print("goal while training: at most 1.10")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        peak = manager_peak_bytes(Path(folder))
        print(f"manager of a tiny job: peak {peak / MB:.1f} MB resident; goal below 150")
    with tempfile.TemporaryDirectory() as folder:
        report_workers(*grow(Path(folder)))


if __name__ == "__main__":
    main()
