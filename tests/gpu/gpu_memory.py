"""Memory of a GPU that other processes can map: CUDA's virtual memory management.

Made by ``cuMemCreate`` with a file descriptor as its handle (CUDA driver API, Virtual
Memory Management). Where there is no GPU, a file in memory stands for it, so that what
surrounds it can be tried anywhere.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from typing import Any, Protocol

import numpy as np

PATTERN_FROM = 1 << 21
"""Bytes before it are the counter's."""
_CHUNK_BYTES = 1 << 28
_COUNTING = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry count(.param .u64 place)
{
    .reg .u64 %at;
    .reg .u64 %value;
    ld.param.u64 %at, [place];
    cvta.to.global.u64 %at, %at;
again:
    ld.volatile.global.u64 %value, [%at];
    add.u64 %value, %value, 1;
    st.volatile.global.u64 [%at], %value;
    bra again;
}
\0"""
"""Adds one to a number in memory for ever."""


class SharedMemory(Protocol):
    """Memory that may outlive the process that made it."""

    fd: int
    """Stands for it in other processes."""

    def fill(self, value: int) -> None:
        """Write 32-bit values all over it, behind the counter."""

    def read(self, at: int, num_bytes: int) -> bytes:
        """Return bytes of it, while a kernel counts."""

    def count_for_ever(self) -> None:
        """Let a kernel add to the first 64-bit number until this process ends."""


def create(device: str, num_bytes: int) -> SharedMemory:
    """Return new memory of a GPU, or of this machine for any other device."""
    if device.startswith("cuda:"):
        return CudaMemory(device, num_bytes)
    return HostMemory(num_bytes)


def map_again(device: str, num_bytes: int, fd: int) -> SharedMemory:
    """Map memory that another process has made."""
    if device.startswith("cuda:"):
        return CudaMemory(device, num_bytes, fd)
    return HostMemory(num_bytes, fd)


def is_whole(memory: SharedMemory, num_bytes: int, value: int) -> bool:
    """Return whether all that ``fill`` has written is there."""
    for at in range(PATTERN_FROM, num_bytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, num_bytes - at)
        if (np.frombuffer(memory.read(at, size), np.uint32) != value).any():
            return False
    return True


class HostMemory:
    """A file in memory, in place of a GPU's."""

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("in-place-of-a-gpu")
            os.ftruncate(fd, num_bytes)
        self.fd = fd
        self._map = mmap.mmap(fd, num_bytes)

    def fill(self, value: int) -> None:
        """Write values."""
        np.frombuffer(self._map, np.uint32)[PATTERN_FROM // 4 :] = value

    def read(self, at: int, num_bytes: int) -> bytes:
        """Return bytes."""
        return self._map[at : at + num_bytes]

    def count_for_ever(self) -> None:
        """Count in a thread."""

        def count() -> None:
            words = np.frombuffer(self._map, np.uint64)
            while True:
                words[0] += np.uint64(1)
                time.sleep(1e-5)

        threading.Thread(target=count, daemon=True).start()


class CudaMemory:
    """Memory of a GPU.

    Args:
        device: ``cuda:`` and the GPU's UUID.
        num_bytes: A multiple of 2 MiB, the granularity.
        fd: Of memory that another process has made.
    """

    def __init__(self, device: str, num_bytes: int, fd: int | None = None) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]
        from cuda.bindings import driver

        self._driver = driver
        self._call(driver.cuInit(0))
        gpu = self._call(driver.cuDeviceGet(0))
        context = self._call(driver.cuDevicePrimaryCtxRetain(gpu))
        self._call(driver.cuCtxSetCurrent(context))
        kind = driver.CUmemAllocationHandleType
        posix = kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        if fd is None:
            handle = self._create(num_bytes, posix)
            exported = driver.cuMemExportToShareableHandle(handle, posix, 0)
            self.fd = int(self._call(exported))
        else:
            handle = self._call(driver.cuMemImportFromShareableHandle(fd, posix))
            self.fd = fd
        self.at = self._map(handle, num_bytes)
        """Its address."""
        self._num_bytes = num_bytes
        non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._copies = self._call(driver.cuStreamCreate(non_blocking))

    def _create(self, num_bytes: int, posix: Any) -> Any:
        driver = self._driver
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = 0
        wanted.requestedHandleTypes = posix
        smallest = driver.CUmemAllocationGranularity_flags
        step = self._call(
            driver.cuMemGetAllocationGranularity(wanted, smallest.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        )
        if num_bytes % step:
            raise ValueError(f"memory must be a multiple of {step} bytes: {num_bytes}")
        return self._call(driver.cuMemCreate(num_bytes, wanted, 0))

    def _map(self, handle: Any, num_bytes: int) -> int:
        driver = self._driver
        at = self._call(driver.cuMemAddressReserve(num_bytes, 0, 0, 0))
        self._call(driver.cuMemMap(at, num_bytes, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        flags = driver.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call(driver.cuMemSetAccess(at, num_bytes, [access], 1))
        return int(at)

    def fill(self, value: int) -> None:
        """Write values."""
        count = (self._num_bytes - PATTERN_FROM) // 4
        self._call(self._driver.cuMemsetD32(self.at + PATTERN_FROM, value, count))
        self.synchronise()

    def read(self, at: int, num_bytes: int) -> bytes:
        """Return bytes, copied on a stream of its own."""
        found = ctypes.create_string_buffer(num_bytes)
        copy = self._driver.cuMemcpyDtoHAsync
        place = ctypes.addressof(found)
        self._call(copy(place, self.at + at, num_bytes, self._copies))
        self._call(self._driver.cuStreamSynchronize(self._copies))
        return found.raw

    def synchronise(self) -> None:
        """Let the host wait for all kernels and copies.

        Raises:
            RuntimeError: One has failed.
        """
        self._call(self._driver.cuCtxSynchronize())

    def count_for_ever(self) -> None:
        """Count in a kernel."""
        driver = self._driver
        module = self._call(driver.cuModuleLoadData(_COUNTING))
        kernel = self._call(driver.cuModuleGetFunction(module, b"count"))
        arguments = ((self.at,), (ctypes.c_void_p,))
        one = (1,) * 6
        self._call(driver.cuLaunchKernel(kernel, *one, 0, 0, arguments, 0))

    def _call(self, result: tuple[Any, ...]) -> Any:
        """Return what a call of the driver gave, or raise its error."""
        error, *values = result
        if int(error):
            _, name = self._driver.cuGetErrorName(error)
            raise RuntimeError(f"the driver says {(name or b'?').decode()}")
        return values[0] if values else None
