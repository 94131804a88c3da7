"""Does memory of a GPU outlive the process that made it, and when is that one harmless?

A writer makes memory, fills it, sends its file descriptor here and lets a kernel count
in it for ever; then it is killed. This process, the holder, makes no CUDA call and keeps
the descriptor, with or without the GPU's device files open. Afterwards a successor maps
the memory and reads all of it. In other runs a watcher has it mapped while the writer
dies, and notes when the counter has moved last.

    python -m tests.gpu.memory_survival --kills 20 --mib 1024 --seconds 100
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.gpu.devices import device_name, memory_in_use, print_result
from tests.gpu.gpu_memory import PATTERN_FROM, create, is_whole, map_again

MIB = 1 << 20
_COUNTING_S = 0.2
"""How long the kernel counts before the kill."""
_WATCHED_S = 0.5
"""How long the counter is watched after the kill."""


class Process:
    """A process with a role, and a socket to it."""

    def __init__(self, role: str, *args: object) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.began = time.monotonic()
        number = theirs.fileno()
        command = [sys.executable, "-m", __spec__.name, "--role", role, str(number)]
        self._process = subprocess.Popen(
            [*command, *map(str, args)], pass_fds=[number], stdout=sys.stderr
        )
        theirs.close()
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        """Return its next message, and the file descriptors that came with it."""
        data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 1)
        if not data:
            raise RuntimeError(f"process {self.pid} ended early: see its error above")
        return json.loads(data), list(fds)

    def tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send it a message."""
        socket.send_fds(self.socket, [json.dumps(message).encode()], list(fds))

    def kill(self) -> tuple[float, float]:
        """Kill it; return when that was done, and when its end was seen."""
        killed = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        select.select([self.pidfd], [], [])
        return killed, time.monotonic()

    def close(self) -> None:
        """End it, if it still runs."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        self.socket.close()
        os.close(self.pidfd)


# --- Roles of processes -----------------------------------------------------------------


def write(link: socket.socket, device: str, num_bytes: int, value: int) -> None:
    """Make memory, fill it, send it, count in it."""
    memory = create(device, num_bytes)
    fresh = memory.read(PATTERN_FROM, min(64 * MIB, num_bytes - PATTERN_FROM))
    memory.fill(value)
    text = json.dumps({"was_zero": not any(fresh)})
    socket.send_fds(link, [text.encode()], [memory.fd])
    memory.count_for_ever()
    link.sendall(b'{"counts": true}')
    while link.recv(1):
        pass


def succeed(link: socket.socket, device: str, num_bytes: int, value: int) -> None:
    """Map memory that another process has left; read all of it."""
    _, fds, _, _ = socket.recv_fds(link, 1 << 16, 1)
    began = time.monotonic()
    memory = map_again(device, num_bytes, fds[0])
    mapped = time.monotonic()
    whole = is_whole(memory, num_bytes, value)
    link.sendall(
        json.dumps(
            {
                "whole": bool(whole),
                "counted": int.from_bytes(memory.read(0, 8), "little"),
                "context_and_map_s": mapped - began,
                "at": mapped,
            }
        ).encode()
    )


def watch(link: socket.socket, device: str, num_bytes: int, value: int) -> None:
    """Map memory; note when its counter moves, until told to stop."""
    del value  # of no interest here
    _, fds, _, _ = socket.recv_fds(link, 1 << 16, 1)
    memory = map_again(device, num_bytes, fds[0])
    link.sendall(b'{"watches": true}')
    last, moved_at = b"", 0.0
    gaps: list[float] = []
    while not select.select([link], [], [], 0)[0]:
        now = memory.read(0, 8)
        if now != last:
            at = time.monotonic()
            gaps.append(at - moved_at)
            last, moved_at = now, at
    link.recv(1 << 16)
    result = {"moved_at": moved_at, "moves": len(gaps), "gap_s": max(gaps[1:] or [0])}
    link.sendall(json.dumps(result).encode())


ROLES = {"write": write, "succeed": succeed, "watch": watch}


# --- Experiments ------------------------------------------------------------------------


def start_writer(device: str, num_bytes: int, value: int) -> tuple[Process, int, bool]:
    """Return a writer that counts, its memory, and whether that was zero when new."""
    writer = Process("write", device, num_bytes, value)
    try:
        message, fds = writer.hear()
        writer.hear()
    except BaseException:
        writer.close()
        raise
    return writer, fds[0], message["was_zero"]


def survive(device: str, num_bytes: int, value: int, *, with_files: bool) -> Any:
    """Kill a writer that alone has the memory mapped; let a successor read it."""
    files = device_files() if with_files else []
    writer, fd, was_zero = start_writer(device, num_bytes, value)
    try:
        time.sleep(_COUNTING_S)
        before = memory_in_use(device)
        killed, seen = writer.kill()
        held = memory_in_use(device)
        successor = Process("succeed", device, num_bytes, value)
        try:
            successor.tell({}, [fd])
            found, _ = successor.hear()
        finally:
            successor.close()
        os.close(fd)
        return {
            "with_device_files": with_files,
            "whole": found["whole"],
            "counted": found["counted"],
            "new_memory_was_zero": was_zero,
            "holder_has_open": held_files(),
            "death_seen_s": seen - killed,
            "in_use_before_mib": before,
            "in_use_held_mib": held,
            "in_use_after_mib": memory_in_use(device),
            "context_and_map_s": found["context_and_map_s"],
            "start_to_mapped_s": found["at"] - successor.began,
        }
    finally:
        writer.close()
        for file in files:
            os.close(file)


def fence(device: str, num_bytes: int, value: int) -> Any:
    """Kill a writer while another process has the memory mapped, and watches it."""
    writer, fd, _ = start_writer(device, num_bytes, value)
    watcher = Process("watch", device, num_bytes, value)
    try:
        watcher.tell({}, [fd])
        watcher.hear()
        time.sleep(_COUNTING_S)
        _, seen = writer.kill()
        time.sleep(_WATCHED_S)
        watcher.tell({})
        found, _ = watcher.hear()
        os.close(fd)
        return {
            "last_write_after_pidfd_s": found["moved_at"] - seen,
            "longest_gap_s": found["gap_s"],
            "moves": found["moves"],
        }
    finally:
        watcher.close()
        writer.close()


def device_files() -> list[int]:
    """Open the GPU's device files, as a holder would without a CUDA call."""
    names = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("nvidiactl")]
    return [os.open(name, os.O_RDWR | os.O_CLOEXEC) for name in names]


def held_files() -> list[str]:
    """Return the GPU's files that this process has open; that of memory is one too."""
    links = Path("/proc/self/fd").iterdir()
    paths = [os.readlink(link) for link in links if link.is_symlink()]
    return sorted(path for path in paths if path.startswith("/dev/nvidia"))


def measure(kills: int, mib: int, large_mib: int, seconds: float) -> dict[str, Any]:
    """Run everything until the time is over; keep what came out before an error."""
    device = device_name()
    end = time.monotonic() + seconds
    survivals: list[Any] = []
    fences: list[Any] = []
    result = {"device": device, "survivals": survivals, "fences": fences}
    try:
        for number in range(kills):
            if time.monotonic() > end:
                break
            value, with_files = 0x5EED0000 + number, number % 2 == 1
            survivals.append(survive(device, mib * MIB, value, with_files=with_files))
            if number % 4 == 3:
                fences.append(fence(device, mib * MIB, value))
        if large_mib and time.monotonic() < end:
            result["large"] = survive(device, large_mib * MIB, 0x1A26E, with_files=False)
    except (RuntimeError, OSError, ImportError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    return result | summary(survivals, fences)


def summary(survivals: Sequence[Any], fences: Sequence[Any]) -> dict[str, Any]:
    """Return the numbers that a table shows."""
    if not survivals:
        return {}
    whole = [one["whole"] for one in survivals]
    starts = [one["start_to_mapped_s"] for one in survivals]
    found = {
        "kills": len(whole),
        "whole": sum(whole),
        "start_to_mapped_s": statistics.median(starts),
        "new_memory_was_zero": all(one["new_memory_was_zero"] for one in survivals),
    }
    if fences:
        late = [one["last_write_after_pidfd_s"] for one in fences]
        found["latest_write_after_pidfd_s"] = max(late)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", nargs=5)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--large-mib", type=int, default=20 * 1024)
    parser.add_argument("--seconds", type=float, default=100.0)
    chosen = parser.parse_args()
    if chosen.role is None:
        sizes = chosen.mib, chosen.large_mib
        print_result(measure(chosen.kills, *sizes, chosen.seconds))
        return
    role, number, device, num_bytes, value = chosen.role
    with socket.socket(fileno=int(number)) as link:
        ROLES[role](link, device, int(num_bytes), int(value))


if __name__ == "__main__":
    main()
