"""What the panel costs while 100 jobs are there and nothing happens.

One page, the list of all jobs, is open; the panel runs in a process of its own, whose CPU time
is read before and after.

    .venv/bin/python -m tests.bench.bench_ui
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from tests.unit.varuna_manager.story import Story

from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements

JOBS = 100
IDLE_S = 60.0
_SETTLE_S = 10.0


def write_jobs() -> None:
    """Put jobs on disk; their managers are gone."""
    story = Story().training("a", "b", steps=30)
    for number in range(JOBS):
        job = job_dir(f"job-{number:03}")
        job.path.mkdir(parents=True)
        with contextlib.closing(Journal(job.journal)) as journal:
            journal.append(*story.steps)
        Measurements(job.measurements).close()


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has taken (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        os.environ["SPOTTRAIN_HOME"] = home
        write_jobs()
        argv = [sys.executable, "-m", "spottrain.varuna_manager.cli.main", "ui", "--port", "0"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as panel:
            assert panel.stdout is not None
            url = panel.stdout.readline().strip()
            with httpx.stream("GET", f"{url}changes", timeout=None) as changes:
                next(changes.iter_lines())
                begun_s = cpu_s(panel.pid)
                httpx.get(url, timeout=None).raise_for_status()
                first_s = cpu_s(panel.pid) - begun_s
                begun_s = cpu_s(panel.pid)
                httpx.get(url, timeout=None).raise_for_status()
                again_s = cpu_s(panel.pid) - begun_s
                time.sleep(_SETTLE_S)
                begun_s, began_at_s = cpu_s(panel.pid), time.monotonic()
                time.sleep(IDLE_S)
                used = (cpu_s(panel.pid) - begun_s) / (time.monotonic() - began_at_s)
            panel.terminate()
    print(f"{JOBS} jobs, one page open: {used:.1%} of a core while nothing happens")
    print(f"the list is read in {first_s:.2f} s of CPU at first, again in {again_s:.2f} s")


if __name__ == "__main__":
    main()
