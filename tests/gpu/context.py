"""What a reader must know of the machine on which something was measured."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.devices import device_name, is_gpu, print_result


def _text(path: str) -> str:
    file = Path(path)
    return file.read_text().strip() if file.exists() else ""


def context() -> dict[str, Any]:
    """Return device, driver, versions, and limits of the system."""
    found: dict[str, Any] = {
        "device": device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "locked_memory_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0,
        "numa_nodes": _text("/sys/devices/system/node/online"),
        "shmem_huge_pages": _text("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "cgroup_cpu_max": _text("/sys/fs/cgroup/cpu.max"),
    }
    if is_gpu(device_name()):
        if dist.is_nccl_available():
            found["nccl"] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        fields = (
            "name,driver_version,memory.total,persistence_mode,pcie.link.gen.max,mig.mode.current"
        )
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        found["nvidia_smi"] = (run.stdout or run.stderr).strip()
    return found


if __name__ == "__main__":
    print_result(context())
