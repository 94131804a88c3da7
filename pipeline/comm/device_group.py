"""Groups that sum device tensors of a stage's replicas, or carry them, and how they are ended.

Control stays with gloo on the host; each of these groups has a communicator of its own. A
communicator whose peer is gone waits for ever, and the computations queued behind it do,
too: NCCL leaves it to the application to notice and to abort ("Fault Tolerance" in
NCCL's user guide: an operation with an asynchronous error never completes). So a thread
watches gloo's connections, which end within milliseconds of a peer or of ``cut``; it cuts
all others and aborts the communicator, also when a peer lives on but does not come to a
sum: gloo would raise then. If the abort does not end in time, the worker ends itself.

What an aborted sum has left is garbage: whoever writes a word about it asks ``check``
first.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spottrain.errors import SpottrainError
from spottrain.pipeline.comm.collectives import gather_json
from spottrain.pipeline.comm.device_link import DeviceLink
from spottrain.pipeline.comm.groups import (
    Connections,
    GenerationBrokenError,
    new_group,
)
from spottrain.pipeline.devices.port import Device
from spottrain.wire.model import Network
from spottrain.wire.patience import LEAVE_S, NCCL_LEAVE_S

TRIAL_BOUND_S, EACH_TRIAL_S = 60.0, 10.0
"""For the communicators of a calibration to connect and sum once: for all, and more for
each. NCCL has no bound of its own: it waits for a rank whose start has failed. Seven took 31 to
41 s (nccl, issue 534), the first alone 55 s on B200s (issue 1646)."""
_NCCL_ENVIRONMENT: Mapping[str, str] = {
    # 0: torch's watchdog neither aborts communicators nor ends the process, as
    # ``torch.distributed``'s ``_abort_process_group`` asks for in its docstring.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Nor does the thread that watches the watchdog (ProcessGroupNCCL.hpp).
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Nor an error of CUDA that the watchdog is the first to see.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Waiting for a sum is the device's matter; an image may have set this for others.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # What large sums need is connected by the first, small one: from NCCL 2.22 on it would
    # be by the first large one, in the middle of a commit (NCCL's environment variables).
    "NCCL_RUNTIME_CONNECT": "0",
}
"""The worker decides alone when it ends: its state must be safe before. Names and meanings
are those of ProcessGroupNCCL.hpp in 2.13."""
_TRIALS: Mapping[str, Sequence[int]] = {"nccl": (1, 16 << 20)}
"""Numbers of the sums that a group is tried with, by library; others: 1. Large ones take
other ways through NCCL, and hang or are wrong alone where GPUs do not reach each other's
memory (NCCL's user guide, troubleshooting, PCI access control services)."""
_CAUSES: Sequence[tuple[str, str]] = (
    # nccl, issues 290, 342 and 525; "failed to extend /dev/shm/nccl-...": nccl-tests, 166
    (
        r"shared memory segment|/dev/shm|posix_fallocate",
        "there is too little shared memory: give the container more (docker: --shm-size=1g)",
    ),
    # "Cuda failure 'out of memory'", "Failed to CUDA calloc ... bytes": nccl, issue 1235
    (r"out of memory|CUDA (calloc|malloc)", "the GPU has no memory left for it"),
    # bootstrap.cc and socket.cc of NCCL
    (
        r"no socket interface found|[Cc]onnect to .* failed|[Nn]o route to host",
        "its ranks do not reach each other over the network",
    ),
)
"""What texts of NCCL's errors mean."""
_LOOK_S = 1.0
"""Time between two looks at whether a sum is late."""


class NetworkRefusedError(SpottrainError):
    """The job file asks for a library that this fleet cannot sum with."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a rank could sum its device's tensors with."""

    library: str | None
    """``Device.collective_library``."""
    identity: str
    """``Device.identity``."""
    lacks_library: bool = False
    """True if torch was built without it."""

    @classmethod
    def of(cls, device: Device) -> Endpoint:
        """Return the one of a rank's device."""
        library = device.collective_library
        lacks = library == "nccl" and not dist.is_nccl_available()
        return cls(library, device.identity, lacks)


def choose_library(
    network: Network,
    endpoints: Sequence[Endpoint],
    stages: Sequence[tuple[int, ...]],
    planned: Network = "auto",
) -> str | None:
    """Return what sums tensors on the devices; ``None``: they are summed on the host.

    Args:
        network: As in the job file.
        endpoints: Of every rank.
        stages: Ranks of every stage.
        planned: As in the plan, which counts where the job file leaves it open. Its
            ``nccl`` is no demand: slots may share GPUs, unlike those that measured.

    Raises:
        NetworkRefusedError: ``nccl`` is asked for, and impossible.
    """
    if (planned if network == "auto" else network) == "gloo":
        return None
    reason = _obstacle(endpoints, stages)
    if reason is None:
        return endpoints[0].library
    if network == "nccl":
        raise NetworkRefusedError(
            f"runtime.network: nccl is impossible: {reason}; use auto or gloo"
        )
    return None


def _gather_endpoints(device: Device) -> list[Endpoint]:
    """Return what every rank sums on, in the order of ranks."""
    return [Endpoint(*row) for row in gather_json(dataclasses.astuple(Endpoint.of(device)))]


def _obstacle(endpoints: Sequence[Endpoint], stages: Sequence[tuple[int, ...]]) -> str | None:
    for rank, endpoint in enumerate(endpoints):
        if endpoint.library is None:
            return f"rank {rank} computes on {endpoint.identity}"
        if endpoint.lacks_library:
            return f"torch of rank {rank} was built without NCCL"
    if len({endpoint.library for endpoint in endpoints}) > 1:
        return "ranks compute on devices of several kinds"
    for ranks in stages:
        seen: dict[str, int] = {}
        for rank in ranks:
            identity = endpoints[rank].identity
            if identity in seen:
                return f"ranks {seen[identity]} and {rank} share {identity}"
            seen[identity] = rank
    return None


Links = Mapping[tuple[int, int], dist.ProcessGroup]
"""Groups of the rank that sends and the one that receives, in this order."""


def _form_all(
    memberships: Iterable[tuple[int, ...]],
    links: Iterable[tuple[int, int]],
    rank: int,
    timeout_s: float,
    library: str,
) -> tuple[dict[tuple[int, ...], dist.ProcessGroup], dict[tuple[int, int], dist.ProcessGroup]]:
    """Form this rank's groups, all of them before one is used."""

    def own(members: Iterable[Any]) -> dict[Any, dist.ProcessGroup]:
        mine = [ranks for ranks in dict.fromkeys(members) if rank in ranks and len(ranks) > 1]
        return {ranks: new_group(ranks, timeout_s, library) for ranks in mine}

    return own(memberships), own(links)


def _try_all(
    device: Device,
    groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    links: Links,
    rank: int,
    library: str,
) -> None:
    """Use each group once: NCCL connects only now, and a failure shows at the start."""
    for ranks, group in groups.items():
        _sum_ones(device, group, len(ranks), library)
    for (source, _), group in links.items():
        _pass_ones(DeviceLink(group, device), source == rank, library)


def _pass_ones(link: DeviceLink, sends: bool, library: str) -> None:
    """Send ones over a link, or receive them.

    Raises:
        GenerationBrokenError: Others have come in.
    """
    for count in _TRIALS.get(library, (1,)):
        if sends:
            ones = torch.ones(count, device=link.device.torch_device)
            link.device.synchronise()
            link.send(ones).wait()
        elif float(link.receive((count,), torch.float32).sum()) != count:
            raise GenerationBrokenError(f"{count} ones have arrived as others")


def _sum_ones(device: Device, group: dist.ProcessGroup | None, size: int, library: str) -> None:
    """Sum ones over ``size`` ranks: NCCL connects only now.

    Raises:
        GenerationBrokenError: The sum is another.
    """
    for count in _TRIALS.get(library, (1,)):
        ones = torch.ones(count, device=device.torch_device)
        dist.all_reduce(ones, group=group)
        device.synchronise()
        if float(ones.sum()) != size * count:
            raise GenerationBrokenError(f"{size} ranks sum {count} ones up to others than {size}")


def nccl_failure(text: str) -> str:
    """Return in one line why NCCL failed.

    Args:
        text: Of torch's ``DistBackendError``: the kind of error in its first line, and what
            NCCL says itself after ``Last error:`` (NCCLUtils.cpp).
    """
    first, _, rest = text.partition("\n")
    own = rest.partition("Last error:")[2].split("\n")
    detail = next((line.strip() for line in own if line.strip()), first)
    causes = (cause for pattern, cause in _CAUSES if re.search(pattern, text))
    cause = next(causes, "")
    return f"{cause} ({detail})" if cause else detail


class DeviceGroups:
    """This rank's groups on devices, if there are any, for one generation.

    Args:
        device: What the worker computes on.
        connections: Those of gloo's groups; sealed, so that the group's own are none.
        end_worker: Ends this process, its state safe, with a reason; never returns.
        tell: Takes why NCCL failed, though no peer is known to be gone.
    """

    def __init__(
        self,
        device: Device,
        connections: Connections,
        end_worker: Callable[[str], object],
        tell: Callable[[str], object],
    ) -> None:
        self._device = device
        self._connections = connections
        self._end_worker = end_worker
        self._tell = tell
        self._starting = False
        self._own: Connections | None = None
        """The groups', where it is gloo that stands in for NCCL."""
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._watcher: threading.Thread | None = None
        self._stop, self._stopped = socket.socketpair()
        self._finished = False
        self._closed = threading.Event()
        self._aborted = False
        self._timeout_s = 0.0
        self._due_s: float | None = None
        """When the sums under way must have ended."""

    def form(
        self,
        endpoints: Sequence[Endpoint],
        network: Network,
        planned: Network,
        memberships: Sequence[tuple[int, ...]],
        ties: Sequence[tuple[int, ...]],
        links: Sequence[tuple[int, int]],
        rank: int,
        timeout_s: float,
    ) -> None:
        """Form groups, and use each once; all ranks call this.

        Args:
            endpoints: Of every rank.
            network: As in the job file.
            planned: As in the plan.
            memberships: Ranks of every group, the same at all ranks; each is in one at least.
            ties: Of more groups, and
            links: Ranks that send, and those that receive from them, the same at all ranks.
                Neither kind is formed where two ranks of one of its groups share a device.
            rank: This one.
            timeout_s: Of one collective.

        Raises:
            NetworkRefusedError: See ``choose_library``.
            GenerationBrokenError, RuntimeError: A peer is gone, or NCCL did not start.
        """
        library = choose_library(network, endpoints, memberships, planned)
        carrier = None if network == "gloo" or _obstacle(endpoints, links) else endpoints[0].library
        summing = [*memberships, *(() if _obstacle(endpoints, ties) else ties)]
        own = [ranks for ranks in summing if library and rank in ranks and len(ranks) > 1]
        ways = [way for way in links if carrier and rank in way]
        library = library or carrier
        if library is None or not (own or ways):
            return
        if library == "nccl":
            os.environ.update(_NCCL_ENVIRONMENT)
        else:
            self._own = Connections()
        self._timeout_s = timeout_s
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()
        self._starting = True
        with self.bounded(TRIAL_BOUND_S + EACH_TRIAL_S * (len(own) + len(ways))):
            self._groups, self._links = _form_all(own, ways, rank, timeout_s, library)
            if self._own is not None:
                self._own.seal()
            _try_all(self._device, self._groups, self._links, rank, library)
            self.check()
        self._starting = False

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of ``ranks``; None: they do not sum on their devices."""
        return self._groups.get(ranks)

    def link(self, source: int, target: int) -> DeviceLink | None:
        """Return what carries tensors from one rank to another; None: gloo does."""
        group = self._links.get((source, target))
        return None if group is None else DeviceLink(group, self._device)

    @contextmanager
    def bounded(self, bound_s: float | None = None) -> Iterator[None]:
        """Abort the groups if what sums inside has not ended in time.

        The device must be done with the sums at the end.

        Args:
            bound_s: How long that may take, by default as long as a collective.

        Raises:
            GenerationBrokenError: NCCL failed, or the group was aborted.
        """
        self._due_s = time.monotonic() + (self._timeout_s if bound_s is None else bound_s)
        try:
            yield
        except dist.DistBackendError as error:  # of NCCL's alone
            self.check()
            reason = nccl_failure(str(error))
            self._tell(reason)
            raise GenerationBrokenError(f"NCCL failed: {reason}") from error
        finally:
            self._due_s = None

    def check(self) -> None:
        """Check that no sum so far was cut short; the device is done with them.

        Raises:
            GenerationBrokenError: The group was aborted.
        """
        if self._aborted:
            raise GenerationBrokenError(
                "a peer is gone, or did not come to a sum: the communicator was aborted"
            )

    def finish(self) -> None:
        """Say that nothing is summed any more: peers may leave."""
        self._finished = True

    def close(self) -> None:
        """End the groups, also where nothing is under way, in bounded time.

        By an abort, always: the regular end of a communicator waits for its peers.
        """
        self._closed.set()
        self._stop.close()
        if self._watcher is not None:
            self._watcher.join()
        self._stopped.close()

    def _watch(self) -> None:
        """Wait for the end of the generation or of a connection, or for a late sum."""
        while not self._connections.wait_for_end(self._stopped, _LOOK_S):
            due_s = self._due_s
            if due_s is not None and time.monotonic() > due_s:
                if self._starting:  # all ranks have just come from a handover
                    self._tell("it did not start in time")
                break
        self._aborted = True
        if not self._finished:
            self._connections.cut()  # nothing here waits for the other peers any more
        bound_s = NCCL_LEAVE_S if self._own is None else LEAVE_S
        until_s = time.monotonic() + bound_s
        done = threading.Event()
        # An abort that raises is one that does not end.
        threading.Thread(target=self._abort, args=(done,), name="abort", daemon=True).start()
        for what, event in (("be aborted", done), ("be left", self._closed)):
            if not event.wait(until_s - time.monotonic()):
                self._end_worker(f"a communicator could not {what} in {bound_s:g} s")

    def _abort(self, done: threading.Event) -> None:
        if self._own is not None:
            self._own.cut()
        else:
            for group in (*self._groups.values(), *self._links.values()):
                group.abort()
        done.set()


class TrialGroups:
    """Groups on devices to be measured; all ranks of the world use it alike.

    That they cannot start is a result, not an error.

    Args:
        device: What this rank computes on.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._library: str | None = None
        self._own: Connections | None = None
        """The groups', where it is gloo that stands in for NCCL."""
        self._error = ""
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """Those of this rank."""
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.failure = ""
        """The first error of any rank, in one line, the same at all of them."""

    def form(
        self,
        memberships: Sequence[tuple[int, ...]],
        rank: int,
        timeout_s: float,
        links: Sequence[tuple[int, int]] = (),
    ) -> bool:
        """Form groups and use each once, in bounded time.

        Args:
            memberships: Ranks of every group, the same at all ranks.
            rank: This one.
            timeout_s: Of one collective.
            links: Ranks that send, and those that receive from them, the same at all ranks.

        Returns:
            Whether they can be used, the same at all ranks. If not and there is no
            ``failure``, ranks have nothing to sum with, or share devices.
        """
        endpoints = _gather_endpoints(self._device)
        ranks = tuple(range(len(endpoints)))
        self._library = choose_library("auto", endpoints, [ranks])
        if self._library is None or not (memberships or links):
            return False
        if self._library == "nccl":
            os.environ.update(_NCCL_ENVIRONMENT)
        else:
            self._own = Connections()
        starting = threading.Thread(
            target=self._start,
            args=(memberships, links, rank, timeout_s, self._library),
            name="start",
            daemon=True,
        )
        starting.start()
        bound_s = TRIAL_BOUND_S + EACH_TRIAL_S * (len(memberships) + len(links))
        starting.join(bound_s)
        late = f"no answer in {bound_s:g} s" if starting.is_alive() else ""
        found = gather_json([self._error, late])
        errors = [error for error, _ in found] + [late for _, late in found]
        self.failure = next(filter(None, errors), "")
        return not self.failure

    def _start(
        self,
        memberships: Iterable[tuple[int, ...]],
        links: Iterable[tuple[int, int]],
        rank: int,
        timeout_s: float,
        library: str,
    ) -> None:
        try:
            with self._device.using():
                made = _form_all(memberships, links, rank, timeout_s, library)
                self.groups, self._links = made
                _try_all(self._device, *made, rank, library)
        except dist.DistBackendError as error:
            self._error = nccl_failure(str(error))
        except (RuntimeError, ValueError, GenerationBrokenError) as error:
            line = (str(error).splitlines() or [""])[0]
            self._error = f"{type(error).__name__}: {line}"

    def link(self, source: int, target: int) -> DeviceLink | None:
        """Return what carries tensors from one rank to another, if anything does."""
        group = self._links.get((source, target))
        return None if group is None else DeviceLink(group, self._device)

    def close(self) -> bool:
        """Abort the groups in bounded time; return whether that has ended."""
        aborting = threading.Thread(target=self._abort, name="abort", daemon=True)
        aborting.start()
        aborting.join(NCCL_LEAVE_S)
        return not aborting.is_alive()

    def _abort(self) -> None:
        if self._own is not None:
            self._own.cut()
        elif self._library is not None:
            for group in (*self.groups.values(), *self._links.values()):
                group.abort()
