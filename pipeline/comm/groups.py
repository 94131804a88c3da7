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
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from spottrain.errors import SpottrainError

_STORE_TIMEOUT_S = 300.0
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
            open_now = {
                (fd, inode)
                for fd, inode in self._opened()
                if _connected(fd, inode, stack)
            }
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


def _connected(
    fd: int, inode: str, stack: contextlib.ExitStack
) -> socket.socket | None:
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


def open_rendezvous(
    host: str, port: int, *, is_server: bool, timeout_s: float
) -> Store:
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


def join(
    store: Store, name: str, rank: int, size: int, timeout_s: float
) -> Connections:
    """Form the default process group ``name`` over ``store``.

    Raises:
        GenerationBrokenError: A rank did not join, or left meanwhile.
    """
    connections = Connections()
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        connections.cut()
        _forget_failed_group()
        raise GenerationBrokenError(f"group {name} did not form: {error}") from error
    return connections


def _forget_failed_group() -> None:
    """Make this process count its groups from 0 again, as its next peers do.

    torch names groups by a counter that only the end of a default group resets; one
    that failed to form has no end, and its members would wait under another name.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()


def leave() -> None:
    """Destroy every process group of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


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
    store = open_rendezvous(host, 0, is_server=True, timeout_s=_STORE_TIMEOUT_S)
    announce(store.port)  # type: ignore[attr-defined]
    store.wait([_ALL_RELEASED], _EVER)


def new_groups(
    memberships: Sequence[tuple[int, ...]], rank: int, timeout_s: float
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Form a group for every membership of two ranks and more; return those of ``rank``.

    Every rank of the default group must call this with the same list. That group serves
    all ranks: to connect them once more takes a good part of a recovery.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    everyone = tuple(range(dist.get_world_size()))
    for members in dict.fromkeys(memberships):
        if len(members) < 2:
            continue
        if members == everyone:
            assert dist.group.WORLD is not None
            groups[members] = dist.group.WORLD
            continue
        group = dist.new_group(list(members), timeout=timedelta(seconds=timeout_s))
        if rank in members:
            assert isinstance(group, dist.ProcessGroup)
            groups[members] = group
    return groups
