"""What the model of a worker computes with: parameters and sums on its device.

Where committed state is in the device's own memory, that is the state itself. Where it
is in the host's and the device is a GPU, parameters are copied up after every update,
and sums of gradients down before it (Varuna, section 7.1.1: optimizer state of 200
billion parameters in the host's memory).
"""

from __future__ import annotations

from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.pipeline.state.arena import SectionArena, SectionTensors


class WorkingSection:
    """One section as the model of a worker sees it.

    Args:
        arena: Its committed state.
        device: What the worker computes on.
        sums_gradients: Whether autograd adds up gradients in the section's memory.
    """

    def __init__(
        self, arena: SectionArena, device: Device, *, sums_gradients: bool
    ) -> None:
        self.arena = arena
        self._device = device
        self.is_copy = not device.is_host and arena.device is None
        """True if it is other memory than the arena's."""
        self.tensors: SectionTensors = arena
        if self.is_copy:
            self.tensors = arena.working_copy(device, with_gradients=sums_gradients)
        self._upload: Transfer | None = None

    def refresh(self) -> None:
        """Begin to copy the arena's parameters up, if this is a copy."""
        if self.is_copy and self.tensors.parameter_bytes.numel():
            source, target = self.arena.parameter_bytes, self.tensors.parameter_bytes
            self._upload = self._device.upload(source, target)

    def wait(self) -> None:
        """Compute with these parameters only from now on."""
        if self._upload is not None:
            self._device.wait(self._upload)
            self._upload = None
