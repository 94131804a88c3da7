"""Process groups of one generation: rendezvous, forming, and cutting their connections.

A gloo receive from a peer that lives on, but has left the group, ends only when its
connection does. So a rank that meets an error shuts down the generation's TCP
connections itself (``Connections.cut``), which ends every pending operation here and at
its peers within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from spottrain.errors import SpottrainError

TIMEOUT_S = 300.0
"""Bound on one collective, and on a meeting of ranks; failures are found by heartbeats long
before."""
_EVER = timedelta(days=3650)
_NUM_RELEASED, _ALL_RELEASED = "released", "all released"
"""Keys by which the ranks of a generation end its store."""
_BACKLOG = 2048
"""Connections of ranks that may wait to be accepted, as torch has it."""
_NETWORK = (socket.AF_INET, socket.AF_INET6)


class GenerationBrokenError(SpottrainError):
    """A peer of this generation is gone; its groups are of no more use."""


class Connections:
    """The TCP connections that were opened since this object was made, until sealed."""

    def __init__(self) -> None:
        self._ours = frozenset[tuple[int, str]]()
        self._before: frozenset[tuple[int, str]] | None = None
        self._sealed = select.poll()
        self.watch()

    def watch(self) -> None:
        """Take in connections that are opened from now on, beside those that are sealed."""
        self._before = _sockets()

    def seal(self) -> None:
        """Limit ``cut`` to the connections that are open now."""
        with contextlib.ExitStack() as stack:
            open_now = {(fd, inode) for fd, inode in self._opened() if _connected(fd, inode, stack)}
        self._ours |= open_now
        self._before = None
        for fd, _ in open_now:
            self._sealed.register(fd, select.POLLRDHUP)

    def _opened(self) -> frozenset[tuple[int, str]]:
        """Return what was opened since it is watched for."""
        return frozenset() if self._before is None else _sockets() - self._before

    def cut(self) -> None:
        """Shut them down both ways without closing them: their owner still polls."""
        for fd, inode in self._ours | self._opened():
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                if (connection := _connected(fd, inode, stack)) is not None:
                    connection.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Check that no peer has left, without waiting; by one thread, once sealed.

        It looks at gloo's own descriptors, not at further ones, which would keep a peer
        from being told when gloo closes them. A number may be given to another file only
        after that, and then the generation has ended anyway.

        Raises:
            GenerationBrokenError: A connection was cut, here or by its peer.
        """
        if self._sealed.poll(0):
            raise GenerationBrokenError("a peer is gone: its connection has ended")

    def wait_for_end(self, stop: socket.socket, timeout_s: float | None = None) -> bool:
        """Wait until one of them is cut, here or by its peer, or ``stop`` is readable.

        They must be sealed.

        Returns:
            False if nothing of that has happened within ``timeout_s``.
        """
        assert self._before is None
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            poll.register(stop, select.POLLIN)
            for fd, inode in self._ours:
                if (connection := _connected(fd, inode, stack)) is None:
                    return True
                poll.register(connection, select.POLLRDHUP)
            return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _connected(fd: int, inode: str, stack: contextlib.ExitStack) -> socket.socket | None:
    """Return a further descriptor, which ``stack`` closes, of what is connected.

    A pair of this process's own sockets is no connection: a further descriptor of one
    would hide that it was closed.
    """
    if _inode(fd) != inode:
        return None
    try:
        connection = stack.enter_context(socket.socket(fileno=os.dup(fd)))
        connection.getpeername()
    except OSError:
        return None  # a listener, or already closed
    return connection if connection.family in _NETWORK else None


def _sockets() -> frozenset[tuple[int, str]]:
    """Return (file descriptor, inode) of every socket of this process."""
    found = ((int(fd), _inode(int(fd))) for fd in os.listdir("/proc/self/fd"))
    return frozenset((fd, inode) for fd, inode in found if inode.startswith("socket:"))


def _inode(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def connect_rendezvous(host: str, port: int, timeout_s: float) -> Store:
    """Connect to a generation's rendezvous store, once per process."""
    return open_rendezvous(host, port, is_server=False, timeout_s=timeout_s)


def open_rendezvous(host: str, port: int, *, is_server: bool, timeout_s: float) -> Store:
    """Open a rendezvous store; port 0 chooses a free one.

    A server listens on ``host`` alone: the store asks for no credential, so whoever
    reaches it can break a generation. torch itself would listen on every interface.

    Raises:
        OSError: ``host`` is no address of this machine.
    """
    listener = None
    if is_server:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        port, listener = server.getsockname()[1], server.detach()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=is_server,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener,
    )


def release_rendezvous(store: Store, size: int) -> None:
    """Say that this process needs the store no longer; the last of ``size`` ends it."""
    if store.add(_NUM_RELEASED, 1) == size:
        store.set(_ALL_RELEASED, "")


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of the generation that this process is in.

    Its group is not torch's default group, nor known to torch's registry: the user's code
    is written for one process, and what it initialises or asks for must be its own.
    """

    store: Store
    rank: int
    size: int
    group: dist.ProcessGroup
    formed: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """How many groups there were of the same ranks."""

    def send(self, tensor: torch.Tensor, target: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor of the host to a rank."""
        return self.group.send([tensor], target, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor of the host from a rank."""
        return self.group.recv([tensor], source, tag)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a tensor of the host over all ranks, in place."""
        dist.all_reduce(tensor, group=self.group)

    def barrier(self) -> None:
        """Wait for all ranks, for however long: the manager ends what gets nowhere."""
        options = dist.BarrierOptions()
        options.timeout = _EVER
        self.group.barrier(options).wait()


_world: World | None = None


def world() -> World:
    """Return the ranks that this process has joined."""
    assert _world is not None
    return _world


def is_joined() -> bool:
    """Return whether this process has joined others."""
    return _world is not None


def join(store: Store, name: str, rank: int, size: int, timeout_s: float) -> Connections:
    """Join the other ranks, as the ``world`` of this process, over ``store``.

    Raises:
        GenerationBrokenError: A rank did not join, or left meanwhile.
    """
    global _world
    connections = Connections()
    store = PrefixStore(name, store)
    try:
        group = _form(store, rank, range(size), timeout_s, "gloo")
    except RuntimeError as error:
        connections.cut()
        raise GenerationBrokenError(f"group {name} did not form: {error}") from error
    _world = World(store, rank, size, group)
    return connections


def leave() -> None:
    """Leave the world; its groups end with the last reference to them."""
    global _world
    _world = None


def serve_rendezvous(host: str, announce: Callable[[int], None]) -> None:
    """Serve a rendezvous store on a free port of ``host`` until all have released it.

    A store has server threads, which must not live in a process that forks: it gets a
    process of its own.

    Args:
        host: Address to listen on.
        announce: Called with the port once the store listens.

    Raises:
        OSError: ``host`` is no address of this machine.
    """
    store = open_rendezvous(host, 0, is_server=True, timeout_s=TIMEOUT_S)
    announce(store.port)  # type: ignore[attr-defined]
    store.wait([_ALL_RELEASED], _EVER)


def new_groups(
    memberships: Sequence[tuple[int, ...]], timeout_s: float
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Form the groups of two ranks and more that this rank is in.

    Their members must call this with lists in the same order. The world's group serves
    all ranks: to connect them once more takes a good part of a recovery.
    """
    here = world()
    everyone = tuple(range(here.size))
    return {
        members: here.group if members == everyone else new_group(members, timeout_s)
        for members in dict.fromkeys(memberships)
        if here.rank in members and len(members) > 1
    }


def new_group(members: Sequence[int], timeout_s: float, library: str = "gloo") -> dist.ProcessGroup:
    """Form a group of some ranks of the world; all of them call this.

    Args:
        members: Their ranks, of which this is one.
        timeout_s: Of one collective.
        library: ``"gloo"``, or ``"nccl"``.
    """
    here, members = world(), tuple(members)
    here.formed[members] += 1
    name = f"{'-'.join(map(str, members))} {here.formed[members]}"
    return _form(PrefixStore(name, here.store), here.rank, members, timeout_s, library)


def _form(
    store: Store, rank: int, members: Sequence[int], timeout_s: float, library: str
) -> dist.ProcessGroup:
    size, place = len(members), members.index(rank)
    timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroup(store, place, size)
    if library == "gloo":
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        backend: Backend = ProcessGroupGloo(store, place, size, timeout)
    else:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build

        kind, device = dist.ProcessGroup.BackendType.NCCL, torch.device("cuda")
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(members)
        backend = ProcessGroupNCCL(store, place, size, options)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group
