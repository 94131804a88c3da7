"""Counts what operations of torch move."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from spottrain.pipeline.base.tracking import tensors_in


class Traffic(TorchDispatchMode):
    """Counts operations, and the bytes of their operands and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        """What is read and written in place counts twice, views not at all."""

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run and count an operation."""
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name.removeprefix("aten::")
        if operation.is_view or name in ("detach", "alias"):
            return result
        self.calls[name] += 1
        read = tensors_in((args, {key: one for key, one in (kwargs or {}).items() if key != "out"}))
        written = tensors_in(result)
        if name == "copy_":  # does not read what it writes to
            read = read[1:]
        if name.startswith("_fused"):
            gradients = tensors_in(args[1])
            written = [t for t in read if all(t is not one for one in gradients)]
        self.num_bytes[name] += sum(t.nbytes for t in (*read, *written))
        return result
