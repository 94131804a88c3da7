"""What the model of a worker computes with: parameters and sums on its device.

Where committed state is in the device's own memory, that is the state itself. Where it
is in the host's and the device is a GPU, parameters are copied up after every update,
and sums of gradients down before it (Varuna, section 7.1.1: optimizer state of 200
billion parameters in the host's memory). Copies of matrices have the type that autocast
would convert them to: the same numbers in half the memory.

Ranks that share the state of their stage have copies of what others hold; where they also
divide its matrices, each has copies of its parts alone, of all sections. So all compute with
parts that lie in memory alike, whoever holds what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.pipeline.state.arena import ALIGNMENT_BYTES, SectionArena

Types = Mapping[str, torch.dtype]
"""Of copies of parameters, by name, where they are others than the parameters'."""


@dataclass(frozen=True, slots=True)
class Run:
    """How tensors of one type lie side by side; of those that ranks divide, the parts of one."""

    dtype: torch.dtype
    divided: bool
    trained: bool
    places: Mapping[str, tuple[int, tuple[int, ...]]]
    """By name, the first element of each, and its shape."""
    size: int
    """Elements, padding included."""

    def tensors_in(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors by name, over flat memory of ``size`` elements."""
        return {
            # Each counts its own changes, as in the arena.
            name: memory[start : start + shape_elements(shape)].view(shape).data
            for name, (start, shape) in self.places.items()
        }


def shape_elements(shape: Sequence[int]) -> int:
    """Return how many elements a tensor has."""
    return torch.Size(shape).numel()


def lay_out(
    tensors: Mapping[str, torch.Tensor],
    shards: Shards = ALONE,
    types: Types | None = None,
    trained: Collection[str] | None = None,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> list[Run]:
    """Lay tensors out in runs, their order kept within each.

    Args:
        tensors: By name, whole.
        shards: Of which each rank has a part alone.
        types: Of those that are to have another one.
        trained: Names of those that are trained; by default all.
        alignment_bytes: Between their beginnings.
    """
    kinds: defaultdict[tuple[torch.dtype, bool, bool], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        dtype = (types or {}).get(name, tensor.dtype)
        kind = dtype, shards.dimension(name) is not None, trained is None or name in trained
        kinds[kind].append(name)
    runs = []
    for (dtype, divided, learns), names in kinds.items():
        places, size, unit = {}, 0, max(1, alignment_bytes // dtype.itemsize)
        for name in names:
            shape = shards.shape_of(name, tensors[name].shape)
            places[name] = size, shape
            size += -(-shape_elements(shape) // unit) * unit
        runs.append(Run(dtype, divided, learns, places, size))
    return runs


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
        arena: Its committed state, or the numbers of what another rank holds.
        device: What the worker computes on.
        sums_gradients: Whether gradients are added up in the section's memory.
        lowered: Type of copies of ``matrices``; ``None``: that of the parameters.
        matrices: Names of parameters.
        step: Of a mini-batch that is computed with it. Where two versions are kept, the
            others are those before and after it by an even number.
        shards: What this rank has of matrices that several divide.
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
        shards: Shards = ALONE,
    ) -> None:
        self.arena, self.shards, self._device = arena, shards, device
        self._source = arena.parameters_at(step - 1 if arena.versions > 1 else step)
        self.target_gradients = arena.gradients_of(step)
        """Of the arena: where sums go."""
        self.target_runs = arena.gradient_runs_of(step)
        self.follows = arena.is_held and shards.size == 1
        """True if the arena's parameters come here, and sums go there, as they lie in memory."""
        moves = not device.is_host and arena.device is None
        self.is_copy = moves or not self.follows
        """True if it is other memory than the arena's."""
        types = lowered_types(
            {name: source.dtype for name, source in self._source.items()}, lowered, matrices
        )
        self.parameter_runs = lay_out(self._source, shards, types, self.target_gradients)
        """As copies have them."""
        self.gradient_layout = lay_out(self.target_gradients, shards)
        """Of ``gradient_runs``, each with the gradients of a type."""
        self.parameters = self._source
        """This rank's part of each; so are ``gradients``, in the arena's order."""
        self.gradients: Mapping[str, torch.Tensor] = self.target_gradients
        self.gradient_runs: Sequence[torch.Tensor] = self.target_runs
        """Empty copies where gradients are not added up here."""
        self._parameter_memory: list[torch.Tensor] = []
        self._staged: dict[str, torch.Tensor] = {}
        """Page-locked room for parameters that are converted on their way."""
        self._uploads: list[Transfer] = []
        if self.is_copy:
            self._make_copies(sums_gradients)

    def _make_copies(self, sums_gradients: bool) -> None:
        self.gradients, self.gradient_runs = {}, []
        if sums_gradients:
            self.gradient_runs, made = self._allocate(self.gradient_layout)
            self.gradients = {name: made[name] for name in self.target_gradients}
        self._parameter_memory, self.parameters = self._allocate(self.parameter_runs)
        if self.follows:
            self._staged = {
                name: self._device.allocate_host(copy.shape, copy.dtype)
                for name, copy in self.parameters.items()
                if copy.dtype is not self._source[name].dtype
            }

    def _allocate(self, runs: Sequence[Run]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return memory for each run, and the tensors over it by name."""
        memory = [self._device.allocate(r.size * r.dtype.itemsize).view(r.dtype) for r in runs]
        tensors: dict[str, torch.Tensor] = {}
        for run, own in zip(runs, memory, strict=True):
            tensors |= run.tensors_in(own)
        return memory, tensors

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """All that is not the arena's, flat."""
        return [*self._parameter_memory, *(self.gradient_runs if self.is_copy else ())]

    def received(self, run: Run) -> torch.Tensor | None:
        """Return where a run of parameters comes to; ``None``: it follows the arena's."""
        return None if self.follows else self._parameter_memory[self.parameter_runs.index(run)]

    def outgoing(self, run: Run, *, on_host: bool) -> torch.Tensor:
        """Return a run of parameters as ranks that compute with them have it.

        Args:
            run: One of ``parameter_runs``.
            on_host: Where the result is to be.

        Returns:
            A row for each part of what they divide, of all else one.
        """
        device = self._device
        # Whole copies on the device are as the host's.
        source = self.parameters if self.follows else self.arena.parameters
        is_there = device.is_host or (not self.follows and self.arena.device is None)
        shape = self.shards.size if run.divided else 1, run.size
        if is_there:
            rows = device.allocate_host(shape, run.dtype)
        else:
            num_bytes = shape_elements(shape) * run.dtype.itemsize
            rows = device.allocate(num_bytes).view(run.dtype).view(shape)
        parts = {name: self.shards.parts_of(name, source[name]) for name in run.places}
        for index, row in enumerate(rows):
            for name, target in run.tensors_in(row).items():
                target.copy_(parts[name][index])
        if on_host and not is_there:
            return device.finish(device.download(rows))
        if is_there and not on_host:
            return device.wait(device.upload(rows))
        return rows

    def refresh(self) -> None:
        """Begin to copy the arena's parameters up, if this is a copy that follows them."""
        for name, target in self.parameters.items() if self.is_copy and self.follows else ():
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
