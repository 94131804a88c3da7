"""Opens the device of a slot by the name that the agent gave it."""

from __future__ import annotations

import importlib
import os

from spottrain.pipeline.devices.cuda import CudaDevice, choose_gpu
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.devices.port import Device

STAND_IN = "SPOTTRAIN_GPU_STAND_IN"
"""Names a module that stands in for CUDA, in tests of whole jobs: see ``open_device``."""


def prepare_device(name: str, *, deterministic: bool) -> None:
    """Let code that is loaded before ``open_device`` use the slot's device, and no other.

    Args:
        name: As for ``open_device``.
        deterministic: The same.
    """
    kind, _, which = name.partition(":")
    if kind == "cuda":
        choose_gpu(which, deterministic=deterministic)


def open_device(name: str, memory_share: float = 1.0, *, deterministic: bool = False) -> Device:
    """Return a slot's device; called in the worker, which nobody forks.

    Args:
        name: ``cpu``, ``cuda:`` and a GPU's UUID, or a module on the path, a colon and the
            argument of its function ``open_device``, beside the share: so tests have a
            device of their own.
        memory_share: Share of a GPU's memory.
        deterministic: Whether the same computation must give the same bits again.

    Raises:
        UnusableDeviceError: There is no such GPU, or torch cannot use it.
        UserCodeError: The user's code has used CUDA before.
    """
    kind, _, which = name.partition(":")
    if kind == "cpu":
        return HostDevice()
    if kind == "cuda":
        kind = os.environ.get(STAND_IN, kind)
    if kind == "cuda":
        return CudaDevice(which, memory_share, deterministic=deterministic)
    device: Device = importlib.import_module(kind).open_device(which, memory_share)
    return device
