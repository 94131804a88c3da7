"""What a supervisor checks before it serves: may it fork, does its torch run here?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import torch

from spottrain.errors import UserCodeError
from spottrain.gpus.builds import (
    UnfitBuildError,
    build_of,
    capabilities_of,
    check_driver,
)
from spottrain.wire import messages
from spottrain.wire.model import GpuFacts

_CUDA_FILE = "/dev/nvidia-uvm"
"""Open as soon as any library has initialised the driver; NVML does not open it."""


def unfit(gpus: Sequence[GpuFacts]) -> messages.VmUnfit | None:
    """Return why this torch does not run on the GPUs, if it does not.

    ``torch.cuda.get_arch_list`` asks NVML whether there are GPUs, which is no CUDA call,
    as the agent sets PYTORCH_NVML_BASED_CUDA_CHECK.
    """
    if not gpus:
        return None
    flags = " ".join(torch.cuda.get_arch_list()) if torch.version.cuda else ""
    build = build_of(torch.version.cuda or "", capabilities_of(flags))
    try:
        check_driver(build, gpus[0].driver, (gpu.compute_capability for gpu in gpus))
    except UnfitBuildError as error:
        return messages.VmUnfit(reason=str(error))
    return None


def check_no_cuda() -> None:
    """Check that the user's code has not initialised CUDA, which no fork survives.

    Raises:
        UserCodeError: It has.
    """
    if torch.cuda.is_initialized() or _CUDA_FILE in _open_files():  # type: ignore[no-untyped-call]
        raise UserCodeError(
            "the user's module or its function initialises CUDA: workers are forked from "
            "the process that loads it, and CUDA does not work in a forked process; use "
            "no GPU there (no .cuda() or .to('cuda'), no torch.cuda.synchronize()): "
            "spottrain moves the model and the batches"
        )


def _open_files() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is closed
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def is_single_threaded() -> bool:
    """Return whether this process can be forked safely after loading the user's job."""
    return len(os.listdir("/proc/self/task")) == 1
