"""The pipeline's directed links: activations and gradients between neighbouring stages.

Two facts of gloo shape this file. A receive cannot be polled, so one thread per directed
link waits and puts arrivals into a queue. A message leaves only once its receiver has
said that it waits for it; so receives are posted before the message is sent, where its
shape is known, or it would travel three times as long.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from queue import Queue, SimpleQueue

import torch
import torch.distributed as dist

from spottrain.pipeline.base.layout import as_sent, format_of
from spottrain.pipeline.comm.collectives import GATHER_TAG
from spottrain.pipeline.comm.groups import GenerationBrokenError, world
from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.wire.model import WireType

_MAX_DIMENSIONS = 8
_MAX_PENDING_SENDS = 16
_AHEAD = 2
"""Tensors for which receives are posted, if dtype and shape are those of earlier
ones."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Direction(Enum):
    """Direction in which a tensor travels along the pipeline."""

    ACTIVATION = 0
    GRADIENT = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor that a neighbour sent, on its way to the device."""

    direction: Direction
    transfer: Transfer
    dtype: torch.dtype
    """In which its sender computes; it may travel in another one."""
    at_s: float
    """When it had come in, monotonic."""
    note: int = 0
    """What the sender has to say about it."""
    channels_last: bool = False
    """It has travelled in the order of its memory, in which dimension 1 is the last one."""

    def on(self, device: Device) -> torch.Tensor:
        """Return the tensor, to be computed with from now on."""
        tensor = device.wait(self.transfer).to(self.dtype)
        return tensor.movedim(-1, 1) if self.channels_last else tensor


@dataclass(frozen=True, slots=True)
class _Broken:
    """A link broke, or no memory was left for what came in."""

    error: RuntimeError


class _Part(Enum):
    """Messages that make up a tensor, each with a tag of its own.

    A tensor with the signature of the one ``_AHEAD`` before it is the payload. Any
    other one comes as the extra, whose receive is posted once the header is read; its
    payload is a single byte.
    """

    HEADER = 0
    PAYLOAD = 1
    EXTRA = 2

    def tag(self, direction: Direction) -> int:
        """Return the tag of messages."""
        return GATHER_TAG + 1 + len(_Part) * direction.value + self.value


_Signature = tuple[int, ...]
"""Of a tensor: the indices of the dtypes in which it travels and in which its sender
computes, whether channels are the last dimension, then its shape as it travels; empty if it
is not known."""
_WIRE_TYPES: Mapping[WireType, torch.dtype | None] = {
    "own": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def _empty(signature: _Signature, device: Device) -> torch.Tensor:
    if not signature:
        return torch.empty(1, dtype=torch.uint8)
    return device.allocate_host(signature[3:], _DTYPES[signature[0]])


@functools.lru_cache(maxsize=16)
def _header(*described: int) -> torch.Tensor:
    """Return a header, the same tensor for all messages that are alike: to be read only."""
    header = torch.zeros(_MAX_DIMENSIONS + 5, dtype=torch.int64)
    header[: len(described)] = torch.tensor(described)
    return header


class _Posted:
    """A tensor whose receives are posted."""

    def __init__(
        self,
        source: int,
        direction: Direction,
        signature: _Signature,
        device: Device,
    ) -> None:
        self._source = source
        self._direction = direction
        self._signature = signature
        self._device = device
        self._header = torch.empty(_MAX_DIMENSIONS + 5, dtype=torch.int64)
        self._payload = _empty(signature, device)
        self._works = [
            self._post(part, tensor)
            for part, tensor in (
                (_Part.HEADER, self._header),
                (_Part.PAYLOAD, self._payload),
            )
        ]

    def wait(self) -> tuple[_Signature, torch.Tensor, int]:
        """Return the tensor, its signature, and the sender's note."""
        for work in reversed(self._works):  # the header is here before the payload
            work.wait()
        note, dtype, own, last, dimensions, *shape = self._header.tolist()
        signature = (dtype, own, last, *shape[:dimensions])
        if signature == self._signature:
            return signature, self._payload, note
        tensor = _empty(signature, self._device)
        self._post(_Part.EXTRA, tensor).wait()
        return signature, tensor, note

    def _post(self, part: _Part, tensor: torch.Tensor) -> dist.Work:
        return world().receive(tensor, self._source, part.tag(self._direction))


class _Receiver(threading.Thread):
    """Receives as many tensors as are expected, one after the other."""

    def __init__(
        self,
        source: int,
        direction: Direction,
        arrivals: SimpleQueue[Arrival | _Broken | None],
        device: Device,
    ) -> None:
        super().__init__(name=f"receive-{direction.name.lower()}", daemon=True)
        self._source = source
        self._direction = direction
        self._arrivals = arrivals
        self._device = device
        self.orders: SimpleQueue[int] = SimpleQueue()
        """Numbers of tensors to receive next; 0 ends the thread."""
        self._signatures: deque[_Signature] = deque([()] * _AHEAD)
        """Probable signatures of the tensors to be posted next."""

    def run(self) -> None:
        try:
            while count := self.orders.get():
                self._receive(count)
        except RuntimeError as error:
            self._arrivals.put(_Broken(error))

    def _receive(self, count: int) -> None:
        posted: deque[_Posted] = deque()
        for left in range(count, 0, -1):
            while len(posted) < min(_AHEAD, left):
                signature = self._signatures.popleft()
                posted.append(_Posted(self._source, self._direction, signature, self._device))
            signature, tensor, note = posted.popleft().wait()
            self._signatures.append(signature)
            transfer = self._device.upload(tensor)
            _, own, channels_last, *_ = signature
            arrival = Arrival(
                self._direction,
                transfer,
                _DTYPES[own],
                time.monotonic(),
                note,
                bool(channels_last),
            )
            self._arrivals.put(arrival)


@dataclass(frozen=True, slots=True)
class _Message:
    """A tensor to send, on its way from the device."""

    direction: Direction
    target: int
    transfer: Transfer
    dtype: torch.dtype
    """In which it was computed."""
    note: int
    channels_last: bool
    """As for ``Arrival``."""


class _Sends:
    """What was sent and is not yet known to have arrived."""

    def __init__(self) -> None:
        self._works: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._sent: dict[Direction, deque[_Signature]] = {
            way: deque([()] * _AHEAD, _AHEAD) for way in Direction
        }
        """Signatures of the latest tensors sent."""

    def post(self, message: _Message, tensor: torch.Tensor) -> None:
        """Send a tensor of the host."""
        direction, target = message.direction, message.target
        dtypes = _DTYPES.index(tensor.dtype), _DTYPES.index(message.dtype)
        last = int(message.channels_last)
        signature = (*dtypes, last, *tensor.shape)
        header = _header(message.note, *dtypes, last, tensor.dim(), *tensor.shape)
        parts = {_Part.HEADER: header, _Part.PAYLOAD: tensor}
        if signature != self._sent[direction][0]:
            nothing = torch.empty(1, dtype=torch.uint8)
            parts |= {_Part.PAYLOAD: nothing, _Part.EXTRA: tensor}
        self._sent[direction].append(signature)
        for part, content in parts.items():
            work = world().send(content, target, part.tag(direction))
            self._works.append((work, content))
        while len(self._works) > _MAX_PENDING_SENDS:
            self._works.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until the neighbours have taken all that was sent."""
        while self._works:
            self._works.popleft()[0].wait()


class _Sender(threading.Thread):
    """Sends tensors as soon as they have come down from the device."""

    def __init__(
        self,
        device: Device,
        sends: _Sends,
        arrivals: SimpleQueue[Arrival | _Broken | None],
    ) -> None:
        super().__init__(name="send", daemon=True)
        self._device = device
        self._sends = sends
        self._arrivals = arrivals
        self.orders: Queue[_Message | None] = Queue()
        """Tensors to send; ``None`` ends the thread."""

    def run(self) -> None:
        broken = False
        while (message := self.orders.get()) is not None:
            try:
                if not broken:
                    self._sends.post(message, self._device.finish(message.transfer))
            except RuntimeError as error:
                broken = True
                self._arrivals.put(_Broken(error))
            finally:
                self.orders.task_done()


class PipelineLinks:
    """The links of one stage to its neighbours.

    Tensors of a GPU go through page-locked memory of the host.

    Args:
        previous: Rank of the stage before, if there is one.
        following: Rank of the stage after, if there is one.
        device: Where tensors are sent from, and go to.
        wire: Type in which they travel, where theirs is wider.
    """

    def __init__(
        self,
        previous: int | None,
        following: int | None,
        device: Device,
        wire: WireType = "own",
    ) -> None:
        self._wire = _WIRE_TYPES[wire]
        self._previous = previous
        self._following = following
        self._device = device
        self._arrivals: SimpleQueue[Arrival | _Broken | None] = SimpleQueue()
        """``None``: whoever waits is to look up."""
        self._receivers: dict[Direction, _Receiver] = {}
        self._sends = _Sends()
        sources = (Direction.ACTIVATION, previous), (Direction.GRADIENT, following)
        for direction, source in sources:
            if source is not None:
                receiver = _Receiver(source, direction, self._arrivals, device)
                receiver.start()
                self._receivers[direction] = receiver
        self._sender: _Sender | None = None
        if self._receivers and not device.is_host:
            self._sender = _Sender(device, self._sends, self._arrivals)
            self._sender.start()

    def source(self, direction: Direction) -> int:
        """Return the rank that sends in a direction, where there is one."""
        activation = direction is Direction.ACTIVATION
        source = self._previous if activation else self._following
        assert source is not None
        return source

    def expect(self, direction: Direction, count: int) -> None:
        """Let ``count`` tensors come in from the neighbour, if there is one."""
        if direction in self._receivers and count:
            self._receivers[direction].orders.put(count)

    def arrival(self, *, wait: bool) -> Arrival | None:
        """Return the next tensor that came in, or ``None`` if none has, or on ``wake``.

        Raises:
            GenerationBrokenError: A link broke.
            OutOfMemoryError: The device had no memory left for what came in.
        """
        arrival = None
        while arrival is None:
            if not wait and self._arrivals.empty():
                return None
            arrival = self._arrivals.get()
            if arrival is None and wait:
                return None
        if isinstance(arrival, _Broken):
            if isinstance(arrival.error, torch.OutOfMemoryError):
                raise arrival.error
            reason = f"link broke: {arrival.error}"
            raise GenerationBrokenError(reason) from arrival.error
        return arrival

    def wake(self) -> None:
        """Let who waits for an arrival look up; may be called in any thread."""
        self._arrivals.put(None)

    def send(self, direction: Direction, tensor: torch.Tensor, note: int = 0) -> None:
        """Send a tensor of the device, and a number; return before it has arrived."""
        forward = direction is Direction.ACTIVATION
        target = self._following if forward else self._previous
        assert target is not None
        dtype, tensor = tensor.dtype, as_sent(tensor)
        channels_last = format_of(tensor) is not torch.contiguous_format
        if channels_last:
            tensor = tensor.movedim(1, -1)
        if self._wire is not None and dtype.itemsize > self._wire.itemsize:
            tensor = tensor.to(self._wire)
        transfer = self._device.download(tensor)
        message = _Message(direction, target, transfer, dtype, note, channels_last)
        if self._sender is None:
            self._sends.post(message, self._device.finish(transfer))
        else:
            self._sender.orders.put(message)

    def flush(self) -> None:
        """Wait until the neighbours have taken all that was sent."""
        if self._sender is not None:
            self._sender.orders.join()
        self._sends.flush()

    def close(self) -> None:
        """End the threads; the connections are cut, or nothing is expected."""
        for receiver in self._receivers.values():
            receiver.orders.put(0)
        if self._sender is not None:
            self._sender.orders.put(None)
            self._sender.join()
        for receiver in self._receivers.values():
            receiver.join()
        self._sends = _Sends()
