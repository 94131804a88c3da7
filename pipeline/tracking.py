"""Counts the bytes of tensors that a stage holds, to check the planner's memory model.

Counted: what lies in the arenas, stashed stage inputs, tensors that autograd saves.
Never resident set size, which also counts the interpreter and the allocator's reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from spottrain.morphing.schedule import Unit


class TensorTracker:
    """Bytes now and at their highest.

    Saved tensors are counted by hooks, which cost time, so only until ``settle``;
    afterwards every micro-batch is taken to save as much as the largest one did in the
    same chunk.

    Args:
        static_bytes: What is held from beginning to end.
        parameters: Part of that; autograd saves views of them, which take no memory.
    """

    def __init__(self, static_bytes: int, parameters: Iterable[torch.Tensor]) -> None:
        self._now = self.peak_bytes = static_bytes
        self._parameters = frozenset(map(_address, parameters))
        self._graphs: dict[Unit, int] = {}
        self._counts = True
        self._typical: dict[int, int] = {}
        """Of each chunk, for one micro-batch."""
        self.largest_saved_bytes = 0
        """Of the largest single tensor that was saved."""

    def hold(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is kept."""
        self._add(tensor.numel() * tensor.element_size())

    def release(self, tensor: torch.Tensor) -> None:
        """Note that a tensor that was held is not kept any more."""
        self._add(-tensor.numel() * tensor.element_size())

    @contextmanager
    def graph(
        self, unit: Unit, activation: torch.Tensor | None, keep: bool
    ) -> Iterator[None]:
        """Count what autograd saves inside, if it saves anything.

        Args:
            unit: Whose graph it is.
            activation: The stage's input, which is counted where it is held.
            keep: Whether a graph is built at all.
        """
        if not keep:
            yield
            return
        if not self._counts:
            yield
            self._set_graph(unit, self._typical.get(unit[1], 0))
            return
        seen: dict[int, int] = {}
        elsewhere = set(self._parameters)
        if activation is not None:
            elsewhere.add(_address(activation))

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if (address := _address(tensor)) not in elsewhere:
                seen[address] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        num_bytes, chunk = sum(seen.values()), unit[1]
        self._typical[chunk] = max(self._typical.get(chunk, 0), num_bytes)
        self.largest_saved_bytes = max(self.largest_saved_bytes, *seen.values(), 0)
        self._set_graph(unit, num_bytes)

    def release_graph(self, unit: Unit) -> None:
        """Note that the backward of a micro-batch has freed what was saved for it."""
        self._add(-self._graphs.pop(unit, 0))

    def settle(self) -> bool:
        """Stop counting saved tensors: one mini-batch has shown what they take.

        Returns:
            Whether that was the first mini-batch.
        """
        was_first, self._counts = self._counts, False
        return was_first

    def _set_graph(self, unit: Unit, num_bytes: int) -> None:
        self._graphs[unit] = num_bytes
        self._add(num_bytes)

    def _add(self, num_bytes: int) -> None:
        self._now += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._now)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
