"""A worker's end of its loader processes: asks for micro-batches before it needs them.

What a micro-batch holds depends on its name alone, so it does not matter which process
makes it, how often, or whether it is used: a loader that dies is replaced and its
requests are made again; whatever was asked for in vain is dropped.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.containers import know_classes_in
from spottrain.pipeline.loader.encoding import UnsendableError, read_batch
from spottrain.pipeline.loader.process import MAX_PACKET_BYTES
from spottrain.pipeline.model.data import Microbatch, make_batch
from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.wire.model import LoaderSpec

_STALL_SHARE, _STALL_S = 0.02, 0.005
"""Of a mini-batch, spent waiting for examples: less than that is left alone."""
_MAX_DEATHS = 3

OpenLoader = Callable[[int], socket.socket]
"""Has the supervisor start a loader in place of any with the same number."""


def loaders_for(spec: LoaderSpec, minibatch_fetch_s: float) -> int:
    """Return how many loaders a worker will have at most.

    Args:
        spec: What the job file asks for.
        minibatch_fetch_s: Time in which the worker would make a whole mini-batch.
    """
    takes_time = minibatch_fetch_s >= _STALL_S
    return spec.most if takes_time or spec.workers is not None else 0


@dataclass(eq=False, slots=True)
class _Loader:
    """One loader process."""

    number: int
    connection: socket.socket
    asked: dict[int, Microbatch] = field(default_factory=dict)
    """Requests that it has not answered, oldest first."""


class Prefetcher:
    """Gets the micro-batches of one worker, over all its generations.

    Without loaders it makes them itself. Where the job file does not say how many there
    are to be, there are none until that costs noticeable time.

    Args:
        job: The user's job.
        seed: The job's seed.
        spec: How many loaders, and how far they work ahead.
        open_loader: Starts one.
    """

    def __init__(
        self, job: TrainingJob, seed: int, spec: LoaderSpec, open_loader: OpenLoader
    ) -> None:
        self._job, self._seed, self._spec = job, seed, spec
        self._open = open_loader
        self._number = spec.workers or 0
        self._most = spec.most
        self._loaders: list[_Loader] = []
        self._held: dict[Microbatch, int | UserCodeError | None] = {}
        """What was asked for: its memory, an error, or nothing yet. As much as the
        worker may work ahead, and the one it asks for."""
        self.label = ""
        """Whom loaders make batches for, in what they print."""
        self._requests = 0
        self._deaths: Counter[Microbatch] = Counter()
        self._stalled_s = 0.0
        self._settles = False
        """Whether the queue is filled anew in this mini-batch: after an evaluation, or
        because there are more loaders."""

    @property
    def num_loaders(self) -> int:
        """Processes that make batches; 0: the worker does."""
        return self._number

    def fetch(self, wanted: Microbatch, following: Iterable[Microbatch] = ()) -> Batch:
        """Return a micro-batch; have those that follow made meanwhile.

        Raises:
            UserCodeError: The data set or ``collate`` raised, or ended its process
                again and again.
        """
        began_s = time.monotonic()
        try:
            if self._number:
                try:
                    return self._fetch(wanted, following)
                except UnsendableError:
                    if self._spec.workers is not None:
                        raise
                    self._most = self._number = 0
                    self.close()
            return make_batch(self._job, self._seed, wanted)
        finally:
            self._stalled_s += time.monotonic() - began_s
            self._settles |= wanted.heldout is not None

    def adapt(self, minibatch_s: float) -> None:
        """Have more loaders if waiting for examples took much of a mini-batch.

        Nothing is changed where the job file gives their number.

        Args:
            minibatch_s: How long the mini-batch took that has ended.
        """
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        settles, self._settles = self._settles, False
        noticeable_s = max(_STALL_S, _STALL_SHARE * minibatch_s)
        if self._number >= self._most or settles or stalled_s < noticeable_s:
            return
        self._number = min(self._most, 2 * self._number or 1)
        self._settles = True

    def close(self) -> None:
        """End the loaders."""
        for loader in self._loaders:
            loader.connection.close()
        self._loaders.clear()
        for name in list(self._held):
            self._forget(name)

    def _fetch(self, wanted: Microbatch, following: Iterable[Microbatch]) -> Batch:
        while len(self._loaders) < self._number:
            number = len(self._loaders)
            self._loaders.append(_Loader(number, self._open(number)))
        self._receive(wait=False)
        self._ask([wanted, *islice(following, self._spec.ahead)])
        while (answer := self._held[wanted]) is None:
            self._receive(wait=True)
        del self._held[wanted]
        if isinstance(answer, int):
            batch = read_batch(answer)
            know_classes_in(batch)
            return batch
        raise answer

    def _ask(self, names: list[Microbatch]) -> None:
        """Have batches made that are not yet, in this order."""
        others = [name for name in self._held if name not in names]
        if names[0] not in self._held:  # nothing may come before it
            for name in others:
                self._forget(name)
            others.clear()
        for name in names:
            if name in self._held:
                continue
            if len(self._held) > self._spec.ahead:
                self._forget(others.pop(0))
            loader = min(self._loaders, key=lambda loader: len(loader.asked))
            self._requests += 1
            loader.asked[self._requests] = name
            self._held[name] = None
            self._send_request(loader, self._requests, name)

    def _forget(self, name: Microbatch) -> None:
        """Drop a batch, or the request for it."""
        answer = self._held.pop(name)
        if isinstance(answer, int):
            os.close(answer)
        for loader in self._loaders:
            for number, asked in list(loader.asked.items()):
                if asked == name:
                    del loader.asked[number]
                    self._send(loader, {"drop": number})

    def _send_request(self, loader: _Loader, number: int, name: Microbatch) -> None:
        self._send(loader, {"make": number, "name": name, "for": self.label})

    def _send(self, loader: _Loader, request: dict[str, object]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            # Its end is seen, and all is sent again, when answers are received.
            loader.connection.sendall(json.dumps(request).encode())

    def _receive(self, *, wait: bool) -> None:
        """Take the answers that have come in; if there are none, ``wait`` for one."""
        sockets = {loader.connection: loader for loader in self._loaders}
        ready = select.select(list(sockets), [], [], None if wait else 0)[0]
        for connection in ready:
            self._take_answer(sockets[connection])

    def _take_answer(self, loader: _Loader) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(loader.connection, MAX_PACKET_BYTES, 1)
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._replace(loader)
            return
        answer = json.loads(data)
        name = loader.asked.pop(answer["made"], None)
        if name is None:  # taken back too late
            for fd in fds:
                os.close(fd)
            return
        del self._deaths[name]
        if fds:
            self._held[name] = fds[0]
        else:
            kind = UnsendableError if answer["unsendable"] else UserCodeError
            self._held[name] = kind(answer["error"], answer["traceback"])

    def _replace(self, loader: _Loader) -> None:
        """Start a loader in place of one that died, and ask again."""
        loader.connection.close()
        victim = next(iter(loader.asked), None)
        if victim is not None:
            name = loader.asked[victim]
            self._deaths[name] += 1
            if self._deaths[name] == _MAX_DEATHS:
                del loader.asked[victim], self._deaths[name]
                self._held[name] = _death(name)
        loader.connection = self._open(loader.number)
        for number, name in loader.asked.items():
            self._send_request(loader, number, name)


def _death(name: Microbatch) -> UserCodeError:
    what = f"mini-batch {name.step}" if name.heldout is None else "the evaluation"
    return UserCodeError(
        f"dataset in {what} ended its loader process {_MAX_DEATHS} times: it crashed, or "
        "memory ran out (logs of the VM have the signal); use fewer loader.workers, or "
        "fix the example"
    )
