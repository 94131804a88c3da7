"""Stand-ins for micro-batches, on stages that use no value of them.

Such a stage still runs the user's code before its sections, which looks at shapes. So a
stand-in serves only for a micro-batch of its very structure and shapes: the stage learns
the signature of the true one from the stage before, with the activation.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from spottrain.pipeline.base.containers import know_classes_of


@dataclass(frozen=True, slots=True)
class BlankBatch:
    """Makes micro-batches of zeros, of the shapes that the tracer has seen."""

    structure: TreeSpec
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Of each tensor, in micro-batches of one and of two examples."""
    dtypes: tuple[torch.dtype, ...]

    def make(self, examples: int, device: torch.device | str = "cpu") -> Any:
        """Return zeros for a micro-batch of as many examples."""
        leaves = [
            torch.zeros(
                [a + (b - a) * (examples - 1) for a, b in zip(one, two, strict=True)],
                dtype=dtype,
                device=device,
            )
            for (one, two), dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        know_classes_of(self.structure)
        return tree_unflatten(leaves, self.structure)


def blank_of(one: Any, two: Any) -> BlankBatch | None:
    """Return the stand-in for batches like these, of one and of two examples.

    ``None`` if they hold anything but ordinary tensors, or differ in structure.
    """
    (first, structure), (second, other) = tree_flatten(one), tree_flatten(two)
    if structure != other or not all(map(_is_plain, (*first, *second))):
        return None
    pairs = list(zip(first, second, strict=True))
    if any((a.dtype, a.dim()) != (b.dtype, b.dim()) for a, b in pairs):
        return None
    return BlankBatch(
        structure,
        tuple((tuple(a.shape), tuple(b.shape)) for a, b in pairs),
        tuple(a.dtype for a in first),
    )


def signature_of(batch: Any) -> int:
    """Return a positive number for structure, shapes and types; 0: nothing stands in."""
    leaves, structure = tree_flatten(batch)
    if not all(map(_is_plain, leaves)):
        return 0
    parts = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves]
    text = repr((structure, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") + 1


def _is_plain(leaf: object) -> bool:
    return type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.requires_grad
