"""The pipeline's directed links: activations and gradients between neighbouring stages.

Two facts of gloo shape this file. A receive cannot be polled, so one thread per directed
link waits and puts arrivals into a queue. A message leaves only once its receiver has
said that it waits for it; so receives are posted before the message is sent, where its
shape is known, or it would travel three times as long.

Ranks that divide the matrices of a stage have the same activations and gradients. Each sends a
part of them, and those that receive put the parts together in their VM: all of it crosses the
network once (scatter/gather, Narayanan's dissertation, 4.1.3). Where they divide the sequence, too,
each has a part from the start, and goes on with the one that it receives.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from queue import Queue, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from spottrain.pipeline.base.layout import as_sent, format_of
from spottrain.pipeline.comm.collectives import GATHER_TAG
from spottrain.pipeline.comm.device_link import DeviceLink, Resident, Sent
from spottrain.pipeline.comm.groups import GenerationBrokenError, world
from spottrain.pipeline.comm.tensor_group import TensorGroup
from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.wire.model import WireType

_MAX_PENDING_SENDS = 16
_AHEAD = 2
"""Messages for which receives are posted, if dtypes and shapes are those of earlier
ones."""
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class Direction(Enum):
    """Direction in which tensors travel along the pipeline."""

    ACTIVATION = 0
    GRADIENT = 1


@dataclass(frozen=True, slots=True)
class Travelling:
    """A tensor on its way to a device, or from it."""

    transfer: Transfer | Resident
    dtype: torch.dtype
    """In which its sender computes; it may travel in another one."""
    channels_last: bool
    """It travels in the order of its memory, in which dimension 1 is the last one."""
    shape: tuple[int, ...]
    """As it travels; that of all parts together, where this is one."""
    group: TensorGroup | None = None
    """Those that have the other parts."""

    def on(self, device: Device) -> torch.Tensor:
        """Return the tensor, to be computed with from now on."""
        if isinstance(self.transfer, Resident):
            tensor = self.transfer.target
        else:
            tensor = device.wait(self.transfer)
        if self.group is not None:
            tensor = self.group.gather(tensor).view(self.shape)
        tensor = tensor.to(self.dtype)
        return tensor.movedim(-1, 1) if self.channels_last else tensor

    def finish(self, device: Device) -> torch.Tensor:
        """Hold the host until it is at the end of its way; return what has come there."""
        if isinstance(self.transfer, Resident):
            return self.transfer.target
        return device.finish(self.transfer)


LinkOf = Callable[[int, int], DeviceLink | None]
"""What carries tensors from one rank to another one where they do not go through host memory."""


def through_hosts(source: int, target: int) -> DeviceLink | None:
    """Return none: gloo carries them."""
    return None


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a neighbour sent in one message."""

    direction: Direction
    tensors: tuple[Travelling | None, ...]
    at_s: float
    """When it had come in, monotonic."""
    note: int = 0
    """What the sender has to say about it."""

    def on(self, device: Device) -> list[torch.Tensor | None]:
        """Return the tensors, to be computed with from now on."""
        return [None if one is None else one.on(device) for one in self.tensors]

    def activations_on(self, device: Device) -> list[torch.Tensor]:
        """Return the tensors where all are there, as of activations."""
        return [one.on(device) for one in self.tensors if one is not None]


@dataclass(frozen=True, slots=True)
class _Broken:
    """A link broke, or no memory was left for what came in."""

    error: RuntimeError


class _Part(Enum):
    """Messages that carry tensors, each with a tag of its own.

    Tensors with the signature of those ``_AHEAD`` before them are payloads. All others come
    as extras, whose receives are posted once the header and, as the first extra, the
    signature are read; payloads are single bytes then.
    """

    HEADER = 0
    PAYLOAD = 1
    EXTRA = 2

    def tag(self, direction: Direction) -> int:
        """Return the tag of messages."""
        return GATHER_TAG + 1 + len(_Part) * direction.value + self.value


_Form = tuple[int, ...]
"""Of a tensor: the indices of the dtypes in which it travels and in which its sender
computes, whether channels are the last dimension, then its whole shape as it travels; empty
where there is none."""
_Signature = tuple[_Form, ...]
"""Of the tensors that are sent together."""
_NOTHING = torch.empty(1, dtype=torch.uint8)
_WIRE_TYPES: Mapping[WireType, torch.dtype | None] = {
    "own": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def _is_divided(shape: Sequence[int], group: TensorGroup | None) -> bool:
    """Return whether a tensor of that shape is sent in parts."""
    return group is not None and math.prod(shape) % group.size == 0


@functools.lru_cache(maxsize=16)
def _header(note: int, num_described: int) -> torch.Tensor:
    """Return a header, the same tensor for all messages that are alike: to be read only."""
    return torch.tensor([note, num_described])


def _described(signature: _Signature) -> list[int]:
    return [number for form in signature for number in (len(form), *form)]


def _read(described: Iterable[int]) -> _Signature:
    numbers = iter(described)
    return tuple(tuple(islice(numbers, length)) for length in numbers)


class _Posted:
    """A message whose receives are posted."""

    def __init__(
        self,
        source: int,
        direction: Direction,
        signature: _Signature,
        device: Device,
        group: TensorGroup | None,
        link: DeviceLink | None,
    ) -> None:
        self._source = source
        self._direction = direction
        self._signature = signature
        self._device, self._group, self._link = device, group, link
        self._header = torch.empty(2, dtype=torch.int64)
        self._works = [self._post(_Part.HEADER, self._header)]
        self._payload = [] if link else self._post_all(_Part.PAYLOAD, signature)

    def wait(self) -> tuple[_Signature, list[torch.Tensor | None], int]:
        """Return the tensors, their signature, and the sender's note."""
        self._wait()
        note, num_described = self._header.tolist()
        signature = self._signature
        if num_described:
            described = torch.empty(num_described, dtype=torch.int64)
            self._post(_Part.EXTRA, described).wait()
            signature = _read(described.tolist())
        if self._link is not None:
            return signature, [self._receive(self._link, form) for form in signature], note
        if not num_described:
            return signature, self._payload, note
        self._works = []
        extra = self._post_all(_Part.EXTRA, signature)
        self._wait()
        return signature, extra, note

    def _wait(self) -> None:
        for work in reversed(self._works):  # the header is here before the payload
            work.wait()

    def _post_all(self, part: _Part, signature: _Signature) -> list[torch.Tensor | None]:
        tensors = [self._allocate(form) if form else None for form in signature]
        self._works += [self._post(part, tensor) for tensor in tensors if tensor is not None]
        return tensors

    def _receive(self, link: DeviceLink, form: _Form) -> torch.Tensor | None:
        return link.receive(self._shape_of(form), _DTYPES[form[0]]) if form else None

    def _allocate(self, form: _Form) -> torch.Tensor:
        return self._device.allocate_host(self._shape_of(form), _DTYPES[form[0]])

    def _shape_of(self, form: _Form) -> Sequence[int]:
        """Return the shape of what comes."""
        shape = form[3:]
        if self._group is not None and _is_divided(shape, self._group):
            return (math.prod(shape) // self._group.size,)
        return shape

    def _post(self, part: _Part, tensor: torch.Tensor) -> dist.Work:
        return world().receive(tensor, self._source, part.tag(self._direction))


class _Receiver(threading.Thread):
    """Receives as many messages as are expected, one after the other."""

    def __init__(
        self,
        source: int,
        direction: Direction,
        arrivals: SimpleQueue[Arrival | _Broken | None],
        device: Device,
        group: TensorGroup | None,
        link: DeviceLink | None,
    ) -> None:
        super().__init__(name=f"receive-{direction.name.lower()}", daemon=True)
        self._source = source
        self._direction = direction
        self._arrivals = arrivals
        self._device, self._group, self._link = device, group, link
        self.orders: SimpleQueue[int] = SimpleQueue()
        """Numbers of messages to receive next; 0 ends the thread."""
        self._signatures: deque[_Signature] = deque([()] * _AHEAD)
        """Probable signatures of the messages to be posted next."""

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
                posted.append(self._post(signature))
            signature, tensors, note = posted.popleft().wait()
            self._signatures.append(signature)
            arrived = tuple(map(self._arrived, tensors, signature))
            self._arrivals.put(Arrival(self._direction, arrived, time.monotonic(), note))

    def _post(self, signature: _Signature) -> _Posted:
        way = self._source, self._direction
        return _Posted(*way, signature, self._device, self._group, self._link)

    def _arrived(self, tensor: torch.Tensor | None, form: _Form) -> Travelling | None:
        if tensor is None:
            return None
        _, own, channels_last, *shape = form
        group = self._group if _is_divided(shape, self._group) else None
        transfer = Resident(tensor) if self._link else self._device.upload(tensor)
        return Travelling(transfer, _DTYPES[own], bool(channels_last), tuple(shape), group)


@dataclass(frozen=True, slots=True)
class _Message:
    """Tensors to send, on their way from the device."""

    direction: Direction
    target: int
    tensors: tuple[Travelling | None, ...]
    note: int
    link: DeviceLink | None
    ready: Any
    """Moment of the device at which they are computed."""


def _form(one: Travelling | None, tensor: torch.Tensor | None) -> _Form:
    if one is None or tensor is None:
        return ()
    dtypes = _DTYPES.index(tensor.dtype), _DTYPES.index(one.dtype)
    return (*dtypes, int(one.channels_last), *one.shape)


class _Sends:
    """What was sent and is not yet known to have arrived."""

    def __init__(self) -> None:
        self._works: deque[tuple[dist.Work | Sent, torch.Tensor]] = deque()
        self._sent: dict[Direction, deque[_Signature]] = {
            way: deque([()] * _AHEAD, _AHEAD) for way in Direction
        }
        """Signatures of the latest messages sent."""

    def post(self, message: _Message, device: Device) -> None:
        """Send tensors once they have come down from the device."""
        direction, note, link = message.direction, message.note, message.link
        tensors = [None if one is None else one.finish(device) for one in message.tensors]
        signature = tuple(map(_form, message.tensors, tensors))
        payload = [tensor for tensor in tensors if tensor is not None]
        expected = self._sent[direction][0]
        self._sent[direction].append(signature)
        placeholders = [_NOTHING for form in expected if form]
        if link is not None:
            device.reach(message.ready)
            self._works += [(link.send(tensor), tensor) for tensor in payload]
            payload, placeholders = [], []
        if signature == expected:
            parts = [(_Part.HEADER, _header(note, 0)), *((_Part.PAYLOAD, one) for one in payload)]
        else:
            described = torch.tensor(_described(signature), dtype=torch.int64)
            parts = [
                (_Part.HEADER, _header(note, len(described))),
                *((_Part.PAYLOAD, one) for one in placeholders),
                *((_Part.EXTRA, one) for one in (described, *payload)),
            ]
        for part, content in parts:
            work = world().send(content, message.target, part.tag(direction))
            self._works.append((work, content))
        while len(self._works) > _MAX_PENDING_SENDS:
            self._works.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until the neighbours have taken all that was sent."""
        while self._works:
            self._works.popleft()[0].wait()


class _Sender(threading.Thread):
    """Sends messages as soon as their tensors have come down from the device."""

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
        """What to send; ``None`` ends the thread."""

    def run(self) -> None:
        broken = False
        while (message := self.orders.get()) is not None:
            try:
                if not broken:
                    self._sends.post(message, self._device)
            except RuntimeError as error:
                broken = True
                self._arrivals.put(_Broken(error))
            finally:
                self.orders.task_done()


def _existing(of_activations: int | None, of_gradients: int | None) -> dict[Direction, int]:
    """Return the ranks that there are, by the direction of what they send or get."""
    ranks = {Direction.ACTIVATION: of_activations, Direction.GRADIENT: of_gradients}
    return {direction: rank for direction, rank in ranks.items() if rank is not None}


class PipelineLinks:
    """The links of one stage to its neighbours.

    Tensors of a GPU go through page-locked memory of the host, or straight to another one of
    their VM.

    Args:
        previous: Rank of the stage before, if there is one.
        following: Rank of the stage after, if there is one.
        device: Where tensors are sent from, and go to.
        wire: Type in which they travel, where theirs is wider.
        groups: Ranks that send and receive the same tensors as this one, if there are several: to
            ``previous`` and from it, and so for ``following``.
        link_of: See ``LinkOf``.
    """

    def __init__(
        self,
        previous: int | None,
        following: int | None,
        device: Device,
        wire: WireType = "own",
        groups: tuple[TensorGroup | None, TensorGroup | None] = (None, None),
        link_of: LinkOf = through_hosts,
    ) -> None:
        self._sources = _existing(previous, following)
        self._targets = _existing(following, previous)
        self._links = {way: link_of(world().rank, one) for way, one in self._targets.items()}
        self._wire = _WIRE_TYPES[wire]
        before, behind = groups
        self._groups = {Direction.ACTIVATION: behind, Direction.GRADIENT: before}
        """Of what is sent."""
        received = {Direction.ACTIVATION: before, Direction.GRADIENT: behind}
        self._device = device
        self._arrivals: SimpleQueue[Arrival | _Broken | None] = SimpleQueue()
        """``None``: whoever waits is to look up."""
        self._receivers: dict[Direction, _Receiver] = {}
        self._sends = _Sends()
        for direction, source in self._sources.items():
            link = link_of(source, world().rank)
            group = received[direction]
            receiver = _Receiver(source, direction, self._arrivals, device, group, link)
            receiver.start()
            self._receivers[direction] = receiver
        self._sender: _Sender | None = None
        if self._receivers and not device.is_host:
            self._sender = _Sender(device, self._sends, self._arrivals)
            self._sender.start()

    def source(self, direction: Direction) -> int:
        """Return the rank that sends in a direction, where there is one."""
        return self._sources[direction]

    def expect(self, direction: Direction, count: int) -> None:
        """Let ``count`` messages come in from the neighbour, if there is one."""
        if direction in self._receivers and count:
            self._receivers[direction].orders.put(count)

    def arrival(self, *, wait: bool) -> Arrival | None:
        """Return the next message that came in, or ``None`` if none has, or on ``wake``.

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

    def send(
        self, direction: Direction, tensors: Iterable[torch.Tensor | None], note: int = 0
    ) -> None:
        """Send tensors of the device together, and a number; return before they have arrived."""
        target, link = self._targets[direction], self._links[direction]
        group = self._groups[direction]
        travelling = tuple(self._leave(tensor, link, group) for tensor in tensors)
        ready = None if link is None else self._device.mark()
        message = _Message(direction, target, travelling, note, link, ready)
        if self._sender is None:
            self._sends.post(message, self._device)
        else:
            self._sender.orders.put(message)

    def _leave(
        self, tensor: torch.Tensor | None, link: DeviceLink | None, group: TensorGroup | None
    ) -> Travelling | None:
        if tensor is None:
            return None
        dtype, tensor = tensor.dtype, as_sent(tensor)
        channels_last = format_of(tensor) is not torch.contiguous_format
        if channels_last:
            tensor = tensor.movedim(1, -1)
        is_wide = dtype.is_floating_point and self._wire and dtype.itemsize > self._wire.itemsize
        if is_wide:
            tensor = tensor.to(self._wire)
        shape = tuple(tensor.shape)
        if group is not None and _is_divided(shape, group):
            tensor = tensor.flatten().chunk(group.size)[group.index]
        transfer = self._device.download(tensor) if link is None else Resident(tensor)
        return Travelling(transfer, dtype, channels_last, shape)

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
