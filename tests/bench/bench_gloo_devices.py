"""Whether several gloo devices a process move messages faster than one.

Two ranks send each other activations and gradients at the same time, as neighbours in a
pipeline do. gloo has one thread and one connection for each device, that is for each name in
``GLOO_SOCKET_IFNAME``; torch chooses the device by the message's tag. Ways: loopback, and a
pair of virtual Ethernet devices between two network namespaces (needs root). CPU seconds count
where other work shares the machine, wall time where it is idle.

    python -m tests.bench.bench_gloo_devices --megabytes 6 25 --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from spottrain.pipeline.comm.groups import join, leave, open_rendezvous, world

DEVICES = (1, 4)
TAGS = (2, 5)
"""Of payloads of activations and gradients (``pipeline.comm.p2p``): of different devices where
there are four."""
WARM, COUNTED = 2, 8
_TIMEOUT_S = 600.0


def exchange(num_bytes: int) -> None:
    """Send and receive two messages each way, all at the same time."""
    peer = 1 - world().rank
    sent = torch.ones(num_bytes, dtype=torch.uint8)
    received = [torch.empty(num_bytes, dtype=torch.uint8) for _ in TAGS]
    works: list[dist.Work] = []
    for tag, memory in zip(TAGS, received, strict=True):
        works.append(world().receive(memory, peer, tag))
    world().barrier()
    works += [world().send(sent, peer, tag) for tag in TAGS]
    for work in works:
        work.wait()


def cpu_s() -> float:
    """Return the CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def be_rank(rank: int, host: str, port: int, sizes: list[int]) -> None:
    """Be one of two ranks; the first prints what it measured, as JSON."""
    torch.set_num_threads(1)
    store = open_rendezvous(host, port, is_server=rank == 0, timeout_s=_TIMEOUT_S)
    if rank == 0:
        print(store.port, flush=True)  # type: ignore[attr-defined]
    join(store, "bench", rank, 2, _TIMEOUT_S)
    assert isinstance(world().group, ProcessGroup)
    for num_bytes in sizes:
        for _ in range(WARM):
            exchange(num_bytes)
        cpu, began_s = cpu_s(), time.perf_counter()
        for _ in range(COUNTED):
            exchange(num_bytes)
        wall_s, used_s = time.perf_counter() - began_s, cpu_s() - cpu
        moved = 2 * len(TAGS) * num_bytes * COUNTED / 1e9
        if rank == 0:
            row = {"bytes": num_bytes, "gb_per_s": moved / wall_s, "cpu_s_per_gb": used_s / moved}
            print(json.dumps(row), flush=True)
    world().barrier()
    leave()


def measure(names: tuple[str, str], devices: int, sizes: list[int]) -> list[dict[str, float]]:
    """Return what two ranks measured.

    Args:
        names: Network namespaces of the ranks; empty: this one, over loopback.
        devices: gloo's, of each rank.
        sizes: Of messages.
    """
    interface, host = ("veth", "10.78.0.1") if names[0] else ("lo", "127.0.0.1")
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": ",".join([interface] * devices),
        "OMP_NUM_THREADS": "1",
    }

    def start(rank: int, port: int) -> subprocess.Popen[str]:
        inside = ["ip", "netns", "exec", names[rank]] if names[rank] else []
        module = [sys.executable, "-m", "tests.bench.bench_gloo_devices"]
        arguments = ["--rank", str(rank), "--at", host, str(port), "--bytes", *map(str, sizes)]
        return subprocess.Popen(
            [*inside, *module, *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )

    with start(0, 0) as first:
        assert first.stdout is not None
        with start(1, int(first.stdout.readline())):
            return [json.loads(line) for line in first.stdout]


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Yield two network namespaces that a pair of virtual Ethernet devices joins."""
    names = (f"st{os.getpid()}-0", f"st{os.getpid()}-1")
    lines = [f"netns add {name}" for name in names]
    lines += [f"link add veth netns {names[0]} type veth peer name veth netns {names[1]}"]
    try:
        _ip(*lines)
        for number, name in enumerate(names):
            _ip(
                *(f"-n {name} link set lo up", f"-n {name} link set veth up"),
                f"-n {name} addr add 10.78.0.{number + 1}/24 dev veth",
            )
        yield names
    finally:
        _ip(*(f"netns del {name}" for name in names))


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def main() -> None:
    """Measure both ways in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[6, 25])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--at", nargs=2)
    parser.add_argument("--bytes", type=int, nargs="+")
    asked = parser.parse_args()
    if asked.rank is not None:
        be_rank(asked.rank, asked.at[0], int(asked.at[1]), asked.bytes)
        return
    sizes = [megabytes * 1_000_000 for megabytes in asked.megabytes]
    print("way       devices  message    GB/s in and out   CPU s/GB")
    with contextlib.ExitStack() as stack:
        ways = {"loopback": ("", "")}
        try:
            ways["veth"] = stack.enter_context(namespaces())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no virtual Ethernet devices here: {error}")
        for way, names in ways.items():
            rows: dict[tuple[int, float], list[dict[str, float]]] = {}
            for _ in range(asked.rounds):
                for devices in DEVICES:
                    for row in measure(names, devices, sizes):
                        rows.setdefault((devices, row["bytes"]), []).append(row)
            for (devices, num_bytes), found in sorted(rows.items(), key=lambda one: one[0][::-1]):
                speed = statistics.median(row["gb_per_s"] for row in found)
                used = statistics.median(row["cpu_s_per_gb"] for row in found)
                print(
                    f"{way:<9} {devices:>7}  {num_bytes / 1e6:>4.0f} MB  {speed:>17.2f} {used:>10.2f}"
                )


if __name__ == "__main__":
    main()
