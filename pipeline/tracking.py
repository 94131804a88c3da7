"""Counts the bytes of tensors that a stage holds, to check the planner's memory model.

Counted: what lies in the arenas, stashed stage inputs, tensors that autograd saves.
Never resident set size, which also counts the interpreter and the allocator's reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class TensorTracker:
    """Bytes now and at their highest.

    Saved tensors are counted by hooks, which cost time, so only until ``settle``;
    afterwards every micro-batch is taken to save as much as the largest one did.

    Args:
        static_bytes: What is held from beginning to end.
        parameters: Part of that; autograd saves views of them, which take no memory.
    """

    def __init__(self, static_bytes: int, parameters: Iterable[torch.Tensor]) -> None:
        self._now = self.peak_bytes = static_bytes
        self._parameters = frozenset(map(_address, parameters))
        self._graphs: dict[int, int] = {}
        self._counts = True
        self._typical = 0
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
        self, microbatch: int, activation: torch.Tensor | None, keep: bool
    ) -> Iterator[None]:
        """Count what autograd saves inside, if it saves anything.

        Args:
            microbatch: Whose graph it is.
            activation: The stage's input, which is counted where it is held.
            keep: Whether a graph is built at all.
        """
        if not keep:
            yield
            return
        if not self._counts:
            yield
            self._set_graph(microbatch, self._typical)
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
        self._typical = max(self._typical, sum(seen.values()))
        self.largest_saved_bytes = max(self.largest_saved_bytes, *seen.values(), 0)
        self._set_graph(microbatch, sum(seen.values()))

    def release_graph(self, microbatch: int) -> None:
        """Note that the backward of a micro-batch has freed what was saved for it."""
        self._add(-self._graphs.pop(microbatch, 0))

    def settle(self) -> bool:
        """Stop counting saved tensors: one mini-batch has shown what they take.

        Returns:
            Whether that was the first mini-batch.
        """
        was_first, self._counts = self._counts, False
        return was_first

    def _set_graph(self, microbatch: int, num_bytes: int) -> None:
        self._graphs[microbatch] = num_bytes
        self._add(num_bytes)

    def _add(self, num_bytes: int) -> None:
        self._now += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._now)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
