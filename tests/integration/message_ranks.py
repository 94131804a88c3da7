"""Ranks that send each other messages, forked from one process that has imported torch.

    python -m tests.integration.message_ranks

Its exit code is 0 if all went well.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from tests.fakes.deferred import DeferredDevice
from tests.unit.pipeline.memory import LocalHolder

from spottrain.activity import Activity
from spottrain.pipeline.comm import device_group
from spottrain.pipeline.comm.collectives import gather_json, gather_rows
from spottrain.pipeline.comm.device_group import TrialGroups
from spottrain.pipeline.comm.groups import (
    GenerationBrokenError,
    join,
    leave,
    new_groups,
    open_rendezvous,
)
from spottrain.pipeline.comm.p2p import Direction, LinkOf, PipelineLinks, through_hosts
from spottrain.pipeline.comm.tensor_group import TensorGroup
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.model.sections import TensorSpec
from spottrain.pipeline.state import staging
from spottrain.pipeline.state.arena import SectionArena

TIMEOUT_S = 600.0
device_group.TRIAL_BOUND_S = TIMEOUT_S  # it is for what hangs, not for a busy machine
MOST = 5
SHAPES = ((2, 3), (2, 3), (2, 3), (4,), (2, 3), (4,), (4,), (4,), (7, 1, 2), (4,))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def gathers(rank: int, size: int) -> None:
    """Every rank gets every rank's row or text, time after time."""
    for length in (0, 3, 4094, 4095, 100_000):
        texts = gather_json(str(rank) * length if rank == size - 1 else None)
        assert texts == [None] * (size - 1) + [str(size - 1) * length]
    for turn in range(4):
        rows = gather_rows(torch.tensor([rank, turn], dtype=torch.float64))
        assert rows.tolist() == [[other, turn] for other in range(size)], rows


def tensors_of_any_look(rank: int, size: int) -> None:
    """What is sent arrives in order as it was, in whatever portions it is expected."""
    trial = TrialGroups(DeferredDevice(rank))
    assert trial.form([], rank, TIMEOUT_S, [(0, 1), (1, 0)]), trial.failure
    _send_tensors_of_any_look(rank, HostDevice(), through_hosts)
    _send_tensors_of_any_look(rank, DeferredDevice(rank), through_hosts)
    _send_tensors_of_any_look(rank, DeferredDevice(rank), trial.link)
    assert trial.close()


def _send_tensors_of_any_look(rank: int, device: HostDevice, link_of: LinkOf) -> None:
    sent = [
        torch.full(shape, float(n), dtype=DTYPES[n % len(DTYPES)])
        for n, shape in enumerate(SHAPES * 3)
    ]
    sent += [torch.full((300, 1000), float(n)) for n in range(5)]
    pictures = torch.arange(120.0).view(2, 3, 4, 5), torch.arange(240.0).view(2, 3, 4, 5, 2)
    layouts = torch.channels_last, torch.channels_last_3d
    sent += [one.to(memory_format=to) for one, to in zip(pictures, layouts, strict=True)]
    sent += pictures
    if rank == 0:
        links = PipelineLinks(None, 1, device, link_of=link_of)
        for tensor in sent:
            links.send(Direction.ACTIVATION, [tensor])
        links.flush()
    else:
        links = PipelineLinks(0, None, device, link_of=link_of)
        for count in (1, 2, len(sent) - 3):
            links.expect(Direction.ACTIVATION, count)
        for tensor in sent:
            arrival = links.arrival(wait=True)
            assert arrival is not None
            (received,) = arrival.activations_on(device)
            assert received.dtype == tensor.dtype
            assert received.stride() == tensor.stride()
            assert torch.equal(received, tensor), (received, tensor)
    links.close()


def groups_send_each_tensor_once_and_get_all_of_it(rank: int, size: int) -> None:
    """Two groups of ranks that divide matrices: each rank carries a part, if it comes out even."""
    groups = [(0, 1), (2, 3)]
    gloo = new_groups(groups, TIMEOUT_S)
    ranks = groups[rank // 2]
    for device in (HostDevice(), DeferredDevice(rank)):
        group = TensorGroup(ranks, rank, device, gloo[ranks], None, Activity())
        if rank < 2:
            links = PipelineLinks(None, rank + 2, device, "own", (None, group))
        else:
            links = PipelineLinks(rank - 2, None, device, "own", (group, None))
        sent = [
            torch.arange(math.prod(shape), device=device.torch_device).to(dtype).view(shape)
            for shape in ((4, 6), (4, 6), (4, 6), (3, 5), (2, 3, 4, 5), ())
            for dtype in (*DTYPES, torch.bool)
        ]
        sent.append(sent[-8].to(memory_format=torch.channels_last))
        for tensor in sent:
            if rank < 2:
                links.send(Direction.ACTIVATION, [tensor, None])
                continue
            links.expect(Direction.ACTIVATION, 1)
            arrival = links.arrival(wait=True)
            assert arrival is not None
            (carried, nothing), (received,) = arrival.tensors, arrival.activations_on(device)
            assert carried is not None
            assert nothing is None
            parts = 1 if tensor.numel() % 2 else 2
            assert carried.transfer.target.numel() * parts == tensor.numel()
            assert received.dtype == tensor.dtype
            assert received.stride() == tensor.stride()
            assert torch.equal(received, tensor), (received, tensor)
        links.flush()
        links.close()


def a_cut_ends_what_is_awaited(rank: int, size: int) -> None:
    """Receives that were posted ahead end with the connections."""
    links = (
        PipelineLinks(None, 1, HostDevice()) if rank == 0 else PipelineLinks(0, None, HostDevice())
    )
    if rank == 1:
        links.expect(Direction.ACTIVATION, 3)
        for _ in range(2):
            links.arrival(wait=True)
        try:
            links.arrival(wait=True)
        except GenerationBrokenError:
            links.close()
            os._exit(0)
        raise AssertionError("nothing was to arrive any more")
    for _ in range(2):
        links.send(Direction.ACTIVATION, [torch.ones(10)])
    links.flush()
    os._exit(0)


class NotStarting(DeferredDevice):
    """A device on which the first sum fails, as where NCCL finds no way to its peers."""

    def synchronise(self) -> None:
        raise RuntimeError("no route to host\nsee the log")


def a_library_that_one_rank_cannot_start_is_done_without(rank: int, size: int) -> None:
    everybody = tuple(range(size))
    for device, formed in (
        (NotStarting if rank == 1 else DeferredDevice, False),
        (DeferredDevice, True),
    ):
        trial = TrialGroups(device(rank))
        assert trial.form([everybody], rank, TIMEOUT_S) is formed
        expected = "" if formed else "RuntimeError: no route to host"
        assert trial.failure == expected, trial.failure
        assert trial.close()
    assert not TrialGroups(HostDevice()).form([everybody], rank, TIMEOUT_S)
    assert gather_rows(torch.tensor([rank])).flatten().tolist() == list(everybody)


class Counting(DeferredDevice):
    """A device that counts the page-locked memory that is held."""

    held_bytes = most_bytes = 0

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory that is counted as long as it lives."""
        memory = super().allocate_host(shape, dtype)
        storage = memory.untyped_storage()
        self.held_bytes += storage.nbytes()
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        weakref.finalize(storage, self._count_off, storage.nbytes())
        return memory

    def _count_off(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


def sections_of_any_size_move_through_little_locked_memory(rank: int, size: int) -> None:
    """Both ranks send and receive; the first one's are on its device."""
    staging.PIECE_BYTES = 1 << 12
    peer = 1 - rank
    for length in (10_000, 40_000):
        state = {"average": TensorSpec(shape=(length,), dtype=torch.float32)}
        specs = (ParameterSpec("weight", (length,), torch.float32, True, state),)
        device, holder = Counting(rank), LocalHolder()
        home = device if rank == 0 else None
        arenas = [SectionArena(holder, k, specs, home) for k in range(4)]
        leaving, coming = (arenas[:2], arenas[2:]) if rank == 0 else (arenas[2:], arenas[:2])
        for arena in leaving:
            for span in arena.movable:
                span.fill_(arena.section + 1)
            arena.set_version(7, 1)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(staging.send_sections, [(one, peer) for one in leaving])
            whole = list(staging.receive_sections((one, peer) for one in coming))
            sent.result()
        assert whole == coming
        for arena in arenas:
            arena.set_version(7, 1)
            copy = SectionArena(holder, arena.section, specs, room=0)
            staging.copy_section(arena, copy)
            assert copy.content == (7, 1)
            for span in (*arena.movable, *copy.movable):
                assert span.eq(arena.section + 1).all()
        assert device.most_bytes <= 2 * staging.NUM_BLOCKS * staging.PIECE_BYTES
        assert bool(device.most_bytes) == (rank == 0)


CASES: tuple[tuple[Callable[[int, int], None], int], ...] = (
    *((gathers, size) for size in range(1, MOST + 1)),
    (tensors_of_any_look, 2),
    (groups_send_each_tensor_once_and_get_all_of_it, 4),
    (a_cut_ends_what_is_awaited, 2),
    (sections_of_any_size_move_through_little_locked_memory, 2),
    (a_library_that_one_rank_cannot_start_is_done_without, 3),
)


def run(case: Callable[[int, int], None], rank: int, size: int, port: int) -> None:
    """Be one rank of a case."""
    store = open_rendezvous("127.0.0.1", port, is_server=False, timeout_s=TIMEOUT_S)
    join(store, f"{case.__name__} {size}", rank, size, TIMEOUT_S)
    case(rank, size)
    leave()


def fork(body: Callable[[], None]) -> int:
    """Run ``body`` in a child; return its pid."""
    if pid := os.fork():
        return pid
    try:
        body()
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


def main() -> int:
    """Run all cases, one after the other; return how many ranks failed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    ready, told = os.pipe()

    def serve() -> None:
        store = open_rendezvous("127.0.0.1", 0, is_server=True, timeout_s=TIMEOUT_S)
        os.write(told, str(store.port).encode())  # type: ignore[attr-defined]
        signal.pause()

    server = fork(serve)
    port = int(os.read(ready, 16))
    failed = 0
    for case, size in CASES:
        pids = [fork(functools.partial(run, case, rank, size, port)) for rank in range(size)]
        for pid in pids:
            failed += os.waitpid(pid, 0)[1] != 0
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return failed


if __name__ == "__main__":
    sys.exit(main())
