"""The stand-in for a GPU with a clock: computations and transfers take declared time.

Operations on the device's tensors are computed at once, and their declared time is queued:
what they compute over the GPU's peak, or what they move over its memory's bandwidth,
whichever is longer. Transfers queue on a stream for each direction, over the bus; collectives
are queued as ``timed_groups`` says. The host runs ahead of all of them and is held where a GPU
would hold it. Beside that everything is as on ``deferred``: early accesses raise, memory is
bounded.

The host either is held really, a declared second lasting ``scale`` of a real one, or its time
is virtual (``scale=0``): then its own code takes no time but what is declared for memory
that it moves, so that nothing measured depends on the machine that tests run on.

Without ``numbers`` nothing larger than a few pages is computed or copied: tensors have shapes,
declared times and memory that nobody touches, so that models of any size run here.

By what the file of the fake NVML says of a GPU its kernels hang (``hangs``), it is lost
(``lost``) or its bus is slow (``bus_share``); that is looked at whenever a task begins. The
same file gives ``scale`` and ``numbers`` of devices that are opened by their UUID.
"""

from __future__ import annotations

import csv
import json
import math
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests.fakes import timed_groups
from tests.fakes.deferred import Call, Copy, DeferredDevice
from tests.fakes.gpus import VARIABLE
from torch.utils._pytree import tree_map_only

from spottrain.pipeline.base.tracking import tensors_in
from spottrain.pipeline.devices.port import Transfer
from spottrain.pipeline.model.recorder import FLOPS

CATALOGUE = Path(__file__).parents[2] / "pricing" / "prices" / "data" / "gpus.csv"
BUS_BYTES_PER_S = {"H100": 64e9, "L4": 32e9, "T4": 16e9}
"""Each way, nominally: PCIe 5.0, 4.0 and 3.0 with 16 lanes (NVIDIA's data sheets of the H100
SXM, the L4 and the T4 give 128, 64 and 32 GB/s for both ways together)."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Shares of a GPU's peaks that are declared as reached."""

    matrices: float
    attention: float
    """Of the same peak, by fused kernels: their FLOPs are counted as if nothing were masked."""
    memory: float
    bus: float


HALF = Reached(matrices=0.5, attention=0.5, memory=0.5, bus=0.5)
REACHED = {"H100": Reached(matrices=0.8, attention=2 * 229 / 989.5, memory=0.9, bus=52.8 / 64)}
"""Of the GPUs for which kernels' rates are published; half of all peaks of others.

Matrices: ``matmul_share`` of the catalogue. Attention: FlashAttention-2 forward, heads of 64, causal,
sequences of 1024 take 229 TFLOP/s, which count half of the matrix (FlashAttention-3, Shah et
al. 2024, figure 5). Memory: as ``pricing/ranking/estimate.py`` has it. Bus: downloads of nvbandwidth
(github.com/NVIDIA/nvbandwidth, issue 24).
"""
PEER_BYTES_PER_S = {"H100": 370e9}
"""From GPU to GPU of a VM, each way: NVLink's 450 GB/s without the protocol's share (NCCL's
maintainers, github.com/NVIDIA/nccl-tests, issue 212). Others go over the bus."""
CONTEXT_BYTES = 500 << 20
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a GPU is declared to do."""

    half_flops: float
    """Per second, in bf16 or fp16."""
    single_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    bus_bytes_per_s: float
    """Each way."""
    attention_flops: float = math.inf
    """Per second, of fused attention where that is slower than other products."""
    peer_bytes_per_s: float = 10e9
    """To another GPU of the VM, each way."""
    peer_latency_s: float = 3e-6
    """Of a message to it."""
    launch_s: float = 5e-6
    """Of the host, for each operation that it queues."""
    host_bytes_per_s: float = 20e9
    """That the host's own operations move."""

    def slowed(self, factor: float) -> Figures:
        """Return those of a GPU that takes as much longer, as with a larger model."""
        return replace(
            self,
            half_flops=self.half_flops / factor,
            single_flops=self.single_flops / factor,
            memory_bytes_per_s=self.memory_bytes_per_s / factor,
            bus_bytes_per_s=self.bus_bytes_per_s / factor,
            attention_flops=self.attention_flops / factor,
            peer_bytes_per_s=self.peer_bytes_per_s / factor,
        )

    @classmethod
    def of(cls, gpu: str) -> Figures:
        """Return those of a GPU in the catalogue: peaks of its data sheet, times a share."""
        with CATALOGUE.open() as file:
            row = next(row for row in csv.DictReader(file) if row["gpu"] == gpu)
        half = float(row["bf16_tflops"] or row["fp16_tflops"]) * 1e12
        reached = REACHED.get(gpu, HALF)
        bus_bytes_per_s = BUS_BYTES_PER_S[gpu] * reached.bus
        return cls(
            half_flops=half * reached.matrices,
            single_flops=float(row["fp32_tflops"]) * 1e12 * reached.matrices,
            memory_bytes=int(row["memory_mib"]) << 20,
            memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9 * reached.memory,
            bus_bytes_per_s=bus_bytes_per_s,
            attention_flops=half * reached.attention,
            peer_bytes_per_s=PEER_BYTES_PER_S.get(gpu, bus_bytes_per_s),
        )


class Clock:
    """The host's time, in declared seconds.

    Args:
        scale: Real seconds of a declared one; 0: virtual, each thread with a time of its own.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._own = threading.local()

    @property
    def is_virtual(self) -> bool:
        """True if only what is declared takes time."""
        return not self._scale

    def now_s(self) -> float:
        """Return the time."""
        if self._scale:
            return time.perf_counter() / self._scale
        now_s: float = getattr(self._own, "now_s", 0.0)
        return now_s

    def hold(self, until_s: float) -> None:
        """Hold this thread; what never comes is waited for until the process ends."""
        if math.isinf(until_s):
            threading.Event().wait()
        if self._scale:
            time.sleep(max(0.0, until_s - self.now_s()) * self._scale)
        else:
            self._own.now_s = max(until_s, self.now_s())


class TimedDevice(DeferredDevice):
    """The stand-in.

    Args:
        figures: Of the GPU.
        seed: As for ``DeferredDevice``.
        scale: As for ``Clock``.
        memory_share: Share of the GPU's memory for this worker.
        uuid: In the file of the fake NVML, if that says what befalls the GPU.
        numbers: Whether anything is computed.
    """

    def __init__(
        self,
        figures: Figures,
        seed: int = 0,
        scale: float = 0.0,
        memory_share: float = 1.0,
        uuid: str = "",
        *,
        numbers: bool = True,
    ) -> None:
        share_bytes = int(figures.memory_bytes * memory_share)
        super().__init__(seed, max(0, share_bytes - CONTEXT_BYTES))
        self.figures = figures
        self.time = Clock(scale)
        self.operations = 0
        """That have run on the device."""
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        """Their time, by what bounds it: matrices, attention, memory, or peers."""
        self.meet: Callable[[float, float], tuple[float, float]] | None = None
        """How hosts' and devices' times are exchanged in collectives, where gloo does not."""
        self._share_bytes = share_bytes
        self._numbers = numbers
        self._uuid = uuid
        if uuid:
            self.identity = f"timed:{uuid}"
        self._computed_s = 0.0
        """When all computations that are queued will be done."""
        self._copied_s = {False: 0.0, True: 0.0}
        """When all downloads (true) and all uploads will be."""
        self._thread = threading.local()
        self._is_lost = False

    # --- what is computed ---------------------------------------------------------------

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory, which a GPU would have zeroed."""
        with torch.utils._python_dispatch._disable_current_modes():
            if self._numbers:
                return super().allocate(num_bytes)
            memory = untouched((num_bytes,), torch.uint8)
        self.hold([memory])
        return memory

    def run(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changed: object
    ) -> Any:
        """Run an operation, or return memory for what it would have computed."""
        operands = tensors_in((args, kwargs))
        if operation.namespace == "c10d":
            on_device = self.hold_any(operands)
            is_few = all(x.numel() <= _FEW for x in operands)
            skips = on_device and not self._numbers and not is_few
            return timed_groups.run(self, operation, args, kwargs, on_device=on_device, skips=skips)
        few = _FEW if self.hold_any(operands) else _FEW_OF_HOST
        if self._numbers or _is_computed(operation, args, kwargs, operands, few):
            return operation(*args, **kwargs)
        return _without_numbers(operation, args, kwargs)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Do a copy, unless it is of no interest."""
        if self._numbers or source.numel() <= _FEW:
            super().move(source, target)

    def spoil(self, memory: torch.Tensor) -> None:
        """Let memory hold no numbers, if there are any."""
        if self._numbers:
            super().spoil(memory)

    def hold_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether one of the tensors is the device's, or a single number that was expanded:
        that stands there for what another rank has."""
        known = list(tensors)
        return super().hold_any(known) or any(map(_is_blank, known))

    # --- what takes time ----------------------------------------------------------------

    def ran(self, call: Call, *, on_device: bool) -> None:
        """Queue an operation's time, or let the host take it."""
        if call.operation.namespace == "c10d":
            return  # it has taken its time
        if on_device:
            self._check()
            self.operations += 1
            takes_s, kind = self._compute_s(call)
            self.spent_s[kind] += takes_s
            with self._lock:
                self._computed_s = self._queue_s() + takes_s
            if self.time.is_virtual:
                self.time.hold(self.time.now_s() + self.figures.launch_s)
        elif self.time.is_virtual and (moved := _moved_bytes(call)):
            self.time.hold(self.time.now_s() + moved / self.figures.host_bytes_per_s)

    def _queue_s(self) -> float:
        """Return when what is queued now would begin."""
        return max(self._computed_s, self.time.now_s())

    def queue(self, until_s: float) -> None:
        """Let what is computed from now on begin no earlier."""
        with self._lock:
            self._computed_s = max(self._queue_s(), until_s)

    def met(self) -> None:
        """Note the host's time when all ranks of a group have come to a collective."""
        if self._uuid:
            with times_file(self._uuid).open("a") as file:
                file.write(f"{self.clock()!r}\n")

    def _compute_s(self, call: Call) -> tuple[float, str]:
        """Return an operation's time, and the figure that bounds it."""
        moved = _moved_bytes(call)
        moves_s = moved / self.figures.memory_bytes_per_s
        formula = FLOPS.get(call.operation.overloadpacket)
        if formula is None or not moved:
            return moves_s, "memory"
        flops = formula(*call.args, **call.kwargs, out_val=call.result)
        is_half = tensors_in(call.result)[0].dtype in _HALVES
        rate, kind = self.figures.half_flops if is_half else self.figures.single_flops, "matrices"
        if "attention" in call.operation._schema.name:
            rate, kind = min(rate, self.figures.attention_flops), "attention"
        return max((flops / rate, kind), (moves_s, "memory"))

    def began(self, copy: Copy) -> None:
        """Queue a transfer's time."""
        self._check()
        after_s = [self._copied_s[copy.downward], self.time.now_s()]
        if copy.downward or not copy.is_new:
            after_s.append(self._computed_s)
        num_bytes = copy.source.numel() * copy.source.element_size()
        copy.at_s = max(after_s) + num_bytes / self._bus_bytes_per_s()
        self._copied_s[copy.downward] = copy.at_s

    def arrived(self, transfer: Transfer, at_s: float, *, over_bus: bool = True) -> None:
        """Say when a message came whose upload has begun, for a host whose time is virtual."""
        assert isinstance(transfer, Copy)
        num_bytes = transfer.source.numel() * transfer.source.element_size()
        takes_s = num_bytes / self._bus_bytes_per_s() if over_bus else 0.0
        with self._lock:
            transfer.at_s = max(transfer.at_s, at_s + takes_s)
            self._copied_s[False] = max(self._copied_s[False], transfer.at_s)

    @property
    def newest_download_s(self) -> float:
        """When the last of the downloads that were queued ends."""
        return self._copied_s[True]

    # --- what waits ---------------------------------------------------------------------

    def wait(self, transfer: Transfer) -> torch.Tensor:
        """Queue what is computed from now on after a transfer."""
        target = self.bring(transfer)
        assert isinstance(transfer, Copy)
        self.queue(transfer.at_s)
        return target

    def finish(self, transfer: Transfer) -> torch.Tensor:
        """Hold the host until a transfer's end."""
        assert isinstance(transfer, Copy)
        self.reach(transfer.at_s)
        return self.bring(transfer)

    def synchronise(self) -> None:
        """Hold the host until all that is queued is done."""
        self._check()
        self.time.hold(max(self._computed_s, *self._copied_s.values()))
        super().synchronise()

    def note_read(self, operation: str) -> None:
        """Hold the host until what it reads is computed."""
        super().note_read(operation)
        self.reach(self._computed_s)

    def clock(self) -> float:
        """Return the host's time."""
        return self.time.now_s()

    def held_s(self) -> float:
        """Return what ``reach`` has added up."""
        held_s: float = getattr(self._thread, "held_s", 0.0)
        return held_s

    def mark(self) -> float:
        """Return when the computations queued so far will be done."""
        self._look()
        return self._queue_s()

    def reach(self, mark: float) -> None:
        """Hold the host until then."""
        self._check()
        began_s = self.clock()
        self.time.hold(mark)
        self._thread.held_s = self.held_s() + self.clock() - began_s

    def elapsed_s(self, marks: Iterable[tuple[float, float]]) -> float:
        """Return the time between the moments of each pair, once they have come."""
        pairs = list(marks)
        for _, end_s in pairs:
            self.reach(end_s)
        return super().elapsed_s(pairs)

    # --- memory -------------------------------------------------------------------------

    def memory_bytes(self) -> int | None:
        """Return this worker's share of the GPU's."""
        return self._share_bytes

    def context_bytes(self) -> int:
        """Return what is left of that for no tensor."""
        return CONTEXT_BYTES

    # --- what befalls a GPU -------------------------------------------------------------

    def hang(self) -> None:
        """Let the computation that is queued next never end."""
        self._computed_s = math.inf

    def lose(self) -> None:
        """Let every further use fail, as after an error that has ended a context."""
        self._is_lost = True

    def is_usable(self) -> bool:
        """Return whether it is not lost."""
        return not self._is_lost

    def rescue(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy, also beside a computation that hangs."""
        self._check()
        if self._numbers or source.numel() <= _FEW:
            super().rescue(source, target)

    def _check(self) -> None:
        if self._is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def _look(self) -> None:
        """Let happen what the file says."""
        told = entry(self._uuid) if self._uuid else {}
        if told.get("lost"):
            self.lose()
        if told.get("hangs"):
            self.hang()
        self._check()

    def _bus_bytes_per_s(self) -> float:
        told = entry(self._uuid) if self._uuid else {}
        share: float = told.get("bus_share", 1.0)
        return self.figures.bus_bytes_per_s * share


_MAP_NORESERVE = 0x4000
"""As Linux has it (asm-generic/mman-common.h); Python names it from 3.13 on."""
_FEW = 1 << 12
"""Elements of what is computed even without numbers, such as losses and norms."""
_FEW_OF_HOST = 1 << 20
"""The same of tensors of the host, such as what ranks tell each other."""


def untouched(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that takes no memory as long as nobody writes to it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes <= _FEW:
        return torch.zeros(shape, dtype=dtype)
    # Not counted against what the system may promise: models may be larger than this machine.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # else a bias that is written takes 2 MiB
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def _is_blank(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and tensor.numel() > 1 and tensor.untyped_storage().nbytes() <= tensor.itemsize


def _is_computed(
    operation: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[torch.Tensor],
    few: int,
) -> bool:
    """Return whether an operation is run even without numbers: it makes views, or has few."""
    aliases = [one.alias_info for one in operation._schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases):
        return True
    if not operands and operation.namespace == "aten":
        operands = tensors_in(_made(operation, args, kwargs))
    return bool(operands) and all(x.numel() <= few for x in operands)


def _without_numbers(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation would, with memory that it has not written to."""
    schema = operation._schema
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
    changed = [
        given[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    ]
    if changed and len(schema.returns) <= 1:
        return changed[0] if schema.returns else None
    if changed:
        return tuple(changed)
    made = _made(operation, args, kwargs)
    return tree_map_only(torch.Tensor, lambda x: untouched(x.shape, x.dtype), made)


_MADE: dict[Any, Any] = {}
"""What operations have made of operands on the meta device, which is slow to find out."""


def _made(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation makes, on the meta device."""
    if operation.namespace != "aten":  # its operands may be such as cannot be compared
        return _on_meta(operation, args, kwargs)
    key = operation, _described(args), _described(kwargs)
    if key not in _MADE:
        _MADE[key] = _on_meta(operation, args, kwargs)
    return _MADE[key]


def _on_meta(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
    return operation(*args, **kwargs)


def _described(value: Any) -> Any:
    """Return all of an operand by which the shapes and types of results may differ."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((key, _described(one)) for key, one in value.items())
    return type(value), value


def _moved_bytes(call: Call) -> int:
    """Return the bytes that an operation reads and writes; 0 for one that makes a view."""
    operands = tensors_in((call.args, call.kwargs))
    results = tensors_in(call.result)
    known = {tensor.untyped_storage()._cdata for tensor in operands}
    fresh = [x for x in results if x.untyped_storage()._cdata not in known]
    writes = fresh and not call.operation._schema.name.startswith("aten::empty")
    if not writes and not call.changed:
        return 0
    return sum(x.numel() * x.element_size() for x in (*operands, *fresh, *call.changed))


def entry(uuid: str) -> dict[str, Any]:
    """Return what the file of the fake NVML says of a GPU."""
    world = json.loads(Path(os.environ[VARIABLE]).read_text())
    found: dict[str, Any] = next(gpu for gpu in world["gpus"] if gpu["uuid"] == uuid)
    return found


def times_file(uuid: str) -> Path:
    """Return the file of the times at which ranks met, of a device with a UUID."""
    return Path(os.environ[VARIABLE]).with_name(f"{uuid}.times")


def open_device(name: str, memory_share: float = 1.0) -> TimedDevice:
    """Open a device.

    Args:
        name: ``H100``, ``L4`` or ``T4``, or the UUID of one in the file of the fake NVML; a
            comma and the scale may follow.
        memory_share: Share of its memory.
    """
    which, _, given = name.partition(",")
    if which in BUS_BYTES_PER_S:
        return TimedDevice(Figures.of(which), scale=float(given or 0), memory_share=memory_share)
    told = entry(which)
    gpu = next(key for key in BUS_BYTES_PER_S if f" {key}" in told["name"])
    figures = replace(Figures.of(gpu), memory_bytes=told["memory_bytes"])
    scale, numbers = float(told.get("scale", 1.0)), told.get("numbers", True)
    return TimedDevice(figures, 0, scale, memory_share, which, numbers=numbers)
