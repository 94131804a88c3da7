"""Tensors that go from a device of a VM straight to another one of it.

Each direction between two neighbours has a communicator of its own: what is queued on one runs in
order, so that a send which waits for its receive would hold up what its peer waits for. A header
over gloo tells what comes; only then is it received, so a receive waits for data alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spottrain.pipeline.devices.port import Device

_SOURCE, _TARGET = 0, 1
"""Places of the two ranks in their group."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A tensor that is where it is computed with, and no transfer under way."""

    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor on its way."""

    work: dist.Work
    device: Device

    def wait(self) -> None:
        """Hold the host until the tensor has arrived."""
        with self.device.beside():
            self.work.wait()
            self.device.synchronise()


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """One direction between two ranks; used by one thread at each of them."""

    group: dist.ProcessGroup
    """The rank that sends, and the one that receives."""
    device: Device

    def send(self, tensor: torch.Tensor) -> Sent:
        """Begin to send a contiguous tensor, which the device has computed.

        It must live until that was waited for.
        """
        with self.device.beside():
            return Sent(self.group.send([tensor], _TARGET, 0), self.device)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Hold the host until the next tensor has come in; return it.

        Raises:
            RuntimeError: The peer is gone. Where the communicator was aborted instead, nothing
                is raised, and no number in the tensor is of any worth.
        """
        with self.device.beside():
            tensor = self.device.allocate_beside(shape, dtype)
            self.group.recv([tensor], _SOURCE, 0).wait()
            self.device.synchronise()
        return tensor
