from __future__ import annotations

import queue
import re
import socket
import threading

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.deferred import DeferredDevice

from spottrain.pipeline.comm.device_group import (
    DeviceGroups,
    Endpoint,
    NetworkRefusedError,
    choose_library,
    nccl_failure,
)
from spottrain.pipeline.comm.groups import Connections, GenerationBrokenError

ENDPOINTS = st.builds(
    Endpoint,
    st.sampled_from([None, "gloo", "nccl", "nccl"]),
    st.sampled_from(["cuda:GPU-a", "cuda:GPU-b", "cuda:GPU-c", "cuda:GPU-d"]),
    st.sampled_from([False, False, False, True]),
)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Endpoint], list[tuple[int, ...]]]:
    depth, width = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    endpoints = [draw(ENDPOINTS) for _ in range(depth * width)]
    return endpoints, [tuple(range(p, depth * width, depth)) for p in range(depth)]


@given(fleets())
def test_a_library_sums_only_where_every_rank_has_it_and_a_device_of_its_own(
    fleet: tuple[list[Endpoint], list[tuple[int, ...]]],
) -> None:
    endpoints, stages = fleet
    possible = (
        len({e.library for e in endpoints}) == 1
        and endpoints[0].library is not None
        and not any(e.lacks_library for e in endpoints)
        and all(len({endpoints[r].identity for r in s}) == len(s) for s in stages)
    )

    assert choose_library("gloo", endpoints, stages) is None
    assert choose_library("auto", endpoints, stages, "gloo") is None
    chosen = choose_library("auto", endpoints, stages)
    assert chosen == (endpoints[0].library if possible else None)
    assert choose_library("auto", endpoints, stages, "nccl") == chosen
    if possible:
        assert choose_library("nccl", endpoints, stages, "gloo") == chosen
    else:
        with pytest.raises(NetworkRefusedError):
            choose_library("nccl", endpoints, stages)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (Endpoint("nccl", "cuda:GPU-a"), "ranks 0 and 1 share cuda:GPU-a"),
        (Endpoint(None, "a CPU"), "rank 1 computes on a CPU"),
        (
            Endpoint("nccl", "cuda:GPU-b", lacks_library=True),
            "torch of rank 1 was built without NCCL",
        ),
    ],
)
def test_a_refusal_says_why(second: Endpoint, why: str) -> None:
    first = Endpoint("nccl", "cuda:GPU-a")

    with pytest.raises(NetworkRefusedError, match=why):
        choose_library("nccl", [first, second], [(0, 1)])


def test_a_sum_that_does_not_end_in_time_aborts_the_group_and_cuts_the_others() -> None:
    connections = Connections()
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    connections.seal()
    ended: list[str] = []
    told: list[str] = []
    groups = DeviceGroups(DeferredDevice(), connections, ended.append, told.append)
    groups._watcher = threading.Thread(target=groups._watch)
    groups._watcher.start()
    groups._timeout_s = 60.0
    with groups.bounded():
        pass
    groups.check()

    groups._timeout_s = 0.0
    with groups.bounded():
        assert theirs.recv(1) == b""  # the peer hears of it

        with pytest.raises(GenerationBrokenError, match="did not come to a sum"):
            groups.check()

    groups.close()
    assert ended == told == []
    for one in (listener, ours, theirs):
        one.close()


UNHANDLED = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{UNHANDLED}Cuda failure 2 'out of memory'", "the GPU has no memory left for it"),
        (f"{UNHANDLED}Failed to CUDA calloc 6291456 bytes\n", "the GPU has no memory left"),
        (
            (
                f"{UNHANDLED}Error while creating shared memory segment /dev/shm/nccl-4Bgj2t (size "
                "9637888), error: No space left on device (28)"
            ),
            "give the container more",
        ),
        (f"{UNHANDLED}Bootstrap : no socket interface found", "do not reach each other"),
        (f"{UNHANDLED}Cuda failure 999 'unknown error'", "^Cuda failure 999 'unknown error'$"),
        ("unhandled system error, NCCL version 2.28.9", "^unhandled system error, NCCL"),
    ],
)
def test_a_failure_of_nccl_is_told_in_one_line_by_its_cause(text: str, cause: str) -> None:
    reason = nccl_failure(text)
    assert re.search(cause, reason)
    assert "\n" not in reason
    assert reason.endswith(("bytes)", "memory')", "(28))", "found)", "error'", "2.28.9"))


def test_nccl_that_fails_in_a_sum_is_told_unless_a_peer_is_gone() -> None:
    told: list[str] = []
    groups = DeviceGroups(DeferredDevice(), Connections(), pytest.fail, told.append)

    failed = pytest.raises(GenerationBrokenError, match="NCCL failed: the GPU has no memory left")
    with failed, groups.bounded():
        raise dist.DistBackendError(f"{UNHANDLED}Cuda failure 'out of memory'")
    assert told == ["the GPU has no memory left for it (Cuda failure 'out of memory')"]

    groups._aborted = True
    with pytest.raises(GenerationBrokenError, match="a peer is gone"), groups.bounded():
        raise dist.DistBackendError("NCCL communicator was aborted")
    assert len(told) == 1
    groups.close()


def test_a_start_of_nccl_that_hangs_is_told() -> None:
    told = queue.SimpleQueue[str]()
    connections = Connections()
    connections.seal()
    groups = DeviceGroups(DeferredDevice(), connections, pytest.fail, told.put)
    groups._starting = True
    groups._watcher = threading.Thread(target=groups._watch)
    groups._watcher.start()
    with groups.bounded(0.0):
        assert told.get() == "it did not start in time"
    groups.close()
