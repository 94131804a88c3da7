"""Batches in shared memory: what one process writes, another one maps.

A batch is pickled (protocol 5, PEP 574) with the contents of its tensors beside the
pickle, so that the reader's tensors lie in the memory that the writer has filled. They
keep shape, strides and their alignment to cache lines: operations on them take the same
kernels, hence give the same bits, as if the batch had been made where it is used.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
from typing import Any

import torch

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import Batch

_ALIGNMENT = 64
"""Bytes of a cache line; torch aligns its own memory so."""


class UnsendableError(UserCodeError):
    """A batch cannot be sent to another process."""


def write_batch(batch: Batch) -> int:
    """Return a file descriptor of new shared memory that holds a batch.

    Raises:
        UnsendableError: It cannot be pickled, or is not in the host's memory.
    """
    stream, pieces = io.BytesIO(), list[pickle.PickleBuffer]()
    try:
        _Pickler(stream, protocol=5, buffer_callback=pieces.append).dump(batch)
    except UnsendableError:
        raise
    except Exception as error:
        raise _unsendable(error) from error
    views = [piece.raw() for piece in pieces]
    ends, end = [], 0
    for view in views:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + view.nbytes
        ends.append((begin, end))
    index = pickle.dumps((ends, stream.getvalue()))
    fd = os.memfd_create("batch")
    size = end + len(index) + 8
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as memory:
        for (begin, stop), view in zip(ends, views, strict=True):
            memory[begin:stop] = view
        memory[end:-8] = index
        memory[-8:] = end.to_bytes(8)
    return fd


def read_batch(fd: int) -> Batch:
    """Return the batch that ``write_batch`` wrote; its tensors lie in that memory.

    The memory is freed with the last of them. Closes ``fd``.

    Raises:
        UnsendableError: It cannot be unpickled here.
    """
    try:
        memory = memoryview(mmap.mmap(fd, 0))
    finally:
        os.close(fd)
    end = int.from_bytes(memory[-8:])
    ends, content = pickle.loads(memory[end:-8])
    pieces = [memory[begin:stop] for begin, stop in ends]
    try:
        return pickle.loads(content, buffers=pieces)
    except Exception as error:
        raise _unsendable(error) from error


def _unsendable(error: Exception) -> UnsendableError:
    reason = (str(error).splitlines() or [""])[0]
    return UnsendableError(
        f"the batch cannot go from a loader process to a worker: {reason}; let collate "
        "return tensors, in tuples or dictionaries, or set loader.workers: 0"
    )


class _Pickler(pickle.Pickler):
    """Puts the contents of ordinary tensors beside the pickle."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make ``value`` again, see ``pickle.Pickler``."""
        if type(value) is not torch.Tensor:
            return NotImplemented
        if value.device.type != "cpu":
            raise UnsendableError(
                f"the batch has a tensor on {value.device}: return tensors on the CPU "
                "from dataset and collate; spottrain moves them to the GPU"
            )
        is_plain = (
            value.layout is torch.strided
            and not value.requires_grad
            and not value.is_quantized
            and not value.is_conj()
            and not value.is_neg()
        )
        return _reduced(value) if is_plain else NotImplemented


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    how = tensor.dtype, tuple(tensor.shape), tensor.stride()
    if not tensor.numel():
        return _empty, how
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.dtype.itemsize
    address, begin = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
    lead = min(address % _ALIGNMENT, address - begin) // size * size
    content = (ctypes.c_char * (lead + (last + 1) * size)).from_address(address - lead)
    return _rebuilt, (pickle.PickleBuffer(content), lead // size, *how)


def _rebuilt(
    content: memoryview,
    offset: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    memory = torch.frombuffer(content, dtype=dtype)
    return memory.as_strided(shape, stride, offset)


def _empty(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)
