"""What the model of a worker computes with: parameters and sums on its device.

Where committed state is in the device's own memory, that is the state itself. Where it
is in the host's and the device is a GPU, parameters are copied up after every update,
and sums of gradients down before it (Varuna, section 7.1.1: optimizer state of 200
billion parameters in the host's memory). Copies of matrices have the type that autocast
would convert them to: the same numbers in half the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.pipeline.state.arena import SectionArena


def lowered_types(
    parameters: Mapping[str, torch.dtype], lowered: torch.dtype | None, matrices: Collection[str]
) -> dict[str, torch.dtype]:
    """Return the types of copies that are not those of the parameters.

    Args:
        parameters: Their types, by name.
        lowered: Type of copies of ``matrices``; ``None``: that of the parameters.
        matrices: Names of parameters.
    """
    if lowered is None:
        return {}
    return {
        name: lowered
        for name, dtype in parameters.items()
        if name in matrices and dtype is torch.float32
    }


class WorkingSection:
    """One section as the model of a worker sees it.

    Args:
        arena: Its committed state.
        device: What the worker computes on.
        sums_gradients: Whether gradients are added up in the section's memory.
        lowered: Type of copies of ``matrices``; ``None``: that of the parameters.
        matrices: Names of parameters.
        step: Of a mini-batch that is computed with it. Where two versions are kept, the
            others are those before and after it by an even number.
    """

    def __init__(
        self,
        arena: SectionArena,
        device: Device,
        *,
        sums_gradients: bool,
        lowered: torch.dtype | None = None,
        matrices: Collection[str] = (),
        step: int = 0,
    ) -> None:
        self.arena = arena
        self._device = device
        self._source = arena.parameters_at(step - 1 if arena.versions > 1 else step)
        self.target_gradients = arena.gradients_of(step)
        """Of the arena: where sums go."""
        self.target_runs = arena.gradient_runs_of(step)
        self.is_copy = not device.is_host and arena.device is None
        """True if it is other memory than the arena's."""
        self.parameters = self._source
        self.gradients: Mapping[str, torch.Tensor] = self.target_gradients
        self.gradient_runs: Sequence[torch.Tensor] = self.target_runs
        """As the arena's; empty copies where gradients are not added up here."""
        self._staged: dict[str, torch.Tensor] = {}
        """Page-locked room for parameters that are converted on their way."""
        self._uploads: list[Transfer] = []
        if self.is_copy:
            self._make_copies(sums_gradients, lowered, matrices)

    def _make_copies(
        self,
        sums_gradients: bool,
        lowered: torch.dtype | None,
        matrices: Collection[str],
    ) -> None:
        self.gradients, self.gradient_runs = {}, []
        if sums_gradients:
            memory = self._device.allocate(self.arena.gradients_bytes)
            self.gradients, self.gradient_runs = self.arena.gradients_in(memory)
        self.parameters = parameters = {}
        own = {name: source.dtype for name, source in self._source.items()}
        types = lowered_types(own, lowered, matrices)
        for name, source in self._source.items():
            dtype = types.get(name, source.dtype)
            if name in types:
                self._staged[name] = self._device.allocate_host(source.shape, dtype)
            memory = self._device.allocate(source.numel() * dtype.itemsize)
            parameters[name] = memory.view(dtype).view(source.shape)

    def refresh(self) -> None:
        """Begin to copy the arena's parameters up, if this is a copy."""
        for name, target in self.parameters.items() if self.is_copy else ():
            source = self._source[name]
            if name in self._staged:
                source = self._staged[name].copy_(source)
            if source.numel():
                self._uploads.append(self._device.upload(source, target))

    def wait(self) -> None:
        """Compute with these parameters only from now on."""
        for upload in self._uploads:
            self._device.wait(upload)
        self._uploads.clear()
