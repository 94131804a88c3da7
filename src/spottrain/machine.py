"""Facts about this machine that measured times depend on: device, software, computer.

Standard library only: asked on both sides of the torch border, with the same answers.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spottrain import __version__
from spottrain.wire.model import GpuFacts

OUTPUT_VARIABLES = {"PYTHONIOENCODING": "utf-8:backslashreplace"}
"""Set where user code runs: what it prints goes to a log, whatever the terminal of whoever
launched the job can show."""
SUPERVISOR_VARIABLES = {
    **OUTPUT_VARIABLES,
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Set before a supervisor imports torch: it must stay safe to fork. Threads of its own
would forbid that, as would CUDA, which ``torch.cuda.is_available()`` would initialise."""
_ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Set for supervisors unless the user has: a GPU's memory is less broken up by stages of
changing sizes (torch documentation, CUDA semantics, memory management)."""
OWNER_VARIABLE = "SPOTTRAIN_JOB"
"""In the environment of a supervisor and its workers: whose GPUs they compute on. The
kernel shows a forked process's as it was when the process it comes from was started."""
_ONE_THREAD = ", 1 thread"
"""Ends the names of CPUs as devices."""
_SHARED = re.compile(r", 1/(\d+) each$")
_CPU_INFO = Path("/proc/cpuinfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMORY_INFO = Path("/proc/meminfo")
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_STATUS = Path("/proc/self/status")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_CAP_IPC_LOCK = 14


def supervisor_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a supervisor, given that of its VM."""
    return {**_ALLOCATOR_VARIABLES, **environment, **SUPERVISOR_VARIABLES}


def owner(job: str) -> str:
    """Return who uses the GPUs that ``job`` uses here: the job, or its pool."""
    return os.environ.get(OWNER_VARIABLE) or job


def device(gpus: Sequence[GpuFacts] = (), shares: Sequence[float] = ()) -> str:
    """Return the compute device of this machine's slots (``Profile.device``).

    A GPU's name, with a slot's share of it where several share one: they compute slower.
    Or a CPU's: there workers use one thread each.

    Args:
        gpus: The GPUs that the slots drive; none: they compute on CPUs.
        shares: Of each slot: its share of its GPU.
    """
    if gpus:
        names = " and ".join(sorted({gpu.name for gpu in gpus}))
        sharing = round(1 / min(shares, default=1.0))
        return f"{names}, 1/{sharing} each" if sharing > 1 else names
    name = platform.machine()
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
                break
    return f"{name}{_ONE_THREAD}"


def is_cpu(device: str) -> bool:
    """Return whether a device of this name, as ``device`` makes it, is a CPU."""
    return device.endswith(_ONE_THREAD)


def cpu_name(device: str) -> str:
    """Return the name of a CPU, from that of the device."""
    return device.removesuffix(_ONE_THREAD)


def gpu_share(device: str) -> float:
    """Return the share of its GPU that a slot has, by the name of its device."""
    found = _SHARED.search(device)
    return 1 / int(found[1]) if found else 1.0


def software() -> str:
    """Return the versions that measured times depend on (``Profile.software``).

    A build of torch brings CUDA's libraries and their kernels with it. The driver is left
    out: it launches these kernels and changes with every image of a cloud.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return f"spottrain {__version__}, torch {torch}, python {platform.python_version()}"


def machine_id() -> str:
    """Return a name of this computer, the same in all its VMs that share its kernel."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()


def cores() -> int:
    """Return how many cores this process may use."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    first = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    for quota, period in _group_limits("cpu", ("cpu.max",), first):
        if quota.isdigit():
            allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def _group_limits(
    controller: str, names: Sequence[str], first_names: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the limits of this process's control groups, and of those around them.

    Args:
        controller: What is limited.
        names: Files of a group that say so (kernel documentation, cgroup-v2).
        first_names: The same in the first version (cgroup-v1), which containers still have.
    """
    lines = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, files = (_GROUPS / controller, first_names) if controllers else (_GROUPS, names)
        own = root / path.strip("/")
        for folder in (own, *own.parents[: len(own.parts) - len(root.parts)]):
            with contextlib.suppress(OSError):  # a container does not see those around it
                yield " ".join((folder / name).read_text() for name in files).split()


def run_near(pci_address: str, threads: int) -> None:
    """Let this process run on the NUMA node of a PCI device, where what it touches first is
    allocated, too.

    Nothing changes where that is not known, or the node has fewer cores for it than threads.
    """
    if sys.platform != "linux":
        return
    try:
        node = int((_PCI_DEVICES / pci_address / "numa_node").read_text())  # -1: unknown
        ranges = (_NODES / f"node{node}" / "cpulist").read_text().strip().split(",")
        bounds = [[*map(int, one.split("-"))] for one in ranges]
    except (OSError, ValueError):
        return
    near = {core for first, *last in bounds for core in range(first, (*last, first)[0] + 1)}
    allowed = os.sched_getaffinity(0)
    if threads <= len(near & allowed) < len(allowed):
        os.sched_setaffinity(0, near & allowed)


def memory_bytes() -> int:
    """Return the memory of this computer, or less if this process's group may use less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = _group_limits("memory", ("memory.max",), ("memory.limit_in_bytes",))
    return min([total, *(int(limit) for (limit,) in limits if limit.isdigit())])


def shared_memory_bytes() -> int:
    """Return the size of ``/dev/shm``; 0: there is none, or it cannot be written to."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks if os.access(_SHARED_MEMORY, os.W_OK) else 0


def locked_memory_bytes(*, raised: bool = False) -> int:
    """Return how much a process may page-lock; 0: there is no limit.

    With ``raised``, once it has raised its limit as far as it may. The capability that lifts it is a bit of ``CapEff`` (capabilities(7), proc(5)).
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[raised]
    if limit == resource.RLIM_INFINITY or _may_lock_all():
        return 0
    return max(limit, 1)


def _may_lock_all() -> bool:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return False
    effective = (line.split()[1] for line in lines if line.startswith("CapEff:"))
    return any(int(bits, 16) >> _CAP_IPC_LOCK & 1 for bits in effective)


def raise_locked_memory_limit() -> None:
    """Let this process and its children page-lock all that they may be allowed to.

    Anybody may raise the soft limit to the hard one, root both of them (getrlimit(2)).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    for limit in (resource.RLIM_INFINITY, hard):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            return


def available_bytes() -> int:
    """Return the memory that programs could still allocate."""
    if _MEMORY_INFO.exists():
        for line in _MEMORY_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
