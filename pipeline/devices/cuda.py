"""A GPU of NVIDIA's, through torch: streams, events, page-locked memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from spottrain.errors import UserCodeError
from spottrain.gpus.nvml import GpuLostError, NoNvmlError, open_nvml
from spottrain.machine import run_near
from spottrain.pipeline.devices.port import Transfer, UnusableDeviceError

_RESCUE_BYTES = 64 << 20
"""Of a block."""


def choose_gpu(uuid: str, *, deterministic: bool) -> None:
    """Have CUDA see one GPU in this process, of which it is in no use yet.

    ``CUDA_VISIBLE_DEVICES`` is set here and nowhere else. Where a worker loads the user's
    code by itself, this comes before: the code may use CUDA.

    Raises:
        UserCodeError: The user's code has used CUDA before.
    """
    is_chosen = os.environ.get("CUDA_VISIBLE_DEVICES") == uuid
    if not is_chosen and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UserCodeError(
            "CUDA is in use before the worker has chosen its GPU: let no code that "
            "runs at import, in the job's function or in a dataset's constructor "
            "call .cuda()"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    if deterministic:
        # A fixed workspace: without it cuBLAS may sum in another order with each stream.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


@dataclass(frozen=True, slots=True)
class _Copy:
    target: torch.Tensor
    source: torch.Tensor
    """Kept until the copy is of no more interest: its memory must not be reused."""
    done: torch.cuda.Event


class CudaDevice:
    """One GPU.

    The user's code and torch see one GPU, ``cuda:0``, and no context is ever made on another
    (``choose_gpu``).

    Args:
        uuid: Of the GPU, as NVML names it.
        memory_share: Share of its memory that this worker may use.
        deterministic: Whether the same computation must give the same bits again:
            operations without such a kernel raise.

    Raises:
        UnusableDeviceError: There is no such GPU, or torch cannot use it.
        UserCodeError: The user's code has used CUDA before.
    """

    torch_device = torch.device("cuda", 0)
    is_host = False
    collective_library = "nccl"

    def __init__(self, uuid: str, memory_share: float, *, deterministic: bool) -> None:
        choose_gpu(uuid, deterministic=deterministic)
        if deterministic:
            _make_deterministic()
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.set_device(self.torch_device)
            torch.zeros(1, device=self.torch_device)
        except (
            RuntimeError,
            AssertionError,
            torch.cuda.DeferredCudaCallError,  # of a call made before, such as a seed
        ) as error:
            raise UnusableDeviceError(
                f"GPU {uuid} cannot be used by torch {torch.__version__}: "
                f"{str(error).splitlines()[0]}; check driver and torch with "
                "`spottrain doctor`"
            ) from error
        if memory_share < 1:
            # Of what torch allocates; a context takes some hundred MB more.
            torch.cuda.set_per_process_memory_fraction(memory_share)
        self._memory_share = memory_share
        self._thread = threading.local()
        self._uuid = uuid
        with suppress(NoNvmlError, GpuLostError), open_nvml() as nvml:
            run_near(nvml.pci_address(uuid), torch.get_num_threads())
        self.identity = f"cuda:{uuid}"
        self._up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._compute = torch.cuda.current_stream()
        # Of another pool than those streams and NCCL's: streams of a pool come again.
        self._rescue = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        # Now, as locking waits for the device (CUDA programming guide, implicit
        # synchronisation).
        self._rescuing = threading.Lock()
        self._blocks = [self.allocate_host((_RESCUE_BYTES,), torch.uint8) for _ in range(2)]
        self._beside = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._of_thread = threading.local()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory of the GPU."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return page-locked memory, from the pool that torch keeps of it."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def allocate_beside(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the pool of that thread's stream, not to be given out again before
        the computations queued until it is let go of."""
        memory = torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)
        memory.record_stream(self._compute)
        return memory

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Register memory with the driver (``cudaHostRegister``), for this process.

        Raises:
            UnusableDeviceError: The system refuses to lock so much.
        """
        num_bytes = memory.numel() * memory.element_size()
        if not num_bytes:
            return
        result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
        if int(result) != 0:
            self._forget_error()
            raise UnusableDeviceError(
                f"cannot lock {num_bytes / 1e9:.1f} GB of host memory for the GPU (CUDA "
                f"error {int(result)}): raise the limit of locked memory (ulimit -l), "
                "or set runtime.state: device"
            )

    def unlock_pages(self, memory: torch.Tensor) -> None:
        """Unregister memory: what is unmapped before stays locked, and its addresses
        cannot be registered again.
        """
        if memory.numel():
            self.synchronise()
            result = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
            if int(result) != 0:
                self._forget_error()

    def upload(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Copy on the stream of uploads.

        New memory is taken from that stream's own pool: no computation that is still
        queued uses it, so that the copy need not wait for the computations.
        """
        with torch.cuda.stream(self._up):
            if target is None:
                target = torch.empty_like(source, device=self.torch_device)
                target.record_stream(self._queue)
            else:
                self._up.wait_stream(self._queue)
                target.record_stream(self._up)
            target.copy_(source, non_blocking=True)
            return _Copy(target, source, _moment(self._up))

    def download(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Copy on the stream of downloads, after what is queued for computing."""
        if target is None:
            target = self.allocate_host(source.shape, source.dtype)
        self._down.wait_stream(self._queue)
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._down)
            return _Copy(target, source, _moment(self._down))

    def rescue(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy on a stream of its own, which waits for no other.

        Through two page-locked blocks: one is filled while the other is copied on.
        """
        pieces = torch.split(source.reshape(-1).view(torch.uint8), _RESCUE_BYTES)
        rooms = torch.split(target.view(-1).view(torch.uint8), _RESCUE_BYTES)
        coming: list[_Copy] = []
        with self._rescuing, torch.cuda.device(self.torch_device), torch.cuda.stream(self._rescue):
            for number, piece in enumerate(pieces):
                block = self._blocks[number % 2][: piece.numel()]
                block.copy_(piece, non_blocking=True)
                coming.append(_Copy(block, piece, _moment(self._rescue)))
                if number:
                    rooms[number - 1].copy_(self.finish(coming[number - 1]))
            for room, last in zip(rooms[-1:], coming[-1:], strict=True):
                room.copy_(self.finish(last))

    def is_usable(self) -> bool:
        """Wait for the device; an error that has ended its context comes up again."""
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError:
            return False
        return True

    def wait(self, transfer: Transfer) -> torch.Tensor:
        """Let the stream of computations wait; the host goes on."""
        assert isinstance(transfer, _Copy)
        self._queue.wait_event(transfer.done)
        return transfer.target

    def finish(self, transfer: Transfer) -> torch.Tensor:
        """Let the host wait."""
        assert isinstance(transfer, _Copy)
        self.reach(transfer.done)
        return transfer.target

    def synchronise(self) -> None:
        """Let the host wait for all streams, or for that of a thread beside."""
        if self._queue is self._beside:
            self._beside.synchronize()
        else:
            torch.cuda.synchronize(self.torch_device)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the stream of computations."""
        return _moment(self._queue, enable_timing=True)

    def reach(self, mark: torch.cuda.Event) -> None:
        """Let the host wait for an event."""
        began_s = self.clock()
        mark.synchronize()
        self._thread.held_s = self.held_s() + self.clock() - began_s

    def clock(self) -> float:
        """Return the time of this process."""
        return time.perf_counter()

    def held_s(self) -> float:
        """Return what ``reach`` has added up."""
        held_s: float = getattr(self._thread, "held_s", 0.0)
        return held_s

    def elapsed_s(self, marks: Iterable[tuple[Any, Any]]) -> float:
        """Return the time between the events of each pair, added up."""
        total_ms = 0.0
        for begin, end in marks:
            end.synchronize()
            total_ms += begin.elapsed_time(end)
        return total_ms / 1000

    def memory_bytes(self) -> int | None:
        """Return this worker's share of the GPU's memory."""
        _, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total * self._memory_share)

    def context_bytes(self) -> int:
        """Return what this process has taken beside torch's allocator.

        Where NVML does not know this process, as in a container, that of others counts, too.
        """
        reserved = torch.cuda.memory_reserved(self.torch_device)
        with suppress(NoNvmlError, GpuLostError), open_nvml() as nvml:
            if own := nvml.memory_of(self._uuid, os.getpid()):
                return max(0, own - reserved)
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free - reserved

    def peak_bytes(self) -> int | None:
        """Return the maximum that torch's allocator has given out."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def free_cached(self) -> None:
        """See ``Device``; NCCL allocates beside torch's cache."""
        torch.cuda.empty_cache()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Make the stream of computations current in this thread."""
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Give this thread a stream of its own, whose kernels go before others."""
        self._of_thread.stream = self._beside
        try:
            with torch.cuda.device(self.torch_device), torch.cuda.stream(self._beside):
                yield
        finally:
            del self._of_thread.stream

    @property
    def _queue(self) -> torch.cuda.Stream:
        """The stream in which this thread computes, or for which it transfers."""
        return getattr(self._of_thread, "stream", self._compute)

    def _forget_error(self) -> None:
        """Let the error of a call that was refused not appear again as one of a kernel."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)


def _moment(stream: torch.cuda.Stream, *, enable_timing: bool = False) -> torch.cuda.Event:
    """Record an event whose waiting host sleeps instead of spinning on a core."""
    event = torch.cuda.Event(enable_timing, blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _make_deterministic() -> None:
    """Choose kernels that give the same bits again on the same model of GPU.

    Source: torch's notes on reproducibility and on numerical accuracy.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    # That alone leaves convolutions to torch.backends.fp32_precision, where the user may
    # have allowed TF32 (Context.cpp, since torch 2.9).
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined]
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
