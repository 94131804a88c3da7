"""All that is measured on a GPU, in one go: every part in a process of its own.

Parts whose times matter little run side by side, before those that need it alone.

    python3 -m tests.bench.bench_gpu --json gpu.json [--only speed_124m,bits] [--seconds 570]

The machine needs Python 3.11 or newer, torch with CUDA, numpy, safetensors, numba,
cuda-bindings and nvidia-ml-py; the tests of tests/gpu also pytest, pytest-timeout and
hypothesis. Nothing else is imported by what runs here; packages that the machine lacks
can be put on PYTHONPATH. spottrain itself need not be installed: run it from the root of
the repository.

Every result is kept as soon as there is one, also if a later part fails or is late. With
``SPOTTRAIN_TEST_DEVICE=deferred:7`` everything runs on the stand-in for a GPU, small.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.processes import ROOT
from tests.gpu.devices import NoGpuError, device_name, is_gpu


@dataclass(frozen=True)
class Part:
    """One measurement: a module, what it is told on a GPU, and how long it may take."""

    module: str
    options: str
    seconds: float
    small: str
    """What it is told on a stand-in."""
    alone: bool = True
    """Whether it needs the GPU for itself."""


PARTS = {
    "waits": Part("hidden_syncs", "", 60, "", alone=False),
    "bits": Part("exactness", "--job gpt2_124m --seconds 90", 110, "--job small", alone=False),
    "survival": Part(
        "memory_survival",
        "--kills 20 --mib 1024 --large-mib 20480 --seconds 90",
        110,
        "--kills 4 --mib 16 --large-mib 32",
        alone=False,
    ),
    "recovery": Part("recovery", "--job gpt2_124m --kills 3", 90, "--job small --kills 1"),
    "speed_124m": Part(
        "speed",
        "gpt2_124m --microbatch 16 --minibatch 512 --turns 2 --steps 2 --predict",
        240,
        "small --microbatch 2 --minibatch 8 --turns 1 --steps 1 --predict",
    ),
    "evacuation": Part("evacuation", "--mib 4096 --hang-s 8", 60, "--mib 16 --hang-s 2"),
    "peers": Part(
        "broken_peers",
        "--mb 1,4,16,64 --reduce-mb 500 --kills 10 --seconds 80",
        100,
        "--mb 1,2 --reduce-mb 10 --kills 2",
    ),
    "nccl": Part("nccl_alone", "--mb 500 --hang-s 8", 60, "--mb 10 --hang-s 1"),
    "speed_1558m": Part(
        "speed",
        "gpt2_1558m --microbatch 4 --minibatch 512 --turns 1 --steps 1 --apart "
        "--variants plain,fast_device,fast_host,exact_device",
        400,
        "small --microbatch 2 --minibatch 8 --turns 1 --steps 1 --apart "
        "--variants plain,fast_device,fast_host,exact_device",
    ),
}
"""In this order: what later decisions need first comes first."""


def machine() -> dict[str, Any]:
    """Return device, driver and versions."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "device": device_name(),
    }
    text = "import torch; print(torch.__version__, torch.version.cuda)"
    command = [sys.executable, "-c", text]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found["torch"], found["cuda"] = run.stdout.split()
    if is_gpu(device_name()):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device_name().partition(":")[2])
        found["model"] = pynvml.nvmlDeviceGetName(handle)
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        found["persistence"] = bool(pynvml.nvmlDeviceGetPersistenceMode(handle))
        pynvml.nvmlShutdown()
    return found


def run(part: Part, seconds: float) -> dict[str, Any]:
    """Run a part; return its result, or why there is none."""
    options = part.options if is_gpu(device_name()) else part.small
    command = [sys.executable, "-m", f"tests.gpu.{part.module}", *options.split()]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    began, late = time.monotonic(), False
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, errors = process.communicate()
            late = True
    lines = [line for line in out.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if late or not lines:
        reason = f"took more than {seconds:.0f} s; " if late else ""
        result["error"] = reason + errors[-2000:]
    return {**result, "took_s": time.monotonic() - began}


def tables(results: Mapping[str, Any]) -> Iterable[str]:
    """Yield the results as Markdown."""
    yield f"Machine: {results['machine']}"
    for name in ("speed_124m", "speed_1558m"):
        if variants := results.get(name, {}).get("variants"):
            yield from speed_table(name, results[name], variants)
    for name, result in results.items():
        if name != "machine":
            yield f"\n### {name}, {result['took_s']:.0f} s\n"
            yield from summary(name, result)


def speed_table(name: str, result: Mapping[str, Any], variants: Mapping[str, Any]) -> Iterable[str]:
    """Yield the table of a model's variants."""
    batches = f"micro-batch {result['microbatch']}, mini-batch {result['minibatch']}"
    yield f"\n### {name}: {batches}\n"
    yield "| variant | median, s | tokens/s | MFU | of plain | peak, GB |"
    yield "|---|---|---|---|---|---|"
    for variant, one in variants.items():
        peak = one["peak_bytes"]
        yield (
            f"| {variant} | {one['median_s']:.3f} | {one['tokens_per_s']:,.0f} | "
            f"{one.get('mfu', 0.0):.1%} | {one.get('of_plain', 0.0):.3f} | "
            f"{'-' if peak is None else f'{peak / 1e9:.2f}'} |"
        )


SHOWN = {
    "recovery": ("parts", "median"),
    "speed_124m": ("predictions", "recompute"),
    "speed_1558m": (),
    "waits": ("fast host", "fast device", "exact host", "exact device"),
    "bits": ("device_is_exact", "host_is_exact"),
    "survival": (
        "kills",
        "whole",
        "start_to_mapped_s",
        "new_memory_was_zero",
        "latest_write_after_pidfd_s",
    ),
    "evacuation": ("locked before", "locked during", "pageable"),
    "peers": ("sender", "receiver", "hangs", "longest_to_error_s"),
    "nccl": ("nccl", "idle", "hung"),
}
"""What a reader wants to see first."""


def summary(name: str, result: Mapping[str, Any]) -> Iterable[str]:
    """Yield the numbers of a part that has no table."""
    for key in (*SHOWN[name], "error"):
        if key in result:
            yield f"- {key}: {json.dumps(result[key])}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=570.0, help="for everything")
    chosen = parser.parse_args(arguments)
    try:
        device_name()
    except NoGpuError as error:
        print(f"nothing measured: {error}")
        return
    end = time.monotonic() + chosen.seconds
    results: dict[str, Any] = {"machine": machine()}
    lock = threading.Lock()

    def measure(name: str) -> None:
        if (left := end - time.monotonic()) < 10:
            print(f"{name}: no time left", file=sys.stderr)
            return
        found = run(PARTS[name], min(PARTS[name].seconds, left))
        with lock:
            results[name] = found
            chosen.json.write_text(json.dumps(results, indent=1))
        took_s, came = found["took_s"], found.get("error", "done")
        print(f"{name}: {took_s:.0f} s, {str(came)[-300:]}", file=sys.stderr)

    names = chosen.only.split(",")
    beside = [name for name in names if not PARTS[name].alone]
    with ThreadPoolExecutor(len(PARTS)) as pool:
        list(pool.map(measure, beside))
    for name in names:
        if PARTS[name].alone:
            measure(name)
    for line in tables(results):
        print(line)


if __name__ == "__main__":
    main()
