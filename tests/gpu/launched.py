"""A whole job from the command line, on this machine's GPU or on stand-ins for some.

    python -m tests.gpu.launched gpt2_124m --minibatch 64 --microbatch 8 --kills vm:10
    python -m tests.gpu.launched blank_jobs:gpt2_1558m --stand-in T4 --gpus 2
    python -m tests.gpu.launched blank_jobs:gpt2_124m --stand-in H100 --gpus 8 --vms 1

Says what was planned, how long the first and the last mini-batch took to come, and the
highest memory of a GPU and of all processes. On stand-ins (``tests/fakes/timed.py``) NVML is
faked along, and nothing larger than a few pages is computed unless ``--numbers`` is given. What
calibration measures of them, and so what is planned, is in declared time, but for messages and
for sums of hosts, which are measured in real time; what comes when is in real time, and beside it the declared
time of a mini-batch of one stage. ``--until`` ends a job before it saves a last checkpoint, which may be larger than the
disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fakes.gpus import FAKE_NVML, VARIABLE, FakeGpus
from tests.fakes.timed import Figures
from tests.gpu.devices import print_result
from tests.gpu.runs import WORKDIR

from spottrain.machine import OWNER_VARIABLE
from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.devices.open import STAND_IN
from tests import faults

ROOT = Path(__file__).parents[2]
FAKE_MEMORY = ROOT / "tests" / "fakes" / "memory"
MODELS = {"H100": ("NVIDIA H100 80GB HBM3", 90), "L4": ("NVIDIA L4", 89), "T4": ("Tesla T4", 75)}
"""Name and compute capability, as NVML has them."""
SHARE_BYTES = 20_000_000_000
"""Of a VM that shares a GPU."""
LOOK_S = 1.0
"""Between two looks at a job."""
_TOLD = ("state", "reason", "computes_on", "steps_done", "plans", "interruptions", "peak_bytes")
"""Of the report."""
_MEETINGS = 2
"""Sums in the hosts' memory of a mini-batch of one stage: what backwards have given, and losses."""
_OWN_MEMORY = ("Pss_Anon:", "Pss_Shmem:")


def environment_of(home: Path) -> dict[str, str]:
    """Return the environment of the command line, which is not installed everywhere."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SPOTTRAIN_HOME": str(home),
        OWNER_VARIABLE: "gpu",
    }


def stand_ins(
    folder: Path, model: str, count: int, scale: float = 0.0, *, numbers: bool = False
) -> tuple[FakeGpus, dict[str, str]]:
    """Return stand-ins for GPUs, and the environment in which they are this machine's."""
    name, capability = MODELS[model]
    gpus = FakeGpus(
        folder / "nvml.json",
        count,
        name=name,
        capability=capability,
        memory_bytes=Figures.of(model).memory_bytes,
        scale=scale,
        numbers=numbers,
    )
    paths = [str(FAKE_NVML), str(ROOT / "src"), str(ROOT)]
    return gpus, {
        "PYTHONPATH": os.pathsep.join(paths),
        VARIABLE: str(gpus.file),
        STAND_IN: "tests.fakes.timed",
    }


def job_file(folder: Path, chosen: argparse.Namespace) -> Path:
    """Write a job file; what it leaves out is as for any user."""
    job: dict[str, Any] = {
        "name": "gpu",
        "entrypoint": chosen.job if ":" in chosen.job else f"jobs:{chosen.job}",
        "workdir": str(WORKDIR),
        "minibatch_size": chosen.minibatch,
        "steps": chosen.steps,
        "budget": {"max_usd": 100.0},
        "resources": {"device": "gpu", "max_vms": chosen.vms or chosen.gpus},
        "checkpoint": {"every_steps": max(1, chosen.steps // 2)},
        "morphing": {"debounce_s": 2},
    }
    if chosen.microbatch:
        job["microbatch_size"] = chosen.microbatch
    if chosen.vms:
        zone: dict[str, Any] = {"capacity": chosen.vms}
        if chosen.vms > chosen.gpus:
            zone["slot_memory_bytes"] = SHARE_BYTES
        elif chosen.vms < chosen.gpus:
            zone["slots"] = chosen.gpus // chosen.vms
            job["runtime"] = {"network": "nccl"}  # gloo's real time says nothing
        job["local"] = {"zones": [zone]}
    file = folder / "job.yaml"
    file.write_text(json.dumps(job))  # which is YAML, too
    return file


def with_memory(more: Mapping[str, str], num_bytes: int) -> dict[str, str]:
    """Return an environment in which this machine has as much memory."""
    paths = os.pathsep.join((str(FAKE_MEMORY), more["PYTHONPATH"]))
    return {**more, "PYTHONPATH": paths, "FAKE_MEMORY_BYTES": str(num_bytes)}


def _command(*arguments: str) -> list[str]:
    cli = [sys.executable, "-m", "spottrain.start", "spottrain.varuna_manager.cli.main"]
    return [*cli, *arguments]


def launch(
    folder: Path, chosen: argparse.Namespace, more: Mapping[str, str], until: int = 0
) -> dict[str, Any]:
    """Launch a job, wait for its end, and return what its report says.

    Args:
        folder: For all its files.
        chosen: As ``main`` reads it.
        more: Of its environment.
        until: Mini-batch after which it is stopped without a checkpoint; 0: it comes to its end.
    """
    environment = {**environment_of(folder / "home"), **more}
    kills = [kill.split(":") for kill in chosen.kills.split(",") if kill]
    script: list[dict[str, Any]] = [
        {
            "hook": Hook.BACKWARD,
            "rank": 0,
            "action": f"kill_{what}",
            "step": int(step),
            "mark": str(folder / f"kill-{step}"),
        }
        for what, step in kills
    ]
    environment |= faults.environment_of(script) if script else {}
    began_s = time.time()
    command, log = _command("launch", str(job_file(folder, chosen))), folder / "launch.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process,
    ):
        host_bytes = _watch(process, folder / "home", environment, until)
    result: dict[str, Any] = {"exit_code": process.returncode, "launch_s": time.time() - began_s}
    result |= {"kills": sum(Path(one["mark"]).exists() for one in script)}
    result |= {"host_peak_bytes": host_bytes}
    asked = _command("report", "gpu", "-o", "json")
    told = subprocess.run(asked, check=False, capture_output=True, text=True, env=environment)
    if process.returncode:
        result["error"] = log.read_text(errors="replace")[-2000:]
    if told.returncode:
        return result
    report = json.loads(told.stdout)
    result |= {key: report[key] for key in _TOLD}
    if rows := _minibatches(folder / "home")[: until or None]:
        result["first_step_s"] = rows[0]["at_s"] - began_s
        result["last_step_s"] = rows[-1]["at_s"] - began_s
        result["step_s"] = [row["step_s"] for row in rows if "step_s" in row]
    if declared_s := _declared_s(folder):
        result["declared_step_s"] = declared_s
    return result


def _watch(
    process: subprocess.Popen[bytes], home: Path, environment: Mapping[str, str], until: int
) -> int:
    """Wait for the end of a launch; return the most memory that all processes had together."""
    most_bytes, stopped = 0, False
    while process.poll() is None:
        most_bytes = max(most_bytes, _memory_of(home))
        if until and not stopped and len(_minibatches(home)) >= until:
            stop = _command("stop", "gpu", "--now")
            subprocess.run(stop, check=False, capture_output=True, env=dict(environment))
            stopped = True
        time.sleep(LOOK_S)
    return most_bytes


def _minibatches(home: Path) -> list[dict[str, Any]]:
    """Return what the job has told of each mini-batch so far."""
    metrics = next(home.rglob("metrics.jsonl"), None)
    lines = [] if metrics is None else metrics.read_text().split("\n")[:-1]
    return list(map(json.loads, lines))


def _declared_s(folder: Path) -> float:
    """Return the time between the last two mini-batches of ranks that met; 0: none did."""
    files = sorted(folder.glob("*.times"))
    met_s = [float(line) for line in files[0].read_text().split()] if files else []
    return met_s[-1] - met_s[-1 - _MEETINGS] if len(met_s) > _MEETINGS else 0.0


def _memory_of(home: Path) -> int:
    """Return the memory of all processes of a job, what they share counted once (proc_pid_smaps(5),
    without pages of files)."""
    mark = f"SPOTTRAIN_HOME={home}".encode()
    total_kb = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                lines = (folder / "smaps_rollup").read_text().splitlines()
                kinds = (line.split() for line in lines if line.startswith("Pss_"))
                total_kb += sum(int(kb) for kind, kb, _ in kinds if kind in _OWN_MEMORY)
    return total_kb * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="of tests/gpu/jobs.py, or such as blank_jobs:gpt2_1558m")
    parser.add_argument("--minibatch", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=0, help="0: left to the planner")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--vms", type=int, default=0, help="that have the GPUs; 0: one each")
    parser.add_argument("--kills", default="", help="such as worker:3,vm:10, after mini-batches")
    parser.add_argument("--stand-in", choices=MODELS)
    parser.add_argument(
        "--scale", type=float, default=0.0, help="real seconds of a declared one; 0: virtual"
    )
    parser.add_argument("--numbers", action="store_true")
    parser.add_argument("--until", type=int, default=0, help="stop it after a mini-batch")
    parser.add_argument(
        "--host-gb", type=float, default=0.0, help="memory of each VM; 0: as this machine has"
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, more = Path(name), dict[str, str]()
        if chosen.stand_in:
            stood = folder, chosen.stand_in, chosen.gpus, chosen.scale
            _, more = stand_ins(*stood, numbers=chosen.numbers)
        if chosen.stand_in and chosen.host_gb:
            vms = chosen.vms or chosen.gpus
            more = with_memory(more, int(chosen.host_gb * 1e9) * vms)
        print_result(launch(folder, chosen, more, chosen.until))


if __name__ == "__main__":
    main()
